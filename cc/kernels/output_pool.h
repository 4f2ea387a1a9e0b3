// Memory for the outputs of the exchange op, kept and used again: fresh pages for
// every exchange would cost more than the exchange (page faults).
#ifndef TF_SMB_CC_KERNELS_OUTPUT_POOL_H_
#define TF_SMB_CC_KERNELS_OUTPUT_POOL_H_

#include <cstddef>
#include <map>
#include <vector>

#include "cc/common/memory_mapping.h"
#include "cc/common/mutex.h"

namespace tf_smb {

// Thread-safe. Hands out blocks aligned to 64 bytes; as many blocks of a size stay
// as were ever in use at once.
class OutputPool {
 public:
  // Null when the system has no memory. Give the block back with Release.
  void* Take(size_t bytes) EXCLUDES(mutex_);
  void Release(void* block) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::map<size_t, std::vector<void*>> free_ GUARDED_BY(mutex_);
  std::map<void*, MemoryMapping> blocks_ GUARDED_BY(mutex_);
};

// Never destroyed: tensors may outlive every other object of the library.
OutputPool& GlobalOutputPool();

}  // namespace tf_smb

#endif  // TF_SMB_CC_KERNELS_OUTPUT_POOL_H_
