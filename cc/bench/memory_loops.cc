#include "cc/bench/memory_loops.h"

#include <cstring>

namespace tf_smb {

void MoveLoop(float rate, float* __restrict a, float* __restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float moved = rate * (a[i] - b[i]);
    a[i] -= moved;
    b[i] += moved;
  }
}

void CopyLoop(const void* from, void* to, size_t size_bytes) {
  if (size_bytes > 0) std::memcpy(to, from, size_bytes);
}

void AddLoop(float scale, const float* __restrict x, float* __restrict g, size_t count) {
  for (size_t i = 0; i < count; ++i) g[i] += scale * x[i];
}

}  // namespace tf_smb
