#include "cc/kernels/output_pool.h"

#include <algorithm>
#include <utility>

namespace tf_smb {
namespace {

// Blocks are whole pages: small variables of one size class share a free list.
size_t RoundToPages(size_t bytes) { return std::max<size_t>(1, (bytes + 4095) / 4096) * 4096; }

}  // namespace

void* OutputPool::Take(size_t bytes) {
  const size_t rounded = RoundToPages(bytes);
  MutexLock lock(&mutex_);
  std::vector<void*>& free_blocks = free_[rounded];
  if (!free_blocks.empty()) {
    void* const block = free_blocks.back();
    free_blocks.pop_back();
    return block;
  }
  Result<MemoryMapping> mapping = MemoryMapping::MapPrivate(rounded);
  if (!mapping.ok()) return nullptr;
  void* const block = mapping->data();
  blocks_.emplace(block, std::move(mapping).value());
  return block;
}

void OutputPool::Release(void* block) {
  MutexLock lock(&mutex_);
  const auto found = blocks_.find(block);
  if (found == blocks_.end()) return;
  free_[found->second.size_bytes()].push_back(block);
}

OutputPool& GlobalOutputPool() {
  static OutputPool* const pool = new OutputPool();
  return *pool;
}

}  // namespace tf_smb
