// The loops of exchange_kernel.h, compiled once per instruction set. Behind that header;
// tests choose a set here.
#ifndef TF_SMB_CC_BOX_EXCHANGE_KERNEL_SET_H_
#define TF_SMB_CC_BOX_EXCHANGE_KERNEL_SET_H_

#include <cstddef>
#include <vector>

#include "cc/box/exchange_kernel.h"

namespace tf_smb {

// The functions of exchange_kernel.h for a dtype that IsAveraged.
struct TypedKernels {
  bool (*move)(const Move& move, const void* x, void* center, void* last, void* out, size_t count);
  void (*progress)(const void* x, const void* last, void* progress, size_t count);
  void (*finish)(MoveOutput output, const void* x, const void* moved, void* last, void* out,
                 size_t count);
  void (*to_center)(const void* values, void* center, size_t count);
  void (*from_center)(const void* center, void* values, size_t count);
  bool (*all_finite)(const void* values, size_t count);
};

struct KernelSet {
  const char* name;
  TypedKernels float32, float64, float16, bfloat16;
};

// Those that this machine has, the best one first. All give the same bits.
const std::vector<KernelSet>& KernelSets();

// For tests: `set`, one of KernelSets(), from now on. Not while another thread computes.
void UseKernelSet(const KernelSet& set);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_EXCHANGE_KERNEL_SET_H_
