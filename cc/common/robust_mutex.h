// A mutex in shared memory that outlives its holder: when a process dies under it,
// the next locker gets it and is told so. Timed on the monotonic clock.
#ifndef TF_SMB_CC_COMMON_ROBUST_MUTEX_H_
#define TF_SMB_CC_COMMON_ROBUST_MUTEX_H_

#include <pthread.h>

#include "cc/common/clock.h"
#include "cc/common/status.h"

namespace tf_smb {

enum class LockOutcome {
  kLocked,
  kLockedAfterDeath,  // the last holder died under it: what it guards may be half done
  kBusy,              // held by a live (or stopped) thread until the deadline
  kBroken,            // not a mutex: the memory is damaged
};

// Lives inside a mapping: no constructor runs in the processes that only map it.
class RobustMutex {
 public:
  // Once, by the creator of the memory, before anybody else sees it.
  Status Init();
  LockOutcome TryLock();
  LockOutcome LockUntil(const Deadline& deadline);
  void Unlock();
  // As the C library has it; for telling a mutex from damaged memory.
  int kind() const;

 private:
  bool IsSound() const;
  LockOutcome Settle(int result);
  pthread_mutex_t mutex_;
};

inline bool Holds(LockOutcome outcome) {
  return outcome == LockOutcome::kLocked || outcome == LockOutcome::kLockedAfterDeath;
}

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_ROBUST_MUTEX_H_
