// What memory allows: the traffic of an exchange without its locks, checks and
// choices, to measure the exchange against.
#ifndef TF_SMB_CC_BENCH_MEMORY_LIMIT_H_
#define TF_SMB_CC_BENCH_MEMORY_LIMIT_H_

#include <cstddef>

namespace tf_smb {

// Reads and writes both arrays once, in place: d = rate (a - b); a -= d; b += d.
void MemoryLimitPass(float rate, float* a, float* b, size_t count);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BENCH_MEMORY_LIMIT_H_
