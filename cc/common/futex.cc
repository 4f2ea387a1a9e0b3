#include "cc/common/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#include <limits>

#include "cc/common/clock.h"

namespace tf_smb {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void FutexWait(std::atomic<uint32_t>* word, uint32_t seen, int64_t timeout_nanos) {
  timespec timeout;
  timeout.tv_sec = timeout_nanos / kNanosPerSecond;
  timeout.tv_nsec = timeout_nanos % kNanosPerSecond;
  // Not FUTEX_PRIVATE: the word is shared between processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE,
          std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

}  // namespace tf_smb
