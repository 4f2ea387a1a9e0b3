// What the kernel allows: processes that wait for each other on bare futexes, to measure
// the box's barriers and notifications against. Nobody here notices a death but by its
// time-out.
#ifndef TF_SMB_CC_BENCH_FUTEX_MEETINGS_H_
#define TF_SMB_CC_BENCH_FUTEX_MEETINGS_H_

#include <atomic>
#include <cstdint>

#include "cc/common/clock.h"
#include "cc/common/status.h"

namespace tf_smb {

// In memory that the processes share; zero at the beginning.
struct FutexMeeting {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> passed;  // barriers so far
  std::atomic<uint32_t> ball;    // odd: with the player who answers
};

// Returns when `workers` processes have come here. DEADLINE_EXCEEDED if they did not.
Status FutexBarrier(FutexMeeting* meeting, uint32_t workers, const Deadline& deadline);

// Plays the ball to the process in FutexAnswer, after spinning for `pause_nanos`, so that
// it is asleep; returns the nanoseconds until it is back. DEADLINE_EXCEEDED if it is not.
Result<int64_t> FutexRoundTrip(FutexMeeting* meeting, int64_t pause_nanos,
                               const Deadline& deadline);
// Plays the ball back, once.
Status FutexAnswer(FutexMeeting* meeting, const Deadline& deadline);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BENCH_FUTEX_MEETINGS_H_
