#include "cc/client/waiting.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

using Words = std::optional<std::string>;

class WaitingTest : public testing::Test {
 protected:
  Segment* const segment_ = Keep(Segment::Create(OptionsOf(LayoutOf({{3}}))));
  WaitOptions options_;
};

TEST_F(WaitingTest, WhatIsThereIsNotWaitedFor) {
  options_.timeout_s = 0.0;
  options_.poll = []() -> Status { ADD_FAILURE(); return Status(); };
  EXPECT_TRUE(WaitFor(*segment_, options_, [] { return Words(); }).ok());
}

TEST_F(WaitingTest, DeadlineSaysForWhat) {
  for (const double timeout : {0.0, 0.02, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    options_.timeout_s = timeout;
    int asked = 0;
    const Status status = WaitFor(*segment_, options_, [&]() -> Result<Words> {
      ++asked;
      return Words("worker 3 at the gate");
    });
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
    EXPECT_NE(status.message().find(" s in vain for worker 3 at the gate"), std::string::npos);
    EXPECT_GE(asked, 1);
  }
  options_.timeout_s = 0.02;
  const Status status = WaitFor(*segment_, options_, [] { return Words("it"); });
  EXPECT_EQ(WithoutAnchor(status.message()), "waited 0.02 s in vain for it");
}

TEST_F(WaitingTest, ErrorsOfTheConditionAndOfPollEndIt) {
  const Status gone = WaitFor(*segment_, options_, []() -> Result<Words> {
    return AbortedError("fenced");
  });
  EXPECT_EQ(gone.ToString(), "ABORTED: fenced");
  int polls = 0;
  options_.poll = [&] { return ++polls < 3 ? Status() : InternalError("interrupted"); };
  const int64_t before = MonotonicNanos();
  EXPECT_EQ(WaitFor(*segment_, options_, [] { return Words("it"); }).ToString(),
            "INTERNAL: interrupted");
  EXPECT_EQ(polls, 3);
  EXPECT_LT(MonotonicNanos() - before, 5 * kNanosPerSecond);  // without any change
}

TEST_F(WaitingTest, AnnouncesAfterAWhileAndThenLessOften) {
  std::vector<std::string> lines;
  options_.timeout_s = 3.5;
  options_.announce = [&](const std::string& line) { lines.push_back(line); };
  EXPECT_FALSE(WaitFor(*segment_, options_, [] { return Words("the others"); }).ok());
  EXPECT_EQ(lines, (std::vector<std::string>{"tf_smb: waiting for the others"}));
}

TEST_F(WaitingTest, ChangesOfOtherProcessesWakeIt) {
  const pid_t child = Spawn([this] {
    Segment* const own = MapAgain(*segment_);
    usleep(30'000);
    return own->Join(4).ok() && WaitUntil([&] { return own->IsAbsent(9); }) ? 0 : 1;
  });
  int asked = 0;
  EXPECT_TRUE(WaitFor(*segment_, options_, [&]() -> Result<Words> {
                ++asked;
                return segment_->CountLive() == 1 ? Words() : Words("it");
              }).ok());
  EXPECT_LT(asked, 100);  // it slept
  segment_->MarkAbsent(9);
  EXPECT_EQ(WaitExit(child), 0);
}

TEST(NameWorkersTest, EightByNumber) {
  EXPECT_EQ(NameWorkers({3}), "worker 3");
  EXPECT_EQ(NameWorkers({1, 2}), "workers 1, 2");
  EXPECT_EQ(NameWorkers({0, 1, 2, 3, 4, 5, 6, 7}), "workers 0, 1, 2, 3, 4, 5, 6, 7");
  EXPECT_EQ(NameWorkers({0, 1, 2, 3, 4, 5, 6, 7, 8, 9}),
            "workers 0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
}

}  // namespace
}  // namespace tf_smb
