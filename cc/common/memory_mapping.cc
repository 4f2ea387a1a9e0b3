#include "cc/common/memory_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "cc/common/clock.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace tf_smb {
namespace {

// Of x86-64, and of 64-bit Arm with 4 KiB pages. Elsewhere the advice goes unheard.
constexpr uint64_t kHugePageBytes = 2 << 20;
// Finding huge pages takes the system 0.1 s for 1 GB when memory is free, and much
// longer when it has to move other pages out of the way.
constexpr double kCollapseSeconds = 1.0;

char* RoundUpToHugePage(void* address) {
  const auto value = reinterpret_cast<uintptr_t>(address);
  return reinterpret_cast<char*>((value + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
}

// Address space for `size_bytes` at a multiple of the huge page size; null if there
// is none.
void* ReserveAddresses(uint64_t size_bytes) {
  const uint64_t larger_bytes = size_bytes + kHugePageBytes;
  void* const begin = mmap(nullptr, larger_bytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  char* const aligned = RoundUpToHugePage(begin);
  const auto before_bytes = static_cast<uint64_t>(aligned - static_cast<char*>(begin));
  if (before_bytes > 0) munmap(begin, before_bytes);
  munmap(aligned + size_bytes, kHugePageBytes - before_bytes);
  return aligned;
}

// "max" and unreadable files count as no limit.
uint64_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return (file >> value) ? value : std::numeric_limits<uint64_t>::max();
}

// Of a cgroup's usage, the file cache, which the kernel gives up before it refuses
// anything. Shared memory is none of it.
uint64_t ReadFileCache(const std::string& stat_path, const std::string& prefix) {
  std::ifstream file(stat_path);
  std::string key;
  uint64_t bytes = 0, cached = 0;
  while (file >> key >> bytes) {
    if (key == prefix + "active_file" || key == prefix + "inactive_file") cached += bytes;
  }
  return cached;
}

uint64_t CgroupHeadroom(const std::string& folder, const char* limit_file, const char* usage_file,
                        const char* stat_prefix) {
  const uint64_t limit = ReadNumber(folder + limit_file);
  uint64_t usage = ReadNumber(folder + usage_file);
  if (limit == std::numeric_limits<uint64_t>::max() ||
      usage == std::numeric_limits<uint64_t>::max()) {
    return std::numeric_limits<uint64_t>::max();
  }
  usage -= std::min(usage, ReadFileCache(folder + "memory.stat", stat_prefix));
  return limit > usage ? limit - usage : 0;
}

// This process' cgroup and all above it, whose limits count too, as folders with a slash
// at the end. `tag` is what /proc/self/cgroup has before its path.
std::vector<std::string> CgroupFolders(const std::string& root, const std::string& tag) {
  std::vector<std::string> folders = {root + "/"};
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t found = line.find(tag);
    if (found == std::string::npos) continue;
    // In a container the path may be one of the host's, with no folder here.
    std::string path = line.substr(found + tag.size());
    while (path.size() > 1) {
      folders.push_back(root + path + "/");
      path.resize(path.rfind('/'));
    }
  }
  return folders;
}

uint64_t SystemAvailable() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  uint64_t kib = 0;
  while (meminfo >> key >> kib) {
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::numeric_limits<uint64_t>::max();
}

// An errno. Any signal interrupts the allocation of shared memory.
int Allocate(int fd, uint64_t offset, uint64_t size_bytes) {
  int error;
  do {
    error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(size_bytes));
  } while (error == EINTR);
  return error;
}

}  // namespace

Result<MemoryMapping> MemoryMapping::MapShared(int fd, uint64_t size_bytes) {
  const bool whole_pages = size_bytes % static_cast<uint64_t>(getpagesize()) == 0;
  void* const place =
      whole_pages && size_bytes >= kHugePageBytes ? ReserveAddresses(size_bytes) : nullptr;
  void* const address = mmap(place, size_bytes, PROT_READ | PROT_WRITE,
                             place == nullptr ? MAP_SHARED : MAP_SHARED | MAP_FIXED, fd, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    if (place != nullptr) munmap(place, size_bytes);
    return ErrnoError(error, "cannot map " + std::to_string(size_bytes) + " bytes of a segment",
                      "[SMB-E002]");
  }
  return MemoryMapping(address, size_bytes);
}

Result<MemoryMapping> MemoryMapping::MapPrivate(uint64_t size_bytes) {
  size_bytes = std::max<uint64_t>(size_bytes, 1);
  void* address =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    return ErrnoError(errno, "cannot allocate " + std::to_string(size_bytes) + " bytes",
                      "[SMB-E003]");
  }
  madvise(address, size_bytes, MADV_HUGEPAGE);  // advice only: failure costs speed
  return MemoryMapping(address, size_bytes);
}

int MemoryMapping::Reserve(int fd) const {
  const Deadline deadline = Deadline::After(kCollapseSeconds);
  for (uint64_t at = 0; at + kHugePageBytes <= size_bytes_ && !deadline.Expired();
       at += kHugePageBytes) {
    // A huge page is made of what is there: of one small page and holes at once.
    if (Allocate(fd, at, 1) != 0) break;
    if (madvise(data() + at, kHugePageBytes, MADV_COLLAPSE) != 0) break;
  }
  return Allocate(fd, 0, size_bytes_);
}

MemoryMapping::~MemoryMapping() {
  if (address_ != nullptr) munmap(address_, size_bytes_);
}

uint64_t AvailableMemoryBytes() {
  uint64_t available = SystemAvailable();
  for (const std::string& folder : CgroupFolders("/sys/fs/cgroup", "0::")) {
    available =
        std::min(available, CgroupHeadroom(folder, "memory.max", "memory.current", ""));
  }
  for (const std::string& folder : CgroupFolders("/sys/fs/cgroup/memory", ":memory:")) {
    available = std::min(available, CgroupHeadroom(folder, "memory.limit_in_bytes",
                                                   "memory.usage_in_bytes", "total_"));
  }
  return available;
}

}  // namespace tf_smb
