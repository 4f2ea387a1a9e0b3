#include "cc/common/robust_mutex.h"

#include <cerrno>

namespace tf_smb {

Status RobustMutex::Init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  return error == 0 ? Status::Ok() : ErrnoError(error, "pthread_mutex_init");
}

LockOutcome RobustMutex::TryLock() { return Settle(pthread_mutex_trylock(&mutex_)); }

LockOutcome RobustMutex::LockUntil(const Deadline& deadline) {
  const timespec at = deadline.ToTimespec();
#if defined(__SANITIZE_THREAD__)
  // ThreadSanitizer does not intercept pthread_mutex_clocklock: poll instead.
  LockOutcome outcome;
  do {
    outcome = TryLock();
    const timespec pause{0, 50'000};
    if (outcome == LockOutcome::kBusy) nanosleep(&pause, nullptr);
  } while (outcome == LockOutcome::kBusy && !deadline.Expired());
  static_cast<void>(at);
  return outcome;
#else
  return Settle(pthread_mutex_clocklock(&mutex_, CLOCK_MONOTONIC, &at));
#endif
}

void RobustMutex::Unlock() { pthread_mutex_unlock(&mutex_); }

LockOutcome RobustMutex::Settle(int result) {
  switch (result) {
    case 0:
      return LockOutcome::kLocked;
    case EOWNERDEAD:
      pthread_mutex_consistent(&mutex_);
      return LockOutcome::kLockedAfterDeath;
    case EBUSY:
    case ETIMEDOUT:
    case EAGAIN:
      return LockOutcome::kBusy;
    default:
      return LockOutcome::kBroken;
  }
}

}  // namespace tf_smb
