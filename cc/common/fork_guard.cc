#include "cc/common/fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace tf_smb {
namespace {

std::atomic<uint64_t> fork_generation{0};

void CountFork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

uint64_t CurrentGeneration() {
  static const int registered = pthread_atfork(nullptr, nullptr, CountFork);
  static_cast<void>(registered);
  return fork_generation.load(std::memory_order_relaxed);
}

}  // namespace

ForkGuard::ForkGuard() : generation_(CurrentGeneration()) {}

bool ForkGuard::InForkedChild() const { return generation_ != CurrentGeneration(); }

Status ForkGuard::Check() const {
  if (!InForkedChild()) return Status::Ok();
  return FailedPreconditionError(
      "this process was made by fork() after tf_smb was attached; its segment and threads belong "
      "to the parent: start workers with the 'spawn' method, or attach after the fork [SMB-E001]");
}

}  // namespace tf_smb
