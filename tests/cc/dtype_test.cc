#include "cc/wire/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace tf_smb {
namespace {

struct Expected {
  int number;
  const char* name;
  uint64_t bytes;
  bool averaged;
  const char* center;
};

// The numbers lie in segments and travel in messages: frozen.
constexpr Expected kAll[] = {
    {1, "float32", 4, true, "float32"},      {2, "float64", 8, true, "float64"},
    {3, "float16", 2, true, "float32"},      {4, "bfloat16", 2, true, "float32"},
    {5, "bool", 1, false, "bool"},           {6, "int8", 1, false, "int8"},
    {7, "int16", 2, false, "int16"},         {8, "int32", 4, false, "int32"},
    {9, "int64", 8, false, "int64"},         {10, "uint8", 1, false, "uint8"},
    {11, "uint16", 2, false, "uint16"},      {12, "uint32", 4, false, "uint32"},
    {13, "uint64", 8, false, "uint64"},      {14, "complex64", 8, false, "complex64"},
    {15, "complex128", 16, false, "complex128"},
};

TEST(DTypeTest, EveryDTypeIsWhatItWas) {
  for (const Expected& expected : kAll) {
    const auto dtype = static_cast<DType>(expected.number);
    EXPECT_TRUE(IsKnown(dtype));
    EXPECT_STREQ(DTypeName(dtype), expected.name);
    EXPECT_EQ(DTypeFromName(expected.name), dtype);
    EXPECT_EQ(ElementBytes(dtype), expected.bytes);
    EXPECT_EQ(IsAveraged(dtype), expected.averaged);
    EXPECT_STREQ(DTypeName(CenterDType(dtype)), expected.center);
    EXPECT_EQ(CenterDType(CenterDType(dtype)), CenterDType(dtype));
  }
}

TEST(DTypeTest, AllOtherBytesAreUnknown) {
  std::set<int> known;
  for (const Expected& expected : kAll) known.insert(expected.number);
  for (int number = 0; number <= 255; ++number) {
    if (known.count(number) > 0) continue;
    const auto dtype = static_cast<DType>(number);
    EXPECT_FALSE(IsKnown(dtype)) << number;
    EXPECT_EQ(ElementBytes(dtype), 0u);
    EXPECT_FALSE(IsAveraged(dtype));
    EXPECT_EQ(CenterDType(dtype), dtype);
    EXPECT_STREQ(DTypeName(dtype), "unknown dtype");
  }
}

TEST(DTypeTest, OtherNamesAreNone) {
  for (const char* const name : {"", "float", "Float32", "float8", "str", "unknown dtype"}) {
    EXPECT_FALSE(DTypeFromName(name).has_value()) << name;
  }
}

TEST(DTypeTest, ListNamesThemAll) {
  std::string all;
  for (const Expected& expected : kAll) {
    all += (all.empty() ? "" : ", ") + std::string(expected.name);
  }
  EXPECT_EQ(AllDTypeNames(), all);
}

}  // namespace
}  // namespace tf_smb
