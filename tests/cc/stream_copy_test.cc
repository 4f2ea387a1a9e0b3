#include "cc/box/stream_copy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace tf_smb {
namespace {

// Every alignment of both sides and every length around the line size: what was to be
// copied is, and nothing beside it.
TEST(StreamCopyTest, EveryAlignmentAndLength) {
  std::vector<char> from(600), to(600), expected(600);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  for (size_t from_at = 0; from_at < 17; ++from_at) {
    for (size_t to_at = 0; to_at < 65; ++to_at) {
      for (const size_t size : {0u, 1u, 15u, 16u, 17u, 63u, 64u, 65u, 127u, 128u, 129u, 300u}) {
        std::fill(to.begin(), to.end(), '#');
        expected = to;
        std::memcpy(expected.data() + to_at, from.data() + from_at, size);
        StreamCopy(to.data() + to_at, from.data() + from_at, size);
        ASSERT_EQ(to, expected) << from_at << " " << to_at << " " << size;
      }
    }
  }
}

TEST(StreamCopyTest, Large) {
  const size_t size = (8 << 20) + 13;
  std::vector<char> from(size), to(size);
  for (size_t i = 0; i < size; ++i) from[i] = static_cast<char>(i ^ (i >> 11));
  StreamCopy(to.data(), from.data(), size);
  EXPECT_EQ(to, from);
}

TEST(StreamCopyTest, NothingMayBeNull) { StreamCopy(nullptr, nullptr, 0); }

}  // namespace
}  // namespace tf_smb
