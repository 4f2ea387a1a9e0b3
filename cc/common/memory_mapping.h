// Memory mappings with one owner, and how much memory there is to map.
#ifndef TF_SMB_CC_COMMON_MEMORY_MAPPING_H_
#define TF_SMB_CC_COMMON_MEMORY_MAPPING_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cc/common/status.h"

namespace tf_smb {

class MemoryMapping {
 public:
  // The first `size_bytes` of `fd`, shared, for reading and writing. At an address
  // that lets the system map huge pages of `fd` as such.
  static Result<MemoryMapping> MapShared(int fd, uint64_t size_bytes);
  // Private zeroed memory, with huge pages where the system lends them; `size_bytes`
  // may be 0.
  static Result<MemoryMapping> MapPrivate(uint64_t size_bytes);

  MemoryMapping() = default;
  ~MemoryMapping();
  MemoryMapping(MemoryMapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  MemoryMapping& operator=(MemoryMapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }

  // Allocates the memory of `fd`, which this maps from its start, now and not at the
  // first touch, where a lack of it would be a SIGBUS. In huge pages as far as the
  // system has them at hand. Returns 0 or an errno.
  int Reserve(int fd) const;

  char* data() const { return static_cast<char*>(address_); }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  MemoryMapping(void* address, uint64_t size_bytes)
      : address_(address), size_bytes_(size_bytes) {}
  void* address_ = nullptr;
  uint64_t size_bytes_ = 0;
};

// What this process may still allocate: the smaller of the system's available
// memory and what its cgroup (version 1 or 2) leaves.
uint64_t AvailableMemoryBytes();

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_MEMORY_MAPPING_H_
