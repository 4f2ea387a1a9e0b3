// The exchange, element by element: the one place that computes how a worker's
// weights and the center move toward each other.
//
// Pure functions on spans of elements. `dtype` is what x, and `out` where it is the
// worker's, are made of; the center and `last` are of CenterDType(dtype): float32 for
// float16 and bfloat16, else the same. The arithmetic is done in the center's dtype and
// rounded to the worker's to nearest, ties to even. Whoever calls holds the lock of the
// chunk that `center` lies in.
#ifndef TF_SMB_CC_BOX_EXCHANGE_KERNEL_H_
#define TF_SMB_CC_BOX_EXCHANGE_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "cc/wire/dtype.h"

namespace tf_smb {

// x: the worker's weights, g: the center, l: x as the last exchange left it.
// Never renumber: the values travel in messages.
enum class MoveKind : uint8_t {
  // g <- x, and x stays: `out` is not touched. For a worker that trains alone.
  kCopy = 1,
  // d = rate (x - g); x <- x - d; g <- g + d. Elastic averaging (EASGD, Zhang et
  // al. 2015, arXiv:1412.6651, equations 5 and 6, as one atomic move).
  kElastic = 2,
  // g <- g + rate (x - l); x <- g; l <- x as the worker's dtype holds it. Delta averaging
  // (asynchronous local SGD).
  kDelta = 3,
  // out <- g + rate x. `out` is of the center's dtype, and may be the center itself; the
  // center is not written otherwise.
  kAccumulate = 4,
  // out <- g + rate (x - g): a weighted mean. `out` as for kAccumulate.
  kBlend = 5,
};

enum class MoveOutput : uint8_t {
  kValue = 1,  // out = the new x; out may be x itself
  kDelta = 2,  // out = old x - new x: to be subtracted by the caller; out is not x
};

// kCopy ends at the first block of so many bytes of x that holds a NaN or Inf.
constexpr size_t kCopyBlockBytes = 8192;

struct Move {
  MoveKind kind = MoveKind::kElastic;
  // Rounded to the center's dtype before it is used.
  double rate = 0.0;
  MoveOutput output = MoveOutput::kValue;  // of kElastic and kDelta
  // The exchange is larger than the cache: what this move writes and does not read
  // (`center` of kCopy, `out` of MoveOutput::kDelta) goes past it. Same results.
  bool stream = false;
};

// `last` is needed by kDelta; kCopy sets it to x unless it is null; else not looked at. Of
// float16 and bfloat16, kDelta sets it to what the worker holds in its own dtype, after
// MoveOutput::kDelta once it has subtracted `out`. False if a NaN or Inf was found, or what
// the worker's dtype cannot hold: then no element that it would have reached was moved (of
// kCopy: none from its block on), and `out` says so. Needs IsAveraged(dtype),
// except kCopy without `last`.
bool ApplyMove(const Move& move, DType dtype, const void* x, void* center, void* last, void* out,
               size_t count);

// kDelta in two halves, for a center that lies elsewhere: the worker sends
// progress = x - l, of the center's dtype; there kAccumulate, with CenterDType(dtype) as its
// dtype, gives moved = g + rate * progress; FinishDelta does what is left at the worker. The
// same bits as kDelta in one piece.
void DeltaProgress(DType dtype, const void* x, const void* last, void* progress, size_t count);
void FinishDelta(MoveOutput output, DType dtype, const void* x, const void* moved, void* last,
                 void* out, size_t count);

// Between the worker's dtype and the center's. Plain copies where they are the same.
void ToCenter(DType dtype, const void* values, void* center, size_t count);
void FromCenter(DType dtype, const void* center, void* values, size_t count);

// False if any element is NaN or infinite. True for what is not IsAveraged.
bool AllFinite(DType dtype, const void* values, size_t count);

// Which instruction set ApplyMove runs with on this machine: "avx2" or "baseline".
const char* KernelInstructionSet();

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_EXCHANGE_KERNEL_H_
