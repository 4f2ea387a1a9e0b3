// A server's session against peers that send anything at all.
#include "cc/transport/message/message_session.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/transport/message/chunk_plan.h"

namespace tf_smb {
namespace {

constexpr uint64_t kElements = 150'000;  // several chunks

class OneSegmentHandler : public RequestHandler {
 public:
  OneSegmentHandler() {
    Variable weights, counts;
    weights.name = "w";
    weights.shape = {static_cast<int64_t>(kElements)};
    counts.name = "n";
    counts.dtype = DType::kInt32;
    counts.shape = {4};
    SegmentOptions options;
    options.name = "run/0";
    options.job_id = "job";
    options.layout = *Layout::Create({weights, counts});
    Result<std::unique_ptr<Segment>> created = Segment::Create(options);
    EXPECT_TRUE(created.ok()) << created.status().message();
    segment = std::move(created).value();
  }
  HandledRequest Handle(const Request& request) override {
    HandledRequest handled;
    if (request.type == MessageType::kAttach || request.type == MessageType::kOpen) {
      handled.segment = segment;
    }
    return handled;
  }

  std::shared_ptr<Segment> segment;
};

class MessageSessionTest : public testing::Test {
 protected:
  std::string Attach(MessageSession* session) {
    Request request;
    request.type = MessageType::kAttach;
    request.segment_name = "run/0";
    return session->Answer(EncodeRequest(request));
  }
  uint64_t Attached(MessageSession* session) {
    const Result<Grant> grant = DecodeGrant(Attach(session));
    EXPECT_TRUE(grant.ok()) << grant.status().message();
    return grant.ok() ? grant->attachment : 0;
  }

  ControlReply Control(MessageSession* session, ControlRequest request) {
    request.sequence = ++sequence_;
    const Result<ControlReply> reply =
        DecodeControlReply(session->Answer(EncodeControlRequest(request)));
    EXPECT_TRUE(reply.ok()) << reply.status().message();
    EXPECT_EQ(reply->sequence, sequence_);
    return *reply;
  }
  ControlReply Control(MessageSession* session, uint64_t attachment, ControlCall call,
                       uint64_t member = 0) {
    ControlRequest request;
    request.attachment = attachment;
    request.call = call;
    request.member = member;
    return Control(session, std::move(request));
  }

  Status Data(MessageSession* session, DataRequest request) {
    request.sequence = ++sequence_;
    bytes_ = session->Answer(EncodeDataRequest(request));
    const Result<DataReply> reply = DecodeDataReply(bytes_);
    EXPECT_TRUE(reply.ok()) << reply.status().message();
    if (!reply.ok()) return reply.status();
    EXPECT_EQ(reply->sequence, sequence_);
    reply_ = *reply;
    return reply->status;
  }
  DataRequest Write(uint64_t attachment, std::vector<WireSpan> spans, std::string_view payload) {
    DataRequest request;
    request.type = SegmentMessageType::kWrite;
    request.attachment = attachment;
    request.spans = std::move(spans);
    request.payload = payload;
    return request;
  }

  MessageSession* NewSession() {
    sessions_.push_back(std::make_unique<MessageSession>(&handler_, &attachments_, &stopping_));
    return sessions_.back().get();
  }

  OneSegmentHandler handler_;
  Attachments attachments_;
  std::atomic<bool> stopping_{false};
  std::vector<std::unique_ptr<MessageSession>> sessions_;
  uint64_t sequence_ = 0;
  std::string bytes_;
  DataReply reply_;
};

TEST_F(MessageSessionTest, WrongAttachmentsAreOfALostConnection) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  for (const uint64_t wrong : {uint64_t{0}, attachment + 1, UINT64_MAX}) {
    const Status control = Control(session, wrong, ControlCall::kVersion).status;
    const Status data = Data(session, Write(wrong, {}, ""));
    DataRequest axpy = Write(attachment, {}, "");
    axpy.type = SegmentMessageType::kAxpy;
    axpy.source = wrong;
    const Status source = Data(session, axpy);
    for (const Status& status : {control, data, source}) {
      EXPECT_EQ(status.code(), StatusCode::kUnavailable);
      EXPECT_EQ(status.scope(), FailureScope::kConnection);
    }
  }
  // Others' are for data, not for members.
  MessageSession* const other = NewSession();
  EXPECT_TRUE(Data(other, Write(attachment, {}, "")).ok());
  EXPECT_EQ(Control(other, attachment, ControlCall::kJoin).status.code(),
            StatusCode::kFailedPrecondition);
  sessions_.erase(sessions_.begin());
  EXPECT_EQ(Data(other, Write(attachment, {}, "")).code(), StatusCode::kUnavailable);
}

TEST_F(MessageSessionTest, AttachmentsAreFew) {
  MessageSession* const session = NewSession();
  for (int i = 0; i < 16; ++i) Attached(session);
  const Result<Reply> refused = DecodeReply(Attach(session));
  ASSERT_TRUE(refused.ok());
  EXPECT_EQ(refused->status.code(), StatusCode::kResourceExhausted);
}

TEST_F(MessageSessionTest, MembersAreThoseOfTheSession) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  const ControlReply joined = Control(session, attachment, ControlCall::kJoin);
  ASSERT_TRUE(joined.status.ok());
  EXPECT_TRUE(Control(session, attachment, ControlCall::kRenew, joined.number).status.ok());
  MessageSession* const other = NewSession();
  const uint64_t theirs = Attached(other);
  for (const ControlCall call : {ControlCall::kRenew, ControlCall::kLeave, ControlCall::kTryLock,
                                 ControlCall::kArrive, ControlCall::kSetTraining,
                                 ControlCall::kPublishSteps, ControlCall::kIsTurn,
                                 ControlCall::kSetFirstPhase, ControlCall::kEnterPhase,
                                 ControlCall::kTryEndPhase, ControlCall::kAgreeOnSchedule,
                                 ControlCall::kPostNotice, ControlCall::kRequestStop}) {
    const Status status = Control(other, theirs, call, joined.number).status;
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_EQ(status.scope(), FailureScope::kLease);
    EXPECT_EQ(Control(session, attachment, call, UINT64_MAX).status.code(), StatusCode::kAborted);
  }
  EXPECT_EQ(handler_.segment->CountLive(), 1u);
}

TEST_F(MessageSessionTest, MembersAreFew) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  uint64_t member = 0;
  for (int i = 0; i < 16; ++i) {
    const ControlReply joined = Control(session, attachment, ControlCall::kJoin);
    EXPECT_TRUE(joined.status.ok());
    member = joined.number;
  }
  EXPECT_EQ(Control(session, attachment, ControlCall::kJoin).status.code(),
            StatusCode::kResourceExhausted);
  Control(session, attachment, ControlCall::kLeave, member);
  EXPECT_TRUE(Control(session, attachment, ControlCall::kJoin).status.ok());
}

TEST_F(MessageSessionTest, MembersOfAClosedSessionAreDead) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  const ControlReply first = Control(session, attachment, ControlCall::kJoin);
  const ControlReply second = Control(session, attachment, ControlCall::kJoin);
  EXPECT_EQ(handler_.segment->CountLive(), 2u);
  Control(session, attachment, ControlCall::kLeave, second.number);
  sessions_.clear();
  const std::vector<MemberInfo> members = handler_.segment->Members();
  ASSERT_EQ(members.size(), 2u);
  EXPECT_EQ(members[0].incarnation, first.number);
  EXPECT_EQ(members[0].state, MemberState::kDead);
  EXPECT_EQ(members[1].state, MemberState::kLeft);
}

// A client of 1.1 gets answers that it can read, and says all that it knows.
TEST_F(MessageSessionTest, ClientsOfTheVersionBefore) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  const auto call = [&](ControlCall which, uint64_t member, uint64_t number = 0) {
    ControlRequest request;
    request.minor = 1;
    request.attachment = attachment;
    request.call = which;
    request.member = member;
    request.number = number;
    return Control(session, request);
  };
  const ControlReply joined = call(ControlCall::kJoin, 0);
  ASSERT_TRUE(joined.status.ok());
  EXPECT_EQ(joined.minor, 1u);
  call(ControlCall::kPublishProgress, joined.number, 17);
  const ControlReply members = call(ControlCall::kMembers, 0);
  EXPECT_EQ(members.minor, 1u);
  ASSERT_EQ(members.members.size(), 1u);
  EXPECT_EQ(members.members[0].steps, 17u);
  EXPECT_EQ(call(ControlCall::kEnterRound, joined.number).number, 1u);
  call(ControlCall::kFinishShare, joined.number, 1);
  EXPECT_EQ(call(ControlCall::kTryCloseRound, 0, 1).number, 1u);
  EXPECT_EQ(handler_.segment->phase(), 0u);
  // One of a version to come is answered in this one.
  ControlRequest newer;
  newer.minor = 9;
  newer.attachment = attachment;
  EXPECT_EQ(Control(session, newer).minor, kProtocolMinor);
}

TEST_F(MessageSessionTest, SpansOutOfRangeTouchNothing) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  const std::string ones(64, '\1');
  const uint64_t per_chunk = kChunkBytes / 4;
  const std::vector<std::vector<WireSpan>> bad = {
      {{2, 0, 1, false}},
      {{UINT32_MAX, 0, 1, false}},
      {{0, kElements, 1, false}},
      {{0, kElements + 1, 0, false}},
      {{0, 1, UINT64_MAX, false}},
      {{0, UINT64_MAX, UINT64_MAX, false}},
      {{0, 0, 1, false}, {0, 1, 1, false}},
      {{1, 0, 1, false}, {0, 1, 1, false}},
      {{0, per_chunk - 1, 2, false}},      // two chunks
      {{0, 0, kElements, false}},          // several
      {{0, 0, 1, false}, {1, 0, 1, false}}};  // the first and the last
  for (const std::vector<WireSpan>& spans : bad) {
    for (const SegmentMessageType type : {SegmentMessageType::kRead, SegmentMessageType::kWrite,
                                          SegmentMessageType::kUpdate}) {
      DataRequest request = Write(attachment, spans, ones);
      request.type = type;
      request.move = static_cast<uint8_t>(MoveKind::kCopy);
      request.wants_out = true;
      EXPECT_EQ(Data(session, request).code(), StatusCode::kInvalidArgument);
      EXPECT_TRUE(reply_.payload.empty());
    }
  }
  for (uint64_t i = 0; i < kElements * 4; ++i) ASSERT_EQ(handler_.segment->center()[i], 0);
}

TEST_F(MessageSessionTest, PayloadsHaveTheSizeOfTheirSpans) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  for (const size_t size : {0u, 15u, 17u, 64u}) {
    EXPECT_EQ(Data(session, Write(attachment, {{0, 0, 4, false}}, std::string(size, 'x'))).code(),
              StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(Data(session, Write(attachment, {{0, 0, 4, false}}, std::string(16, 'x'))).ok());
  EXPECT_EQ(handler_.segment->center()[15], 'x');
}

TEST_F(MessageSessionTest, MovesThatCannotBeMade) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  DataRequest update = Write(attachment, {{0, 0, 4, false}}, "0123456789abcdef");
  update.type = SegmentMessageType::kUpdate;
  for (int move = 0; move < 256; ++move) {
    for (const bool wants_out : {false, true}) {
      update.move = static_cast<uint8_t>(move);
      update.output = 1;
      update.wants_out = wants_out;
      const bool possible = move == static_cast<int>(MoveKind::kCopy) ||
                            move == static_cast<int>(MoveKind::kAccumulate) ||
                            (move == static_cast<int>(MoveKind::kElastic) && wants_out);
      EXPECT_EQ(Data(session, update).ok(), possible) << move;
    }
  }
  update.move = static_cast<uint8_t>(MoveKind::kElastic);
  update.output = 3;
  EXPECT_EQ(Data(session, update).code(), StatusCode::kInvalidArgument);
  update.output = 2;
  update.rate = std::nan("");
  EXPECT_TRUE(Data(session, update).ok());
  EXPECT_EQ(reply_.non_finite_variable, std::optional<uint32_t>(0));
  for (const double weight : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    update.share = WireShare{1, weight};
    EXPECT_EQ(Data(session, update).code(), StatusCode::kInvalidArgument);
  }
  update.share = WireShare{1, 1.0};  // of a round that is not open
  EXPECT_FALSE(Data(session, update).ok());
}

TEST_F(MessageSessionTest, NumbersOutOfAllBounds) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  const uint64_t member = Control(session, attachment, ControlCall::kJoin).number;
  for (int call = 1; call <= static_cast<int>(kLastControlCall); ++call) {
    for (const double seconds : {std::nan(""), -1e300, 0.0}) {
      ControlRequest request;
      request.attachment = attachment;
      request.call = static_cast<ControlCall>(call);
      if (request.call == ControlCall::kLeave) continue;
      request.member = member;
      request.number = UINT64_MAX;
      request.worker_index = UINT32_MAX;
      request.seconds = seconds;
      request.workers = {UINT32_MAX, 0, 0};
      request.epoch = UINT64_MAX;
      request.batch = UINT64_MAX;
      request.text.assign(kMaxControlTextBytes, '\xff');
      Control(session, request);
    }
  }
}

// Valid messages with damage, and plain noise: a reply each, of which the client makes a
// status, and a server that is still there.
TEST_F(MessageSessionTest, AnythingIsAnswered) {
  MessageSession* const session = NewSession();
  const uint64_t attachment = Attached(session);
  std::vector<std::string> messages;
  for (int call = 1; call <= static_cast<int>(kLastControlCall); ++call) {
    ControlRequest request;
    request.attachment = attachment;
    request.call = static_cast<ControlCall>(call);
    messages.push_back(EncodeControlRequest(request));
  }
  for (const SegmentMessageType type :
       {SegmentMessageType::kRead, SegmentMessageType::kWrite, SegmentMessageType::kUpdate,
        SegmentMessageType::kAxpy}) {
    DataRequest request = Write(attachment, {{0, 5, 4, false}}, "0123456789abcdef");
    request.type = type;
    request.source = attachment;
    request.move = 2;
    request.output = 1;
    request.wants_out = true;
    messages.push_back(EncodeDataRequest(request));
  }
  Request list;
  messages.push_back(EncodeRequest(list));
  std::mt19937 random(4);
  for (int round = 0; round < 30000; ++round) {
    std::string message;
    if (round % 3 == 0) {
      message.resize(random() % 200);
      for (char& byte : message) byte = static_cast<char>(random());
      if (message.size() > 9) message.replace(0, 9, EncodeRequest(list).substr(0, 8) + '\x05');
      if (message.size() > 9) message[8] = static_cast<char>(random() % 12);
    } else {
      message = messages[random() % messages.size()];
      // Not the time that is waited for.
      for (int flips = static_cast<int>(1 + random() % 3); flips > 0; --flips) {
        const size_t at = random() % message.size();
        if (message[8] == '\x05' && at >= 48 && at < 56) continue;
        if (message[8] != '\x05' && at >= 25 && at < 33) continue;
        message[at] ^= static_cast<char>(1 << (random() % 8));
      }
      if (random() % 8 == 0) message.resize(random() % (message.size() + 1));
    }
    const std::string reply = session->Answer(message);
    EXPECT_TRUE(DecodeReply(reply).ok() || DecodeControlReply(reply).ok() ||
                DecodeDataReply(reply).ok() || DecodeGrant(reply).ok());
  }
  EXPECT_TRUE(Control(session, attachment, ControlCall::kVersion).status.ok());
}

TEST_F(MessageSessionTest, AReplyIsNoRequest) {
  MessageSession* const session = NewSession();
  for (const std::string& message :
       {EncodeReply(Reply()), EncodeControlReply(ControlReply()), EncodeDataReply(DataReply()),
        std::string()}) {
    const Result<Reply> reply = DecodeReply(session->Answer(message));
    ASSERT_TRUE(reply.ok());
    EXPECT_EQ(reply->status.code(), StatusCode::kDataLoss);
  }
}

TEST(ChunkPlanTest, CutsSpansAtChunks) {
  Variable variable;
  variable.name = "w";
  variable.dtype = DType::kBFloat16;  // four bytes in the center
  variable.shape = {static_cast<int64_t>(kElements)};
  const Layout layout = *Layout::Create({variable});
  const uint64_t per_chunk = kChunkBytes / 4;
  const std::vector<ConstSpan> spans = {{0, per_chunk - 1, per_chunk + 2, nullptr, false}};
  const std::vector<ChunkParts> plan = PlanChunks(layout, spans);
  ASSERT_EQ(plan.size(), 3u);
  const uint64_t counts[] = {1, per_chunk, 1};
  uint64_t done = 0;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plan[i].chunk, i);
    ASSERT_EQ(plan[i].parts.size(), 1u);
    const ChunkPart& part = plan[i].parts[0];
    EXPECT_EQ(part.wire.count, counts[i]);
    EXPECT_EQ(part.wire.first, per_chunk - 1 + done);
    EXPECT_EQ(part.value_offset(), done * 2);
    EXPECT_EQ(part.moved_offset(), done * 4);
    EXPECT_EQ(part.center_offset, part.wire.first * 4);
    done += counts[i];
  }
}

}  // namespace
}  // namespace tf_smb
