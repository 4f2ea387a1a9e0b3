#include "cc/common/clock.h"

#include <gtest/gtest.h>

#include <limits>

namespace tf_smb {
namespace {

TEST(ClockTest, ClocksGoForward) {
  const int64_t monotonic = MonotonicNanos(), boot = BootTimeNanos();
  EXPECT_GT(monotonic, 0);
  EXPECT_GE(MonotonicNanos(), monotonic);
  EXPECT_GE(BootTimeNanos(), boot);
}

TEST(DeadlineTest, PastAndNoNumbersAreExpired) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double seconds : {0.0, -1.0, -1e300, -std::numeric_limits<double>::infinity(), nan}) {
    const Deadline deadline = Deadline::After(seconds);
    EXPECT_TRUE(deadline.Expired()) << seconds;
    EXPECT_EQ(deadline.RemainingNanos(), 0);
    EXPECT_EQ(deadline.RemainingMillis(), 0);
  }
}

TEST(DeadlineTest, FarAwayDoesNotOverflow) {
  for (const double seconds : {1e9, 1e300, std::numeric_limits<double>::infinity()}) {
    const Deadline deadline = Deadline::After(seconds);
    EXPECT_FALSE(deadline.Expired());
    EXPECT_GT(deadline.RemainingNanos(), 900'000'000 * kNanosPerSecond);
    EXPECT_EQ(deadline.RemainingMillis(), std::numeric_limits<int>::max());
    EXPECT_GT(deadline.ToTimespec().tv_sec, 900'000'000);
  }
}

TEST(DeadlineTest, MillisAreRoundedUp) {
  // Else a loop around poll(2) would spin through the last millisecond.
  const Deadline deadline = Deadline::After(3600.0);
  const int64_t nanos = deadline.RemainingNanos();
  EXPECT_LE(deadline.RemainingMillis(), nanos / 1'000'000 + 1);
  const Deadline soon = Deadline::After(0.02);
  while (!soon.Expired()) {
    const int millis = soon.RemainingMillis();
    EXPECT_TRUE(millis > 0 || soon.Expired());
  }
}

}  // namespace
}  // namespace tf_smb
