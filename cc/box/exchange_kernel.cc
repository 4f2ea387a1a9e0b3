#include "cc/box/exchange_kernel.h"

#include <cstring>

#include "cc/box/exchange_kernel_set.h"

namespace tf_smb {
namespace {

const KernelSet*& Chosen() {
  static const KernelSet* chosen = &KernelSets().front();
  return chosen;
}

// Null for a dtype that is not IsAveraged: then all that can be done is a copy.
const TypedKernels* KernelsOf(DType dtype) {
  const KernelSet& set = *Chosen();
  switch (dtype) {
    case DType::kFloat32:
      return &set.float32;
    case DType::kFloat64:
      return &set.float64;
    case DType::kFloat16:
      return &set.float16;
    case DType::kBFloat16:
      return &set.bfloat16;
    default:
      return nullptr;
  }
}

void CopyElements(DType dtype, const void* from, void* to, size_t count) {
  if (count > 0) std::memcpy(to, from, count * ElementBytes(dtype));
}

}  // namespace

bool ApplyMove(const Move& move, DType dtype, const void* x, void* center, void* last, void* out,
               size_t count) {
  if (const TypedKernels* const kernels = KernelsOf(dtype)) {
    return kernels->move(move, x, center, last, out, count);
  }
  if (move.kind != MoveKind::kCopy) return false;
  CopyElements(dtype, x, center, count);
  return true;
}

void DeltaProgress(DType dtype, const void* x, const void* last, void* progress, size_t count) {
  if (const TypedKernels* const kernels = KernelsOf(dtype)) {
    kernels->progress(x, last, progress, count);
  }
}

void FinishDelta(MoveOutput output, DType dtype, const void* x, const void* moved, void* last,
                 void* out, size_t count) {
  if (const TypedKernels* const kernels = KernelsOf(dtype)) {
    kernels->finish(output, x, moved, last, out, count);
  }
}

void ToCenter(DType dtype, const void* values, void* center, size_t count) {
  if (const TypedKernels* const kernels = KernelsOf(dtype)) {
    kernels->to_center(values, center, count);
  } else {
    CopyElements(dtype, values, center, count);
  }
}

void FromCenter(DType dtype, const void* center, void* values, size_t count) {
  if (const TypedKernels* const kernels = KernelsOf(dtype)) {
    kernels->from_center(center, values, count);
  } else {
    CopyElements(dtype, center, values, count);
  }
}

bool AllFinite(DType dtype, const void* values, size_t count) {
  const TypedKernels* const kernels = KernelsOf(dtype);
  return kernels == nullptr || kernels->all_finite(values, count);
}

const char* KernelInstructionSet() { return Chosen()->name; }

void UseKernelSet(const KernelSet& set) { Chosen() = &set; }

}  // namespace tf_smb
