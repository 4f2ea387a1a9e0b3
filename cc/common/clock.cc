#include "cc/common/clock.h"

#include <algorithm>
#include <limits>

namespace tf_smb {
namespace {

int64_t Now(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * kNanosPerSecond + now.tv_nsec;
}

}  // namespace

int64_t MonotonicNanos() { return Now(CLOCK_MONOTONIC); }
int64_t BootTimeNanos() { return Now(CLOCK_BOOTTIME); }

Deadline Deadline::After(double seconds) {
  constexpr double kLongestSeconds = 1e9;  // about 31 years: no overflow in nanoseconds
  // NaN counts as no time at all.
  const double bounded = seconds > 0.0 ? std::min(seconds, kLongestSeconds) : 0.0;
  return Deadline(MonotonicNanos() + static_cast<int64_t>(bounded * kNanosPerSecond));
}

int64_t Deadline::RemainingNanos() const {
  return std::max<int64_t>(0, at_nanos_ - MonotonicNanos());
}

int Deadline::RemainingMillis() const {
  const int64_t millis = (RemainingNanos() + 999'999) / 1'000'000;
  return static_cast<int>(std::min<int64_t>(millis, std::numeric_limits<int>::max()));
}

timespec Deadline::ToTimespec() const {
  timespec at;
  at.tv_sec = at_nanos_ / kNanosPerSecond;
  at.tv_nsec = at_nanos_ % kNanosPerSecond;
  return at;
}

}  // namespace tf_smb
