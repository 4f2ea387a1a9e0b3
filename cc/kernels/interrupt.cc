#include "cc/kernels/interrupt.h"

#include <signal.h>

#include <atomic>

#include "cc/common/clock.h"
#include "cc/common/mutex.h"

namespace tf_smb {
namespace {

using Handler = void (*)(int);
using InfoHandler = void (*)(int, siginfo_t*, void*);

// What the signal handler touches is atomic and without locks, and is set before it is
// installed.
std::atomic<uint64_t> interrupts{0};
std::atomic<Handler> previous_handler{nullptr};
std::atomic<InfoHandler> previous_info_handler{nullptr};

void OnInterrupt(int signal, siginfo_t* info, void* context) {
  interrupts.fetch_add(1);
  if (const InfoHandler with_info = previous_info_handler.load()) {
    with_info(signal, info, context);
  } else if (const Handler handler = previous_handler.load()) {
    handler(signal);
  }
}

// When a wait was last interrupted; and how long after it others belong to the same call.
std::atomic<int64_t> last_interrupted_nanos{0};
constexpr int64_t kSameCallNanos = kNanosPerSecond;

struct Watchers {
  Mutex mutex;
  int count GUARDED_BY(mutex) = 0;
  bool installed GUARDED_BY(mutex) = false;
  struct sigaction previous GUARDED_BY(mutex);
};

// Never destroyed: ops may wait while the process exits.
Watchers& GlobalWatchers() {
  static Watchers* const watchers = new Watchers();
  return *watchers;
}

bool HasHandler(const struct sigaction& action) {
  if ((action.sa_flags & SA_SIGINFO) != 0) return action.sa_sigaction != nullptr;
  return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN;
}

void Install(Watchers* watchers) REQUIRES(watchers->mutex) {
  if (sigaction(SIGINT, nullptr, &watchers->previous) != 0) return;
  if (!HasHandler(watchers->previous)) return;
  const bool with_info = (watchers->previous.sa_flags & SA_SIGINFO) != 0;
  previous_info_handler.store(with_info ? watchers->previous.sa_sigaction : nullptr);
  previous_handler.store(with_info ? nullptr : watchers->previous.sa_handler);
  struct sigaction action = watchers->previous;
  action.sa_flags |= SA_SIGINFO;
  action.sa_sigaction = &OnInterrupt;
  watchers->installed = sigaction(SIGINT, &action, nullptr) == 0;
}

void Restore(Watchers* watchers) REQUIRES(watchers->mutex) {
  if (!watchers->installed) return;
  watchers->installed = false;
  struct sigaction present;
  if (sigaction(SIGINT, nullptr, &present) != 0) return;
  // Somebody may have set another one meanwhile: that stays.
  if ((present.sa_flags & SA_SIGINFO) == 0 || present.sa_sigaction != &OnInterrupt) return;
  sigaction(SIGINT, &watchers->previous, nullptr);
}

}  // namespace

Status InterruptWatch::Poll() {
  if (!watching_) {
    Watchers& watchers = GlobalWatchers();
    MutexLock lock(&watchers.mutex);
    seen_ = interrupts.load();
    if (watchers.count++ == 0) Install(&watchers);
    watching_ = true;
    const int64_t last = last_interrupted_nanos.load();
    interrupted_ = last != 0 && MonotonicNanos() - last < kSameCallNanos;
  }
  if (interrupts.load() != seen_) interrupted_ = true;
  if (!interrupted_) return Status::Ok();
  last_interrupted_nanos.store(MonotonicNanos());
  return AbortedError("interrupted [SMB-E237]").WithScope(FailureScope::kCall);
}

InterruptWatch::~InterruptWatch() {
  if (!watching_) return;
  Watchers& watchers = GlobalWatchers();
  MutexLock lock(&watchers.mutex);
  if (--watchers.count == 0) Restore(&watchers);
}

}  // namespace tf_smb
