// What memory allows: the traffic of the box's operations without sharing, locks, checks
// and choices, to measure them against.
#ifndef TF_SMB_CC_BENCH_MEMORY_LOOPS_H_
#define TF_SMB_CC_BENCH_MEMORY_LOOPS_H_

#include <cstddef>

namespace tf_smb {

// The limit of an exchange: reads and writes both arrays once, in place:
// d = rate (a - b); a -= d; b += d.
void MoveLoop(float rate, float* a, float* b, size_t count);

// The limit of a read or a write: one memcpy.
void CopyLoop(const void* from, void* to, size_t size_bytes);

// The limit of an accumulate: g += scale x.
void AddLoop(float scale, const float* x, float* g, size_t count);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BENCH_MEMORY_LOOPS_H_
