#include "cc/transport/loopback/loopback_channel.h"

#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <thread>

#include "cc/wire/messages.h"

namespace tf_smb {
namespace {

Deadline Long() { return Deadline::After(60.0); }
Deadline Short() { return Deadline::After(0.02); }

TEST(LoopbackChannelTest, FramesComeInOrderBothWays) {
  auto [a, b] = NewLoopbackChannel();
  for (const char* frame : {"one", ""}) EXPECT_TRUE(a->Send(frame, Long(), nullptr).ok());
  EXPECT_TRUE(b->Send("back", Long(), nullptr).ok());
  EXPECT_EQ(*b->Receive(Long()), "one");
  EXPECT_EQ(*b->Receive(Long()), "");
  EXPECT_EQ(*a->Receive(Long()), "back");
}

TEST(LoopbackChannelTest, DeadlinesLeaveItAsItWas) {
  auto [a, b] = NewLoopbackChannel();
  EXPECT_EQ(a->Receive(Short()).status().code(), StatusCode::kDeadlineExceeded);
  Status status;
  int sent = 0;
  while ((status = a->Send("x", Short(), nullptr)).ok()) ++sent;
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  for (int i = 0; i < sent; ++i) EXPECT_EQ(*b->Receive(Long()), "x");
  EXPECT_TRUE(b->Send("y", Short(), nullptr).ok());
  EXPECT_EQ(*a->Receive(Deadline::After(0)), "y");
}

TEST(LoopbackChannelTest, TwoThatOnlySendDoNotWaitForEachOther) {
  auto [a, b] = NewLoopbackChannel();
  constexpr int kFrames = 200;
  std::thread echo([&b = b] {
    for (int i = 0; i < kFrames; ++i) {
      ASSERT_TRUE(b->Send(*b->Receive(Long()), Long(), nullptr).ok());
    }
  });
  std::deque<std::string> inbox;
  for (int i = 0; i < kFrames; ++i) {
    ASSERT_TRUE(a->Send(std::to_string(i), Long(), &inbox).ok());
  }
  for (int i = 0; i < kFrames; ++i) {
    if (inbox.empty()) inbox.push_back(*a->Receive(Long()));
    EXPECT_EQ(inbox.front(), std::to_string(i));
    inbox.pop_front();
  }
  echo.join();
}

TEST(LoopbackChannelTest, ClosingWakesBothAndLosesNothing) {
  for (const bool by_destructor : {false, true}) {
    auto [a, b] = NewLoopbackChannel();
    ASSERT_TRUE(a->Send("last words", Long(), nullptr).ok());
    std::thread closer([&a = a, by_destructor] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      if (by_destructor) {
        a.reset();
      } else {
        a->Close();
      }
    });
    EXPECT_EQ(*b->Receive(Long()), "last words");
    const Status status = b->Receive(Long()).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.scope(), FailureScope::kConnection);
    EXPECT_EQ(b->Send("x", Long(), nullptr).code(), StatusCode::kUnavailable);
    closer.join();
  }
}

TEST(LoopbackChannelTest, FramesHaveALongest) {
  auto [a, b] = NewLoopbackChannel();
  EXPECT_EQ(a->Send(std::string(kMaxFrameBytes + 1, 'x'), Long(), nullptr).code(),
            StatusCode::kInvalidArgument);
  EXPECT_TRUE(a->Send("x", Long(), nullptr).ok());
}

}  // namespace
}  // namespace tf_smb
