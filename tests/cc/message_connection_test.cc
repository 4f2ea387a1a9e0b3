// The client's side of a transport by messages against servers that lie, lag or go.
#include "cc/transport/message/message_connection.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/transport/loopback/loopback_channel.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {
namespace {

Deadline Long() { return Deadline::After(60.0); }
Deadline Short() { return Deadline::After(0.05); }

Layout TestLayout() {
  Variable variable;
  variable.name = "w";
  variable.shape = {150'000};
  return *Layout::Create({variable});
}

// Answers each frame of each channel with what `answer` says: nothing is no answer.
class ScriptedServer {
 public:
  using Answer = std::function<std::vector<std::string>(const std::string&)>;

  explicit ScriptedServer(Answer answer) : answer_(std::move(answer)) {}
  ~ScriptedServer() {
    for (std::thread& thread : threads_) thread.join();
  }

  Dialer dialer() {
    return [this](const Deadline&) -> Result<std::unique_ptr<Channel>> {
      auto [ours, theirs] = NewLoopbackChannel();
      threads_.emplace_back([this, channel = std::shared_ptr<Channel>(std::move(theirs))] {
        for (;;) {
          const Result<std::string> frame = channel->Receive(Long());
          if (!frame.ok()) return;
          for (const std::string& reply : answer_(*frame)) {
            if (!channel->Send(reply, Long(), nullptr).ok()) return;
          }
        }
      });
      return std::move(ours);
    };
  }

 private:
  const Answer answer_;
  std::vector<std::thread> threads_;
};

Grant TestGrant() {
  Grant grant;
  grant.service = 1;
  grant.attachment = 2;
  grant.segment_name = "run/0";
  grant.job_id = "job";
  grant.num_workers = 1;
  grant.lease_s = 10.0;
  grant.layout = TestLayout();
  return grant;
}

bool IsWhole(const std::string& frame) { return DecodeRequest(frame).ok(); }

// A link to a server that says yes to the attach, and `answer` to all else.
std::unique_ptr<SegmentLink> LinkTo(ScriptedServer* server) {
  Result<std::unique_ptr<SegmentLink>> link =
      MessageConnection(server->dialer()).Attach("run/0", Long());
  EXPECT_TRUE(link.ok()) << link.status().message();
  return std::move(link).value();
}

std::vector<std::string> NoAnswer() { return {}; }

TEST(MessageConnectionTest, AnswersThatAreNone) {
  const std::string not_granted = EncodeReply(Reply());
  for (const std::string& answer :
       {std::string(), std::string("nonsense"), not_granted, EncodeControlReply(ControlReply()),
        EncodeGrant(TestGrant()).substr(0, 60)}) {
    ScriptedServer server([&](const std::string&) { return std::vector<std::string>{answer}; });
    MessageConnection connection(server.dialer());
    EXPECT_EQ(connection.Attach("run/0", Long()).status().code(), StatusCode::kDataLoss);
    if (answer != not_granted) {
      EXPECT_EQ(connection.List(Long()).status().code(), StatusCode::kDataLoss);
    }
  }
}

TEST(MessageConnectionTest, SilenceEndsAtTheDeadline) {
  ScriptedServer server([](const std::string& frame) {
    return IsWhole(frame) && DecodeRequest(frame)->type == MessageType::kAttach
               ? std::vector<std::string>{EncodeGrant(TestGrant())}
               : NoAnswer();
  });
  const std::unique_ptr<SegmentLink> link = LinkTo(&server);
  EXPECT_EQ(MessageConnection(server.dialer()).List(Short()).status().code(),
            StatusCode::kDeadlineExceeded);
  std::vector<float> data(10);
  const int64_t start = MonotonicNanos();
  EXPECT_EQ(link->Read({{0, 0, 10, data.data(), false}}, Short(), nullptr).code(),
            StatusCode::kDeadlineExceeded);
  EXPECT_LT(MonotonicNanos() - start, 5 * kNanosPerSecond);
}

TEST(MessageConnectionTest, ALateControlReplyIsDropped) {
  ScriptedServer server([&](const std::string& frame) -> std::vector<std::string> {
    if (IsWhole(frame)) return {EncodeGrant(TestGrant())};
    const ControlRequest request = *DecodeControlRequest(frame);
    ControlReply reply;
    reply.sequence = request.sequence;
    reply.number = 100 + request.sequence;
    std::vector<std::string> replies = {EncodeControlReply(reply)};
    if (request.sequence == 2) replies.insert(replies.begin(), EncodeControlReply(ControlReply()));
    return replies;
  });
  const std::unique_ptr<SegmentLink> link = LinkTo(&server);
  EXPECT_EQ(link->control()->version(), 101u);
  EXPECT_EQ(link->control()->version(), 102u);  // after one of an earlier request
  EXPECT_EQ(link->control()->version(), 103u);
}

// A server of 1.1: what it knows works, what it does not is told or left out, and is not
// sent.
TEST(MessageConnectionTest, ServersOfTheVersionBefore) {
  std::string grant = EncodeGrant(TestGrant());
  grant[4] = 1;
  std::vector<ControlRequest> seen;
  ScriptedServer server([&](const std::string& frame) -> std::vector<std::string> {
    if (IsWhole(frame)) return {grant};
    seen.push_back(*DecodeControlRequest(frame));
    ControlReply reply;
    reply.minor = 1;
    reply.sequence = seen.back().sequence;
    reply.number = 5;
    reply.members.resize(1);
    return {EncodeControlReply(reply)};
  });
  const std::unique_ptr<SegmentLink> link = LinkTo(&server);
  SegmentControl* const control = link->control();
  const MemberId member = {0, 1};
  control->PublishProgress(member, {3, 4, 5});
  EXPECT_EQ(control->Members().size(), 1u);
  control->FinishShare(member, 1, true);
  EXPECT_TRUE(control->IsTurn(member, 1));  // it has none
  control->PublishSteps(member, 6);
  control->SetFirstPhase(member, 1);
  control->EnterPhase(member, 1);
  control->RequestStop(member);
  EXPECT_EQ(control->phase(), 0u);
  EXPECT_FALSE(control->TryEndPhase(member, 0));
  EXPECT_FALSE(control->stop_requested());
  EXPECT_EQ(control->LastNotice().number, 0u);
  for (const Status& status : {control->AgreeOnSchedule(member, "s").status(),
                               control->PostNotice(member, "n").status()}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.scope(), FailureScope::kCall);
    EXPECT_NE(status.message().find("the server speaks protocol 1.1"), std::string::npos);
  }
  EXPECT_TRUE(control->Renew(member).ok());
  ASSERT_EQ(seen.size(), 4u);
  for (const ControlRequest& request : seen) EXPECT_EQ(request.minor, 1u);
  EXPECT_EQ(seen[0].number, 3u);
  EXPECT_EQ(seen[3].call, ControlCall::kRenew);
}

TEST(MessageConnectionTest, BrokenControlRepliesLoseTheConnection) {
  ControlReply from_the_future;
  from_the_future.sequence = 99;
  for (const std::string& answer : {std::string("nonsense"), EncodeControlReply(from_the_future),
                                    EncodeDataReply(DataReply()), EncodeReply(Reply())}) {
    ScriptedServer server([&](const std::string& frame) -> std::vector<std::string> {
      return {IsWhole(frame) ? EncodeGrant(TestGrant()) : answer};
    });
    const std::unique_ptr<SegmentLink> link = LinkTo(&server);
    const Status broken = link->control()->Renew({0, 1});
    EXPECT_EQ(broken.code(), StatusCode::kDataLoss);
    EXPECT_EQ(broken.scope(), FailureScope::kConnection);
    EXPECT_EQ(link->control()->Renew({0, 1}).code(), StatusCode::kUnavailable);
  }
}

TEST(MessageConnectionTest, BrokenDataRepliesAreDataLoss) {
  for (int lie = 0; lie < 5; ++lie) {
    ScriptedServer server([&](const std::string& frame) -> std::vector<std::string> {
      if (IsWhole(frame)) return {EncodeGrant(TestGrant())};
      const Result<DataRequest> request = DecodeDataRequest(frame);
      DataReply reply;
      reply.sequence = request->sequence + (lie == 1 ? 1 : 0);
      reply.chunks_moved = 1;
      const std::string payload(lie == 2 ? 39 : 41, 'x');
      reply.payload = payload;
      if (lie == 0) return {"nonsense"};
      if (lie == 3) return {EncodeReply(Reply())};
      if (lie == 4) return {EncodeDataReply(reply).substr(0, 80)};
      return {EncodeDataReply(reply)};
    });
    const std::unique_ptr<SegmentLink> link = LinkTo(&server);
    std::vector<float> data(10), out(10);
    const Status read = link->Read({{0, 0, 10, data.data(), false}}, Long(), nullptr);
    UpdateRequest update;
    update.move.rate = 0.5;
    update.local = {{0, 0, 10, data.data(), false}};
    update.out = {out.data()};
    const Status elastic = link->Update(update, nullptr).status();
    std::vector<char> last(TestLayout().size_bytes());
    update.move.kind = MoveKind::kDelta;
    update.last = last.data();
    const Status delta = link->Update(update, nullptr).status();
    for (const Status& status : {read, elastic, delta}) {
      EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
      EXPECT_EQ(status.scope(), FailureScope::kConnection);
    }
  }
}

TEST(MessageConnectionTest, UpdatesThatLackSomething) {
  ScriptedServer server([](const std::string&) {
    return std::vector<std::string>{EncodeGrant(TestGrant())};
  });
  const std::unique_ptr<SegmentLink> link = LinkTo(&server);
  std::vector<float> data(10);
  UpdateRequest update;
  update.local = {{0, 0, 10, data.data(), false}};
  EXPECT_EQ(link->Update(update, nullptr).status().code(), StatusCode::kInvalidArgument);
  update.out = {data.data(), data.data()};
  EXPECT_EQ(link->Update(update, nullptr).status().code(), StatusCode::kInvalidArgument);
  update.out = {data.data()};
  update.move.kind = MoveKind::kDelta;
  EXPECT_EQ(link->Update(update, nullptr).status().code(), StatusCode::kInvalidArgument);
}

// What a server sends for anything, damaged: a status, never a crash.
TEST(MessageConnectionTest, DamagedRepliesAreStatuses) {
  std::mt19937 random(5);
  ScriptedServer server([&](const std::string& frame) -> std::vector<std::string> {
    if (IsWhole(frame)) return {EncodeGrant(TestGrant())};
    const Result<DataRequest> request = DecodeDataRequest(frame);
    DataReply reply;
    reply.sequence = request->sequence;
    reply.chunks_moved = 1;
    const std::string payload(40, 'x');
    reply.payload = payload;
    std::string bytes = EncodeDataReply(reply);
    for (int flips = 0; flips < 2; ++flips) {
      bytes[random() % bytes.size()] ^= static_cast<char>(1 << (random() % 8));
    }
    return {bytes};
  });
  const std::unique_ptr<SegmentLink> link = LinkTo(&server);
  std::vector<float> data(10), out(10);
  UpdateRequest update;
  update.local = {{0, 0, 10, data.data(), false}};
  update.out = {out.data()};
  for (int i = 0; i < 300; ++i) {
    static_cast<void>(link->Read({{0, 0, 10, data.data(), false}}, Short(), nullptr));
    static_cast<void>(link->Update(update, nullptr));
  }
}

TEST(MessageConnectionTest, AForkedChildForgetsItsParentsLinks) {
  ScriptedServer server([](const std::string& frame) -> std::vector<std::string> {
    if (IsWhole(frame)) return {EncodeGrant(TestGrant())};
    ControlReply reply;
    reply.sequence = DecodeControlRequest(frame)->sequence;
    reply.number = 7;
    return {EncodeControlReply(reply)};
  });
  std::unique_ptr<SegmentLink> link = LinkTo(&server);
  EXPECT_EQ(link->control()->version(), 7u);
  const pid_t child = fork();
  if (child == 0) {
    link.reset();
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(link->control()->version(), 7u);
}

}  // namespace
}  // namespace tf_smb
