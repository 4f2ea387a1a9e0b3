#include "cc/bench/futex_meetings.h"

#include "cc/common/futex.h"

namespace tf_smb {
namespace {

// Returns the word once pending(word) is false. DEADLINE_EXCEEDED if it stays true.
template <typename Pending>
Result<uint32_t> SleepWhile(std::atomic<uint32_t>* word, const Deadline& deadline,
                            Pending pending) {
  for (;;) {
    const uint32_t seen = word->load();
    if (!pending(seen)) return seen;
    if (deadline.Expired()) {
      return DeadlineExceededError("the other processes of the benchmark did not come in time"
                                   " [SMB-E450]");
    }
    FutexWait(word, seen, deadline.RemainingNanos());
  }
}

void Play(std::atomic<uint32_t>* ball) {
  ball->fetch_add(1);
  FutexWakeAll(ball);
}

}  // namespace

Status FutexBarrier(FutexMeeting* meeting, uint32_t workers, const Deadline& deadline) {
  const uint32_t passed = meeting->passed.load();
  if (meeting->arrived.fetch_add(1) + 1 == workers) {
    meeting->arrived.store(0);
    meeting->passed.fetch_add(1);
    FutexWakeAll(&meeting->passed);
    return Status::Ok();
  }
  return SleepWhile(&meeting->passed, deadline,
                    [passed](uint32_t now) { return now == passed; })
      .status();
}

Result<int64_t> FutexRoundTrip(FutexMeeting* meeting, int64_t pause_nanos,
                               const Deadline& deadline) {
  const int64_t pause_ends = MonotonicNanos() + pause_nanos;
  while (MonotonicNanos() < pause_ends) {
  }
  const int64_t start = MonotonicNanos();
  Play(&meeting->ball);
  TF_SMB_RETURN_IF_ERROR(SleepWhile(&meeting->ball, deadline, [](uint32_t ball) {
                           return ball % 2 == 1;
                         }).status());
  return MonotonicNanos() - start;
}

Status FutexAnswer(FutexMeeting* meeting, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(SleepWhile(&meeting->ball, deadline, [](uint32_t ball) {
                           return ball % 2 == 0;
                         }).status());
  Play(&meeting->ball);
  return Status::Ok();
}

}  // namespace tf_smb
