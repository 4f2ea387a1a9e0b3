// Faults made to order, and what callers see of them.
#include "cc/transport/faults/fault_plan.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cc/server/server.h"
#include "cc/transport/faults/faulty_channel.h"
#include "cc/transport/faults/faulty_transport.h"
#include "cc/transport/loopback/loopback_channel.h"
#include "cc/transport/loopback/loopback_transport.h"
#include "cc/transport/message/message_connection.h"
#include "cc/transport/registry.h"

namespace tf_smb {
namespace {

constexpr uint64_t kElements = 150'000;  // several chunks

Deadline Long() { return Deadline::After(60.0); }
Deadline Short() { return Deadline::After(0.05); }

double SecondsSince(int64_t start) {
  return static_cast<double>(MonotonicNanos() - start) / kNanosPerSecond;
}

OpenRequest OpenOf() {
  Variable variable;
  variable.name = "w";
  variable.shape = {static_cast<int64_t>(kElements)};
  OpenRequest request;
  request.segment_name = "run/0";
  request.job_id = "job";
  request.layout = *Layout::Create({variable});
  return request;
}

Fault FaultOf(FaultyCall call, uint64_t nth, FaultKind kind, double seconds = 0.0) {
  Fault fault;
  fault.call = call;
  fault.nth = nth;
  fault.kind = kind;
  fault.seconds = seconds;
  return fault;
}

class FaultsTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    static std::atomic<int> count{0};
    address_ = GetParam() + "://faults-" + std::to_string(getpid()) + "-" +
               std::to_string(++count);
    ServerOptions options;
    options.address = address_;
    server_ = std::move(Server::Start(options)).value();
    inner_ = std::move(FindTransport(*Address::Parse(address_))).value();
    plan_ = std::make_shared<FaultPlan>(std::vector<Fault>());
    transport_ = std::make_unique<FaultyTransport>(inner_, plan_);
    connection_ = std::move(transport_->Connect(*Address::Parse(address_), Long())).value();
    bool created = false;
    link_ = std::move(connection_->Open(OpenOf(), &created, Long())).value();
    values_.assign(kElements, 1.0f);
  }

  Status Write(const Deadline& deadline) {
    return link_->Write({{0, 0, kElements, values_.data(), false}}, deadline, nullptr);
  }
  Status Read(const Deadline& deadline) {
    return link_->Read({{0, 0, kElements, values_.data(), false}}, deadline, nullptr);
  }

  std::string address_;
  std::unique_ptr<Server> server_;
  Transport* inner_ = nullptr;
  std::shared_ptr<FaultPlan> plan_;
  std::unique_ptr<FaultyTransport> transport_;
  std::unique_ptr<Connection> connection_;
  std::unique_ptr<SegmentLink> link_;
  std::vector<float> values_;
};

TEST_P(FaultsTest, WithoutFaultsAllIsAsItWas) {
  EXPECT_EQ(transport_->scheme(), GetParam());
  EXPECT_TRUE(transport_->IsViable().viable);
  EXPECT_EQ(transport_->capabilities().shared_memory, inner_->capabilities().shared_memory);
  EXPECT_TRUE(Write(Long()).ok());
  EXPECT_TRUE(Read(Long()).ok());
  EXPECT_TRUE(link_->Axpy(1.0, link_.get(), Long()).ok());
  SegmentControl* const control = link_->control();
  const Result<MemberId> member = control->Join(0);
  ASSERT_TRUE(member.ok());
  EXPECT_TRUE(control->Renew(*member).ok());
  EXPECT_EQ(control->name(), "run/0");
  EXPECT_EQ(control->version(), 2u);
  EXPECT_TRUE(control->BeginSeeding(*member));
  control->FinishSeeding(*member);
  EXPECT_TRUE(control->seeded());
  control->Leave(*member);
  EXPECT_EQ(control->Members().size(), 1u);
  EXPECT_EQ(plan_->calls(FaultyCall::kWrite), 1u);
  EXPECT_EQ(plan_->calls(FaultyCall::kRenew), 1u);
  EXPECT_EQ(plan_->calls(FaultyCall::kUpdate), 0u);
  EXPECT_EQ(connection_->List(Long())->size(), 1u);
  EXPECT_TRUE(connection_->Register(values_.data(), 4).ok());
  EXPECT_TRUE(connection_->Free("run/0", Long()).ok());
}

TEST_P(FaultsTest, ADroppedRequestIsNotApplied) {
  plan_->Add(FaultOf(FaultyCall::kWrite, 2, FaultKind::kDropRequest, 60.0));
  plan_->Add(FaultOf(FaultyCall::kWrite, 3, FaultKind::kDropRequest, 0.01));
  EXPECT_TRUE(Write(Long()).ok());
  EXPECT_EQ(Write(Short()).code(), StatusCode::kDeadlineExceeded);
  const Status lost = Write(Long());
  EXPECT_EQ(lost.code(), StatusCode::kUnavailable);
  EXPECT_EQ(lost.scope(), FailureScope::kConnection);
  EXPECT_EQ(link_->control()->version(), 1u);
  EXPECT_TRUE(Write(Long()).ok());
  EXPECT_EQ(link_->control()->version(), 2u);
}

TEST_P(FaultsTest, ADroppedReplyWasApplied) {
  plan_->Add(FaultOf(FaultyCall::kWrite, 1, FaultKind::kDropReply));
  plan_->Add(FaultOf(FaultyCall::kJoin, 1, FaultKind::kDropReply));
  EXPECT_EQ(Write(Long()).code(), StatusCode::kUnavailable);
  EXPECT_EQ(link_->control()->version(), 1u);
  if (GetParam() == "shm") return;  // the member would hold a lock in unmapped memory
  EXPECT_EQ(link_->control()->Join(3).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(link_->control()->Join(3).status().code(), StatusCode::kAlreadyExists);
}

TEST_P(FaultsTest, FailsTheNthWithTheStatusGiven) {
  Fault fault = FaultOf(FaultyCall::kRenew, 2, FaultKind::kFail);
  fault.status = AbortedError("fenced by the test");
  plan_->Add(fault);
  fault.call = FaultyCall::kConnect;
  fault.nth = 0;
  fault.status = UnavailableError("nobody, says the test");
  plan_->Add(fault);
  const MemberId member = *link_->control()->Join(0);
  EXPECT_TRUE(link_->control()->Renew(member).ok());
  const Status fenced = link_->control()->Renew(member);
  EXPECT_EQ(fenced.message(), "fenced by the test");
  EXPECT_EQ(fenced.scope(), FailureScope::kLease);
  EXPECT_TRUE(link_->control()->Renew(member).ok());
  link_->control()->Leave(member);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(transport_->Connect(*Address::Parse(address_), Long()).status().message(),
              "nobody, says the test");
  }
  plan_->Clear();
  EXPECT_TRUE(transport_->Connect(*Address::Parse(address_), Long()).ok());
}

TEST_P(FaultsTest, FunctionsWithoutAStatusAnswerNothing) {
  EXPECT_TRUE(Write(Long()).ok());
  plan_->Add(FaultOf(FaultyCall::kVersion, 1, FaultKind::kDropRequest));
  plan_->Add(FaultOf(FaultyCall::kMarkAbsent, 1, FaultKind::kDropRequest));
  plan_->Add(FaultOf(FaultyCall::kMembers, 1, FaultKind::kDropRequest));
  plan_->Add(FaultOf(FaultyCall::kMarkAbsent, 2, FaultKind::kDropReply));
  const MemberId member = *link_->control()->Join(0);
  EXPECT_EQ(link_->control()->version(), 0u);
  EXPECT_EQ(link_->control()->version(), 1u);
  link_->control()->MarkAbsent(5);
  EXPECT_FALSE(link_->control()->IsAbsent(5));
  link_->control()->MarkAbsent(5);
  EXPECT_TRUE(link_->control()->IsAbsent(5));
  EXPECT_TRUE(link_->control()->Members().empty());
  EXPECT_EQ(link_->control()->Members().size(), 1u);
  link_->control()->Leave(member);
}

TEST_P(FaultsTest, Delays) {
  plan_->Add(FaultOf(FaultyCall::kRead, 2, FaultKind::kDelay, 0.1));
  EXPECT_TRUE(Read(Long()).ok());
  const int64_t start = MonotonicNanos();
  EXPECT_TRUE(Read(Long()).ok());
  EXPECT_GE(SecondsSince(start), 0.1);
}

TEST_P(FaultsTest, KillsThePeerBeforeOrAfterACall) {
  const auto kill = [this](FaultyCall call, FaultKind kind) {
    Fault fault = FaultOf(call, 1, kind);
    fault.action = [this] { server_.reset(); };
    plan_->Add(fault);
  };
  kill(FaultyCall::kList, FaultKind::kRunAfter);
  EXPECT_TRUE(connection_->List(Long()).ok());
  EXPECT_EQ(connection_->List(Long()).status().code(), StatusCode::kUnavailable);
  SetUp();
  kill(FaultyCall::kUpdate, FaultKind::kRunBefore);
  UpdateRequest update;
  update.move.kind = MoveKind::kCopy;
  update.local = {{0, 0, kElements, values_.data(), false}};
  const Status status = link_->Update(update, nullptr).status();
  if (inner_->capabilities().shared_memory) {
    EXPECT_TRUE(status.ok());
  } else {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.scope(), FailureScope::kConnection);
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, FaultsTest, testing::Values("shm", "loopback"),
                         [](const auto& info) { return info.param; });

// --- Faults of frames --------------------------------------------------------------

class FrameFaultsTest : public testing::Test {
 protected:
  FrameFaultsTest() {
    static std::atomic<int> count{0};
    const std::string name = "frames-" + std::to_string(++count);
    ServerOptions options;
    options.address = "loopback://" + name;
    server_ = std::move(Server::Start(options)).value();
    connection_ = std::make_unique<MessageConnection>(
        MakeFaulty(LoopbackTransport::DialerTo(name), plan_));
    watcher_ = std::make_unique<MessageConnection>(LoopbackTransport::DialerTo(name));
    values_.assign(kElements, 1.0f);
    last_.assign(kElements, 0.0f);
    out_.assign(kElements, 0.0f);
  }

  std::unique_ptr<SegmentLink> Open(Connection* connection) {
    bool created = false;
    Result<std::unique_ptr<SegmentLink>> link = connection->Open(OpenOf(), &created, Long());
    EXPECT_TRUE(link.ok()) << link.status().message();
    return std::move(link).value();
  }
  static FrameFault Next(FrameDirection direction, uint64_t nth, FrameFaultKind kind) {
    FrameFault fault;
    fault.direction = direction;
    fault.nth = nth;
    fault.kind = kind;
    return fault;
  }
  // Of the frames that are still to come.
  void Add(FrameDirection direction, uint64_t nth, FrameFaultKind kind, double seconds = 0.0,
           size_t bytes = 0) {
    FrameFault fault = Next(direction, plan_->frames(direction) + nth, kind);
    fault.seconds = seconds;
    fault.bytes = bytes;
    plan_->Add(fault);
  }
  Result<UpdateReport> Delta(SegmentLink* link) {
    UpdateRequest update;
    update.move.kind = MoveKind::kDelta;
    update.move.rate = 1.0;
    update.local = {{0, 0, kElements, values_.data(), false}};
    update.out = {out_.data()};
    update.last = last_.data();
    return link->Update(update, nullptr);
  }

  std::shared_ptr<FrameFaultPlan> plan_ =
      std::make_shared<FrameFaultPlan>(std::vector<FrameFault>());
  std::unique_ptr<Server> server_;
  std::unique_ptr<Connection> connection_;
  std::unique_ptr<Connection> watcher_;
  std::vector<float> values_, last_, out_;
};

TEST_F(FrameFaultsTest, LostFramesEndAtTheDeadline) {
  const std::unique_ptr<SegmentLink> link = Open(connection_.get());
  for (const FrameDirection direction : {FrameDirection::kSend, FrameDirection::kReceive}) {
    for (const uint64_t nth : {1u, 2u}) {
      Add(direction, nth, FrameFaultKind::kDrop);
      const int64_t start = MonotonicNanos();
      const Status status =
          link->Read({{0, 0, kElements, values_.data(), false}}, Short(), nullptr);
      // A later answer may come first: then one is known to be missing.
      EXPECT_TRUE(status.code() == StatusCode::kDeadlineExceeded ||
                  status.code() == StatusCode::kDataLoss)
          << status.ToString();
      EXPECT_LT(SecondsSince(start), 5.0);
      // On another lane all is well again.
      EXPECT_TRUE(link->Read({{0, 0, kElements, values_.data(), false}}, Long(), nullptr).ok());
    }
  }
}

TEST_F(FrameFaultsTest, ACloseInTheMiddleOfAnUpdateIsALostConnection) {
  const std::unique_ptr<SegmentLink> link = Open(connection_.get());
  const std::unique_ptr<SegmentLink> watcher = Open(watcher_.get());
  for (const FrameDirection direction : {FrameDirection::kSend, FrameDirection::kReceive}) {
    Add(direction, 2, FrameFaultKind::kClose);
    const Status status = Delta(link.get()).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.scope(), FailureScope::kConnection);
    // The members' lane is another one.
    EXPECT_EQ(link->control()->CountLive(), 0u);
    EXPECT_TRUE(link->control()->Join(0).ok());
    link->control()->Leave({0, watcher->control()->Members()[0].incarnation});
  }
  EXPECT_TRUE(Delta(link.get()).ok());
}

TEST_F(FrameFaultsTest, WhatWasAnsweredIsNotSentTwice) {
  const std::unique_ptr<SegmentLink> link = Open(connection_.get());
  const std::unique_ptr<SegmentLink> watcher = Open(watcher_.get());
  std::vector<float> center(kElements, 0.0f);
  ASSERT_TRUE(watcher->Write({{0, 0, kElements, center.data(), false}}, Long(), nullptr).ok());
  Add(FrameDirection::kSend, 2, FrameFaultKind::kClose);  // the second chunk never leaves
  EXPECT_FALSE(Delta(link.get()).ok());
  ASSERT_TRUE(Delta(link.get()).ok());
  ASSERT_TRUE(watcher->Read({{0, 0, kElements, center.data(), false}}, Long(), nullptr).ok());
  // The first chunk's answer may have been lost with the channel; the others moved once.
  for (uint64_t i = kChunkBytes / 4; i < kElements; ++i) ASSERT_EQ(center[i], 1.0f) << i;
}

TEST_F(FrameFaultsTest, DelaysAreWaitedFor) {
  const std::unique_ptr<SegmentLink> link = Open(connection_.get());
  Add(FrameDirection::kReceive, 1, FrameFaultKind::kDelay, 0.1);
  const int64_t start = MonotonicNanos();
  EXPECT_TRUE(Delta(link.get()).ok());
  EXPECT_GE(SecondsSince(start), 0.1);
}

TEST_F(FrameFaultsTest, CutFramesAreErrorsOnEitherSide) {
  const std::unique_ptr<SegmentLink> link = Open(connection_.get());
  for (const FrameDirection direction : {FrameDirection::kSend, FrameDirection::kReceive}) {
    for (const size_t bytes : {0u, 5u, 9u, 40u, 100u}) {
      Add(direction, 1, FrameFaultKind::kTruncate, 0.0, bytes);
      const Status status =
          link->Read({{0, 0, kElements, values_.data(), false}}, Long(), nullptr);
      EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
      EXPECT_EQ(status.scope(), FailureScope::kConnection);
      EXPECT_TRUE(link->Read({{0, 0, kElements, values_.data(), false}}, Long(), nullptr).ok());
    }
  }
}

TEST_F(FrameFaultsTest, AMemberWhoseChannelClosesIsDead) {
  const std::unique_ptr<SegmentLink> link = Open(connection_.get());
  const std::unique_ptr<SegmentLink> watcher = Open(watcher_.get());
  const MemberId member = *link->control()->Join(0);
  EXPECT_TRUE(link->control()->Renew(member).ok());
  Add(FrameDirection::kSend, 1, FrameFaultKind::kClose);
  const Status lost = link->control()->Renew(member);
  EXPECT_EQ(lost.code(), StatusCode::kUnavailable);
  EXPECT_EQ(lost.scope(), FailureScope::kConnection);
  const Deadline deadline = Long();
  while (watcher->control()->CountLive() > 0) {
    ASSERT_FALSE(deadline.Expired());
    usleep(1000);
  }
  EXPECT_EQ(watcher->control()->Members()[0].state, MemberState::kDead);
  // Its other lanes go with it: who is fenced does not move the center.
  EXPECT_EQ(Delta(link.get()).status().code(), StatusCode::kUnavailable);
}

}  // namespace
}  // namespace tf_smb
