#include "cc/common/robust_mutex.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <new>

namespace tf_smb {
namespace {

constexpr double kLongSeconds = 60.0;

// In memory that forked children share.
struct Shared {
  RobustMutex mutex;
  std::atomic<int> step;
  int64_t counter;
};

class RobustMutexTest : public testing::Test {
 protected:
  void SetUp() override {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared_ = static_cast<Shared*>(memory);  // zeroed: no constructor needed
    ASSERT_TRUE(shared_->mutex.Init().ok());
  }
  void TearDown() override { munmap(shared_, sizeof(Shared)); }

  static pid_t Spawn(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child != 0) return child;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    _exit(0);
  }
  void WaitForStep(int step) const {
    const Deadline deadline = Deadline::After(kLongSeconds);
    while (shared_->step.load() != step && !deadline.Expired()) usleep(100);
    ASSERT_EQ(shared_->step.load(), step);
  }
  static void Reap(pid_t child) { ASSERT_EQ(waitpid(child, nullptr, 0), child); }

  // A child that takes the mutex and keeps it.
  pid_t SpawnHolder() {
    const pid_t child = Spawn([this] {
      if (shared_->mutex.LockUntil(Deadline::After(kLongSeconds)) != LockOutcome::kLocked) _exit(1);
      shared_->step.store(1);
      for (;;) pause();
    });
    WaitForStep(1);
    return child;
  }

  Shared* shared_ = nullptr;
};

TEST_F(RobustMutexTest, LocksOnce) {
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kLocked);
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kBusy);
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(0.01)), LockOutcome::kBusy);
  shared_->mutex.Unlock();
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(0)), LockOutcome::kLocked);
  shared_->mutex.Unlock();
}

TEST_F(RobustMutexTest, HeldByAnotherProcessIsBusy) {
  const pid_t child = SpawnHolder();
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kBusy);
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(0.05)), LockOutcome::kBusy);
  kill(child, SIGKILL);
  Reap(child);
}

TEST_F(RobustMutexTest, DeathOfTheHolderIsTold) {
  const pid_t child = SpawnHolder();
  kill(child, SIGKILL);
  Reap(child);
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kLockedAfterDeath);
  shared_->mutex.Unlock();
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kLocked);  // told once, then good again
  shared_->mutex.Unlock();
}

TEST_F(RobustMutexTest, DeathWakesAWaiter) {
  const pid_t holder = SpawnHolder();
  const pid_t killer = Spawn([holder] {
    usleep(50'000);
    kill(holder, SIGKILL);
  });
  const LockOutcome outcome = shared_->mutex.LockUntil(Deadline::After(kLongSeconds));
  EXPECT_EQ(outcome, LockOutcome::kLockedAfterDeath);
  EXPECT_TRUE(Holds(outcome));
  Reap(killer);
  Reap(holder);
}

TEST_F(RobustMutexTest, StoppedHolderStaysTheHolder) {
  const pid_t child = SpawnHolder();
  kill(child, SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(0.05)), LockOutcome::kBusy);
  kill(child, SIGKILL);
  Reap(child);
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(kLongSeconds)),
            LockOutcome::kLockedAfterDeath);
}

TEST_F(RobustMutexTest, ExcludesProcesses) {
  constexpr int kProcesses = 4, kRounds = 2000;
  pid_t children[kProcesses];
  for (pid_t& child : children) {
    child = Spawn([this] {
      for (int i = 0; i < kRounds; ++i) {
        if (!Holds(shared_->mutex.LockUntil(Deadline::After(kLongSeconds)))) _exit(1);
        shared_->counter += 1;
        shared_->mutex.Unlock();
      }
    });
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  EXPECT_EQ(shared_->counter, kProcesses * kRounds);
}

#if !defined(__SANITIZE_THREAD__)  // which rightly reports a mutex that was none
TEST_F(RobustMutexTest, DamagedMemoryIsBroken) {
  std::memset(static_cast<void*>(&shared_->mutex), 0x5a, sizeof(shared_->mutex));
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kBroken);
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(kLongSeconds)), LockOutcome::kBroken);
  EXPECT_FALSE(Holds(LockOutcome::kBroken));
}

// Any kind but the one that Init gives, some of which the C library would abort at.
TEST_F(RobustMutexTest, EveryOtherKindIsBroken) {
  const int kind = shared_->mutex.kind();
  char* const bytes = reinterpret_cast<char*>(&shared_->mutex);
  size_t at = 0;
  while (at < sizeof(shared_->mutex) && std::memcmp(bytes + at, &kind, sizeof(kind)) != 0) ++at;
  ASSERT_LE(at + sizeof(kind), sizeof(shared_->mutex));
  for (int other = -1; other < 1024; ++other) {
    if (other == kind) continue;
    std::memcpy(bytes + at, &other, sizeof(other));
    ASSERT_EQ(shared_->mutex.TryLock(), LockOutcome::kBroken) << other;
  }
  std::memcpy(bytes + at, &kind, sizeof(kind));
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kLocked);
  shared_->mutex.Unlock();
}

// A lock word that names a thread which holds nothing: a wait with an end.
TEST_F(RobustMutexTest, ForgedHolderIsBusyUntilTheDeadline) {
  const int forged = getpid();
  std::memcpy(static_cast<void*>(&shared_->mutex), &forged, sizeof(forged));
  EXPECT_EQ(shared_->mutex.TryLock(), LockOutcome::kBusy);
  EXPECT_EQ(shared_->mutex.LockUntil(Deadline::After(0.02)), LockOutcome::kBusy);
}
#endif

}  // namespace
}  // namespace tf_smb
