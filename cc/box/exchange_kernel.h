// The exchange, element by element: the one place that computes how a worker's
// weights and the center move toward each other.
//
// Pure functions on spans of float32; whoever calls holds the lock of the chunk
// that `center` lies in.
#ifndef TF_SMB_CC_BOX_EXCHANGE_KERNEL_H_
#define TF_SMB_CC_BOX_EXCHANGE_KERNEL_H_

#include <cstddef>
#include <cstdint>

namespace tf_smb {

// x: the worker's weights, g: the center, l: x as the last exchange left it.
// Never renumber: the values travel in messages.
enum class MoveKind : uint8_t {
  // g <- x, and x stays: `out` is not touched. For a worker that trains alone.
  kCopy = 1,
  // d = rate (x - g); x <- x - d; g <- g + d. Elastic averaging (EASGD, Zhang et
  // al. 2015, arXiv:1412.6651, equations 5 and 6, as one atomic move).
  kElastic = 2,
  // g <- g + rate (x - l); x <- g; l <- g. Delta averaging (asynchronous local SGD).
  kDelta = 3,
};

enum class MoveOutput : uint8_t {
  kValue = 1,  // out = the new x; out may be x itself
  kDelta = 2,  // out = old x - new x: to be subtracted by the caller; out is not x
};

struct Move {
  MoveKind kind = MoveKind::kElastic;
  float rate = 0.0f;
  MoveOutput output = MoveOutput::kValue;
  // The exchange is larger than the cache: what this move writes and does not read
  // (`center` of kCopy, `out` of MoveOutput::kDelta) goes past it. Same results.
  bool stream = false;
};

// `last` is needed by kDelta; kCopy sets it to x unless it is null; else not looked at.
// False if a NaN or Inf was found: then no element whose center it would have reached
// was moved (of kCopy: none at all), and `out` says so.
bool ApplyMove(const Move& move, const float* x, float* center, float* last, float* out,
               size_t count);

// False if any element is NaN or infinite.
bool AllFinite(const float* values, size_t count);

// Which instruction set ApplyMove runs with on this machine: "avx2" or "baseline".
const char* KernelInstructionSet();

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_EXCHANGE_KERNEL_H_
