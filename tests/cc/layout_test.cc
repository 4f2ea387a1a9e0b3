#include "cc/wire/layout.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tf_smb {
namespace {

using Specs = std::vector<std::pair<std::string, std::vector<int64_t>>>;

std::vector<Variable> Variables(const Specs& specs) {
  std::vector<Variable> variables;
  for (const auto& [name, shape] : specs) {
    Variable variable;
    variable.name = name;
    variable.shape = shape;
    variables.push_back(variable);
  }
  return variables;
}

Result<Layout> Create(const Specs& specs) { return Layout::Create(Variables(specs)); }

TEST(LayoutTest, VariablesStartOnCacheLines) {
  const Layout layout =
      *Create({{"scalar", {}}, {"one", {1}}, {"none", {3, 0, 5}}, {"m", {3, 7}}, {"v", {16}}});
  const std::vector<Variable>& v = layout.variables();
  const uint64_t elements[] = {1, 1, 0, 21, 16};
  const uint64_t offsets[] = {0, 64, 128, 128, 256};
  for (size_t i = 0; i < v.size(); ++i) {
    EXPECT_EQ(v[i].num_elements, elements[i]) << i;
    EXPECT_EQ(v[i].offset_bytes, offsets[i]) << i;
  }
  EXPECT_EQ(layout.size_bytes(), 320u);
}

// Half precision takes a float32 in the center; everything else what it is.
TEST(LayoutTest, EveryDTypeHasItsPlace) {
  std::vector<Variable> variables;
  for (int number = 1; number <= 15; ++number) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {0}, {1}, {1001}}) {
      variables.push_back({"v", static_cast<DType>(number), shape});
    }
  }
  const Layout layout = *Layout::Create(variables);
  uint64_t offset = 0;
  for (const Variable& variable : layout.variables()) {
    const bool half =
        variable.dtype == DType::kFloat16 || variable.dtype == DType::kBFloat16;
    EXPECT_EQ(variable.element_bytes(), half ? 4 : ElementBytes(variable.dtype));
    EXPECT_EQ(variable.offset_bytes, offset);
    EXPECT_EQ(variable.size_bytes(), variable.num_elements * variable.element_bytes());
    offset += (variable.size_bytes() + 63) / 64 * 64;
  }
  EXPECT_EQ(layout.size_bytes(), offset);
  const Result<Layout> again = Layout::Decode(layout.Encode());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->size_bytes(), offset);
  EXPECT_TRUE(layout.CheckSame(*again, "it").ok());
}

TEST(LayoutTest, DTypesAreNamedAndCompared) {
  const Layout here = *Layout::Create({{"k", DType::kBFloat16, {2}}});
  const Layout theirs = *Layout::Create({{"k", DType::kFloat16, {2}}});
  EXPECT_EQ(here.CheckSame(theirs, "it").message(),
            "the models differ at variable 0: here 'k' bfloat16[2], in it 'k' float16[2] "
            "[SMB-E016]");
}

TEST(LayoutTest, UnknownDTypesAreRefused) {
  for (const int number : {0, 16, 255}) {
    const Status status = Layout::Create({{"k", static_cast<DType>(number), {2}}}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("'k' has dtype number " + std::to_string(number)),
              std::string::npos)
        << status.message();
  }
}

TEST(LayoutTest, SizesAre64Bit) {
  const Layout layout = *Create({{"a", {1LL << 20, (1LL << 13) + 1}}, {"b", {3}}});
  EXPECT_EQ(layout.variables()[0].num_elements, (1ULL << 33) + (1ULL << 20));
  EXPECT_EQ(layout.variables()[1].offset_bytes, (1ULL << 35) + (1ULL << 22));
  EXPECT_EQ(layout.size_bytes(), (1ULL << 35) + (1ULL << 22) + 64);
  EXPECT_TRUE(Create({{"most", {1LL << 46}}}).ok());
  EXPECT_TRUE(Layout::Create({{"most", DType::kBool, {1LL << 48}}}).ok());
}

TEST(LayoutTest, RefusesWhatCannotBe) {
  const std::vector<std::pair<Specs, std::string>> bad = {
      {{}, "1 to 1048576 variables, got 0"},
      {{{"a", {2, -1}}}, "'a' float32[2,-1] has a negative dimension"},
      {{{"a", {(1LL << 48) + 1}}}, "'a' float32[281474976710657] is too large"},
      {{{"a", {1LL << 40, 1LL << 40}}}, "is too large"},
      {{{"a", {INT64_MAX, INT64_MAX, 0}}}, "is too large"},
      {{{"a", {1LL << 46}}, {"b", {1}}}, "up to 'b' float32[1] are more than 2^48"},
      {{{"a", {(1LL << 46) + 1}}}, "up to 'a' float32[70368744177665] are more than 2^48"},
      {{{std::string(1025, 'n'), {1}}}, "a name over 1024 bytes"},
      {{{"a", std::vector<int64_t>(33, 1)}}, "more than 32 dimensions"},
  };
  for (const auto& [specs, text] : bad) {
    const Result<Layout> layout = Create(specs);
    ASSERT_FALSE(layout.ok()) << text;
    EXPECT_EQ(layout.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(layout.status().message().find(text), std::string::npos) << layout.status().message();
  }
}

TEST(LayoutTest, EncodingIsFrozen) {
  const Layout layout = *Create({{"w", {2, 3}}, {"", {}}});
  EXPECT_EQ(layout.Encode(), std::string("\x02\x00\x00\x00"
                                         "\x01\x00\x00\x00"
                                         "w"
                                         "\x01\x02"
                                         "\x02\x00\x00\x00\x00\x00\x00\x00"
                                         "\x03\x00\x00\x00\x00\x00\x00\x00"
                                         "\x00\x00\x00\x00"
                                         "\x01\x00",
                                         33));
}

TEST(LayoutTest, RoundTrips) {
  const Specs specs = {{"a/b", {4, 5}}, {"c", {}}, {"d", {0}}, {std::string(1024, 'x'), {7}},
                       {"deep", std::vector<int64_t>(32, 1)}};
  const Layout layout = *Create(specs);
  const Result<Layout> again = Layout::Decode(layout.Encode());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->size_bytes(), layout.size_bytes());
  ASSERT_EQ(again->variables().size(), specs.size());
  for (size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(again->variables()[i].name, specs[i].first);
    EXPECT_EQ(again->variables()[i].shape, specs[i].second);
  }
}

TEST(LayoutTest, EveryTruncationIsRefused) {
  const std::string bytes = Create({{"dense/kernel", {4, 5}}, {"dense/bias", {5}}})->Encode();
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_EQ(Layout::Decode(bytes.substr(0, length)).status().code(), StatusCode::kDataLoss)
        << length;
  }
  EXPECT_EQ(Layout::Decode(bytes + "x").status().code(), StatusCode::kDataLoss);
}

// Whatever the bits: DATA_LOSS, or a layout that encodes to the same bytes.
TEST(LayoutTest, FlippedBitsAreRefusedOrDecode) {
  const std::string bytes = Create({{"dense/kernel", {4, 5}}, {"b", {5, 0}}, {"c", {}}})->Encode();
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = bytes;
    for (uint32_t flips = 1 + random() % 3; flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1 << (random() % 8));
    }
    const Result<Layout> layout = Layout::Decode(damaged);
    if (layout.ok()) {
      EXPECT_EQ(layout->Encode(), damaged);
    } else {
      EXPECT_EQ(layout.status().code(), StatusCode::kDataLoss);
    }
  }
}

TEST(LayoutTest, CountIsNoReasonToAllocate) {
  EXPECT_EQ(Layout::Decode(std::string("\xff\xff\xff\xff", 4)).status().code(),
            StatusCode::kDataLoss);
}

TEST(LayoutTest, CheckSameIgnoresTheAutoNumberedPrefix) {
  EXPECT_TRUE(Create({{"dense_3/kernel", {2, 3}}})
                  ->CheckSame(*Create({{"dense/kernel", {2, 3}}}), "it")
                  .ok());
}

TEST(LayoutTest, CheckSameNamesTheFirstDifference) {
  const Layout here = *Create({{"a/k", {2}}, {"a/b", {3}}});
  const std::vector<std::pair<Specs, std::string>> theirs = {
      {{{"a/k", {2}}, {"a/c", {3}}},
       "the models differ at variable 1: here 'a/b' float32[3], in segment 's' 'a/c' float32[3] "
       "[SMB-E016]"},
      {{{"a/k", {2}}, {"a/b", {3, 1}}},
       "the models differ at variable 1: here 'a/b' float32[3], in segment 's' 'a/b' float32[3,1] "
       "[SMB-E016]"},
      {{{"x", {1}}, {"y", {1}}, {"z", {1}}},
       "the models differ at variable 0: here 'a/k' float32[2], in segment 's' 'x' float32[1] "
       "[SMB-E016]"},
      {{{"a/k", {2}}},
       "the models differ: 2 variables here, 1 in segment 's'; the first without a partner is "
       "'a/b' float32[3] here [SMB-E017]"},
      {{{"a/k", {2}}, {"a/b", {3}}, {"more", {}}},
       "the models differ: 2 variables here, 3 in segment 's'; the first without a partner is "
       "'more' float32[] there [SMB-E017]"},
  };
  for (const auto& [specs, text] : theirs) {
    const Status status = here.CheckSame(*Create(specs), "segment 's'");
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(), text);
  }
}

}  // namespace
}  // namespace tf_smb
