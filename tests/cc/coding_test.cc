#include "cc/wire/coding.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace tf_smb {
namespace {

TEST(CodingTest, BytesAreFrozen) {
  Encoder encoder;
  encoder.PutU8(0xfe);
  encoder.PutU32(0x01020304);
  encoder.PutU64(0x1112131415161718);
  encoder.PutString("ab");
  EXPECT_EQ(encoder.bytes(), std::string("\xfe"
                                         "\x04\x03\x02\x01"
                                         "\x18\x17\x16\x15\x14\x13\x12\x11"
                                         "\x02\x00\x00\x00"
                                         "ab",
                                         19));
}

TEST(CodingTest, RoundTripsExtremes) {
  Encoder encoder;
  encoder.PutU8(255);
  encoder.PutU32(std::numeric_limits<uint32_t>::max());
  encoder.PutU64(std::numeric_limits<uint64_t>::max());
  encoder.PutString("");
  encoder.PutString(std::string("\0\xff", 2));
  Decoder decoder(encoder.bytes());
  EXPECT_EQ(decoder.GetU8(), 255);
  EXPECT_EQ(decoder.GetU32(), std::numeric_limits<uint32_t>::max());
  EXPECT_EQ(decoder.GetU64(), std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(decoder.GetString(0), "");
  EXPECT_EQ(decoder.GetString(2), std::string("\0\xff", 2));
  EXPECT_TRUE(decoder.Finish("it").ok());
}

TEST(CodingTest, ShortInputFailsForGood) {
  for (size_t length = 0; length < 4; ++length) {
    Decoder decoder(std::string_view("\1\1\1\1", length));
    EXPECT_EQ(decoder.GetU32(), 0u);
    EXPECT_FALSE(decoder.ok());
    EXPECT_EQ(decoder.GetU8(), 0);  // though a byte may be there
    EXPECT_EQ(decoder.Finish("it").code(), StatusCode::kDataLoss);
  }
}

TEST(CodingTest, StringLengthIsCheckedBeforeReading) {
  const std::string says_4_gib("\xff\xff\xff\xff"
                               "abc",
                               7);
  Decoder hostile(says_4_gib);
  EXPECT_EQ(hostile.GetString(std::numeric_limits<uint32_t>::max()), "");
  EXPECT_FALSE(hostile.ok());

  Encoder encoder;
  encoder.PutString("four");
  Decoder too_long(encoder.bytes());
  EXPECT_EQ(too_long.GetString(3), "");
  EXPECT_FALSE(too_long.ok());
  Decoder fits(encoder.bytes());
  EXPECT_EQ(fits.GetString(4), "four");
}

TEST(CodingTest, FinishNamesWhatIsTooLong) {
  Decoder decoder("abc");
  decoder.GetU8();
  EXPECT_EQ(decoder.Finish("a request").ToString(),
            "DATA_LOSS: a request is longer than its contents [SMB-E018]");
}

TEST(CodingTest, ChecksumIsFnv1a) {
  EXPECT_EQ(Checksum(""), 0xcbf29ce484222325ULL);
  EXPECT_EQ(Checksum("a"), 0xaf63dc4c8601ec8cULL);
  EXPECT_EQ(Checksum("foobar"), 0x85944171f73967e8ULL);
}

}  // namespace
}  // namespace tf_smb
