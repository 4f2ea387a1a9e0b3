#include "cc/bench/memory_limit.h"

namespace tf_smb {

void MemoryLimitPass(float rate, float* __restrict a, float* __restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float moved = rate * (a[i] - b[i]);
    a[i] -= moved;
    b[i] += moved;
  }
}

}  // namespace tf_smb
