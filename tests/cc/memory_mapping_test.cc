#include "cc/common/memory_mapping.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "cc/common/unique_fd.h"

namespace tf_smb {
namespace {

TEST(MemoryMappingTest, SharedMappingsSeeEachOther) {
  const UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), 4096), 0);
  const Result<MemoryMapping> a = MemoryMapping::MapShared(fd.get(), 4096);
  const Result<MemoryMapping> b = MemoryMapping::MapShared(fd.get(), 4096);
  ASSERT_TRUE(a.ok() && b.ok());
  a->data()[4095] = 'x';
  EXPECT_EQ(b->data()[4095], 'x');
  EXPECT_EQ(a->size_bytes(), 4096u);
}

TEST(MemoryMappingTest, PrivateMemoryIsZero) {
  for (const uint64_t bytes : {0u, 1u, 4097u, 3u << 20}) {
    Result<MemoryMapping> mapping = MemoryMapping::MapPrivate(bytes);
    ASSERT_TRUE(mapping.ok()) << bytes << ": " << mapping.status().message();
    ASSERT_NE(mapping->data(), nullptr);
    for (uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(mapping->data()[i], 0);
  }
}

TEST(MemoryMappingTest, MovesHaveOneOwner) {
  MemoryMapping first = std::move(MemoryMapping::MapPrivate(4096)).value();
  char* const data = first.data();
  MemoryMapping second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(first.data(), nullptr);  // NOLINT(bugprone-use-after-move): empty is the contract
  second = MemoryMapping();
  EXPECT_EQ(second.data(), nullptr);
  EXPECT_EQ(second.size_bytes(), 0u);
}

TEST(MemoryMappingTest, FailureHasTheSize) {
  const Result<MemoryMapping> mapping = MemoryMapping::MapPrivate(1ULL << 60);
  ASSERT_FALSE(mapping.ok());
  EXPECT_EQ(mapping.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(mapping.status().message().find("1152921504606846976"), std::string::npos);
  EXPECT_FALSE(MemoryMapping::MapShared(-1, 4096).ok());
}

// At a multiple of the huge page size, to the last byte, and gone when it ends.
TEST(MemoryMappingTest, LargeSharedMappingsAreAligned) {
  const uint64_t size = 5ULL << 30;
  const UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  Result<MemoryMapping> mapping = MemoryMapping::MapShared(fd.get(), size);
  ASSERT_TRUE(mapping.ok()) << mapping.status().message();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapping->data()) % (2 << 20), 0u);
  mapping->data()[size - 1] = 'x';
  char last;
  ASSERT_EQ(pread(fd.get(), &last, 1, static_cast<off_t>(size - 1)), 1);
  EXPECT_EQ(last, 'x');
}

TEST(MemoryMappingTest, ReserveTakesTheMemoryNow) {
  const uint64_t size = (4 << 20) + 4096;
  const UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), static_cast<off_t>(size)), 0);
  const Result<MemoryMapping> mapping = MemoryMapping::MapShared(fd.get(), size);
  ASSERT_TRUE(mapping.ok());
  ASSERT_EQ(mapping->Reserve(fd.get()), 0);
  struct stat info;
  ASSERT_EQ(fstat(fd.get(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, size);
}

TEST(MemoryMappingTest, SomeMemoryIsAvailable) {
  EXPECT_GT(AvailableMemoryBytes(), 1u << 20);
  EXPECT_LT(AvailableMemoryBytes(), 1ULL << 50);
}

}  // namespace
}  // namespace tf_smb
