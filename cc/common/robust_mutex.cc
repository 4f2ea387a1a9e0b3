#include "cc/common/robust_mutex.h"

#include <cerrno>

namespace tf_smb {
namespace {

#if defined(__GLIBC__)
// The kind that Init gives. Other kinds, which damaged memory could show, would make
// the C library take roads that abort.
int ExpectedKind() {
  static const int kind = [] {
    RobustMutex mutex;
    return mutex.Init().ok() ? mutex.kind() : -1;
  }();
  return kind;
}
#endif

}  // namespace

bool RobustMutex::IsSound() const {
#if defined(__GLIBC__)
  return kind() == ExpectedKind();
#else
  return true;
#endif
}

int RobustMutex::kind() const {
#if defined(__GLIBC__)
  return __atomic_load_n(&mutex_.__data.__kind, __ATOMIC_RELAXED);
#else
  return 0;
#endif
}

Status RobustMutex::Init() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  return error == 0 ? Status::Ok() : ErrnoError(error, "pthread_mutex_init", "[SMB-E004]");
}

LockOutcome RobustMutex::TryLock() {
  if (!IsSound()) return LockOutcome::kBroken;
  return Settle(pthread_mutex_trylock(&mutex_));
}

LockOutcome RobustMutex::LockUntil(const Deadline& deadline) {
  if (!IsSound()) return LockOutcome::kBroken;
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
