#include "cc/wire/segment_messages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace tf_smb {
namespace {

const std::string kHeader("\x01\x00\x00\x00\x02\x00\x00\x00", 8);
const std::string kOldHeader("\x01\x00\x00\x00\x01\x00\x00\x00", 8);

Grant FullGrant() {
  Variable variable;
  variable.name = "w";
  variable.dtype = DType::kBFloat16;
  variable.shape = {2, 3};
  Grant grant;
  grant.service = 7;
  grant.attachment = 9;
  grant.created = true;
  grant.segment_name = "run";
  grant.job_id = "job";
  grant.num_workers = 3;
  grant.lease_s = 1.5;
  grant.layout = *Layout::Create({variable});
  return grant;
}

ControlRequest FullControlRequest() {
  ControlRequest request;
  request.sequence = 1;
  request.attachment = 2;
  request.call = ControlCall::kArriveAtBarrier;
  request.member = 3;
  request.worker_index = 4;
  request.number = 5;
  request.flag = true;
  request.seconds = 1.5;
  request.workers = {6, 7};
  request.epoch = 8;
  request.batch = 9;
  request.text = "words";
  return request;
}

ControlReply FullControlReply() {
  ControlReply reply;
  reply.sequence = 1;
  reply.status = AbortedError("why");
  reply.number = 2;
  reply.slot = 3;
  reply.workers = {4};
  reply.members = {{5, 1, 6, 7, 8, 9, 10, 11, true, 12, 13, 14}};
  reply.text = "words";
  return reply;
}

DataRequest FullDataRequest() {
  DataRequest request;
  request.type = SegmentMessageType::kUpdate;
  request.sequence = 1;
  request.attachment = 2;
  request.timeout_s = 1.5;
  request.move = 4;
  request.output = 2;
  request.rate = -1.5;
  request.wants_out = true;
  request.advance_version = true;
  request.share = WireShare{3, 1.5};
  request.source = 4;
  request.spans = {{5, 6, 7, true}, {8, 9, 10, false}};
  request.payload = "values";
  return request;
}

DataReply FullDataReply() {
  DataReply reply;
  reply.sequence = 1;
  reply.status = UnavailableError("why");
  reply.chunks_moved = 2;
  reply.chunks_skipped = 3;
  reply.version_before = 4;
  reply.version_after = 5;
  reply.non_finite_variable = 6;
  reply.payload = "values";
  return reply;
}

std::string U64(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

std::string U32(uint32_t value) { return U64(value).substr(0, 4); }

const std::string kOneAndAHalf("\x00\x00\x00\x00\x00\x00\xf8\x3f", 8);
const std::string kMinusOneAndAHalf("\x00\x00\x00\x00\x00\x00\xf8\xbf", 8);

// What follows the header, in 1.1.
std::string OldControlRequest() {
  return "\x05" + U64(1) + U64(2) + "\x16" + U64(3) + "\x01" + U32(4) + U64(5) + "\x01" +
         kOneAndAHalf + U32(2) + U32(6) + U32(7);
}

std::string OldControlReply() {
  return "\x82" + U64(1) + U32(10) + "\x02" + U32(3) + "why" + U64(2) + U32(3) + U32(1) +
         U32(4) + U32(1) + U32(5) + U32(1) + U32(6) + U64(7) + U64(8) + U64(9) + U64(10) +
         U64(11) + "\x01";
}

// Peers of 1.1 are written to as they write.
TEST(SegmentMessagesTest, BytesOfOlderVersionsAreFrozen) {
  ControlRequest request = FullControlRequest();
  request.minor = 1;
  EXPECT_EQ(EncodeControlRequest(request), kOldHeader + OldControlRequest());
  const Result<ControlRequest> old_request = DecodeControlRequest(kOldHeader + OldControlRequest());
  ASSERT_TRUE(old_request.ok()) << old_request.status().message();
  EXPECT_EQ(old_request->minor, 1u);
  EXPECT_EQ(old_request->workers, std::vector<uint32_t>({6, 7}));
  EXPECT_EQ(old_request->epoch, 0u);
  EXPECT_EQ(old_request->text, "");
  ControlReply reply = FullControlReply();
  reply.minor = 1;
  EXPECT_EQ(EncodeControlReply(reply), kOldHeader + OldControlReply());
  const Result<ControlReply> old_reply = DecodeControlReply(kOldHeader + OldControlReply());
  ASSERT_TRUE(old_reply.ok()) << old_reply.status().message();
  EXPECT_EQ(old_reply->minor, 1u);
  ASSERT_EQ(old_reply->members.size(), 1u);
  EXPECT_EQ(old_reply->members[0].finished, 11u);
  EXPECT_EQ(old_reply->members[0].phase, 0u);
  // In the other version they are too long, or too short.
  EXPECT_FALSE(DecodeControlRequest(kHeader + OldControlRequest()).ok());
  EXPECT_FALSE(DecodeControlReply(kHeader + OldControlReply()).ok());
  EXPECT_FALSE(
      DecodeControlRequest(kOldHeader + EncodeControlRequest(FullControlRequest()).substr(8)).ok());
  EXPECT_FALSE(
      DecodeControlReply(kOldHeader + EncodeControlReply(FullControlReply()).substr(8)).ok());
  Grant grant = *DecodeGrant(kOldHeader + EncodeGrant(FullGrant()).substr(8));
  EXPECT_EQ(grant.minor, 1u);
  EXPECT_EQ(grant.attachment, 9u);
}

TEST(SegmentMessagesTest, CallsHaveTheirVersion) {
  EXPECT_EQ(SinceMinor(ControlCall::kVersion), 1u);
  EXPECT_EQ(SinceMinor(ControlCall::kWaitForChange), 1u);
  EXPECT_EQ(SinceMinor(ControlCall::kPublishSteps), 2u);
  EXPECT_EQ(SinceMinor(kLastControlCall), 2u);
}

TEST(SegmentMessagesTest, TextsHaveALimit) {
  ControlRequest request = FullControlRequest();
  request.text.assign(kMaxControlTextBytes, 'x');
  EXPECT_EQ(DecodeControlRequest(EncodeControlRequest(request))->text, request.text);
  request.text += 'x';
  EXPECT_EQ(DecodeControlRequest(EncodeControlRequest(request)).status().code(),
            StatusCode::kDataLoss);
  ControlReply reply = FullControlReply();
  reply.text = request.text;
  EXPECT_EQ(DecodeControlReply(EncodeControlReply(reply)).status().code(), StatusCode::kDataLoss);
}

TEST(SegmentMessagesTest, BytesAreFrozen) {
  const std::string layout = FullGrant().layout.Encode();
  EXPECT_EQ(EncodeGrant(FullGrant()),
            kHeader + "\x81" + U64(7) + U64(9) + "\x01" + U32(3) + "run" + U32(3) + "job" +
                U32(3) + kOneAndAHalf + U32(static_cast<uint32_t>(layout.size())) + layout);
  EXPECT_EQ(EncodeControlRequest(FullControlRequest()),
            kHeader + OldControlRequest() + U64(8) + U64(9) + U32(5) + "words");
  EXPECT_EQ(EncodeControlReply(FullControlReply()),
            kHeader + OldControlReply() + U64(12) + U64(13) + U64(14) + U32(5) + "words");
  const std::string request = kHeader + "\x08" + U64(1) + U64(2) + kOneAndAHalf + "\x04\x02" +
                              kMinusOneAndAHalf + "\x01\x01\x01" + U64(3) + kOneAndAHalf +
                              U64(4) + U32(2) + U32(5) + U64(6) + U64(7) + "\x01" + U32(8) +
                              U64(9) + U64(10) + std::string(1, '\0');
  EXPECT_EQ(EncodeDataRequest(FullDataRequest()),
            request + std::string((28 - request.size() % 16) % 16, '\0') + U32(6) + "values");
  const std::string reply = kHeader + "\x83" + U64(1) + U32(8) + "\x01" + U32(3) + "why" +
                            U64(2) + U64(3) + U64(4) + U64(5) + "\x01" + U32(6);
  EXPECT_EQ(EncodeDataReply(FullDataReply()),
            reply + std::string((28 - reply.size() % 16) % 16, '\0') + U32(6) + "values");
}

TEST(SegmentMessagesTest, ValuesBeginAligned) {
  for (size_t spans = 0; spans < 20; ++spans) {
    DataRequest request = FullDataRequest();
    request.spans.assign(spans, WireSpan{});
    const std::string bytes = EncodeDataRequest(request);
    const Result<DataRequest> again = DecodeDataRequest(bytes);
    ASSERT_TRUE(again.ok());
    EXPECT_EQ((again->payload.data() - bytes.data()) % kPayloadAlignment, 0u);
    EXPECT_EQ(again->spans.size(), spans);
  }
}

TEST(SegmentMessagesTest, GrantsRoundTrip) {
  const Result<Grant> again = DecodeGrant(EncodeGrant(FullGrant()));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->service, 7u);
  EXPECT_EQ(again->attachment, 9u);
  EXPECT_TRUE(again->created);
  EXPECT_EQ(again->segment_name, "run");
  EXPECT_EQ(again->job_id, "job");
  EXPECT_EQ(again->num_workers, 3u);
  EXPECT_EQ(again->lease_s, 1.5);
  EXPECT_TRUE(again->layout.CheckSame(FullGrant().layout, "ours").ok());
}

TEST(SegmentMessagesTest, ControlRoundTrips) {
  const Result<ControlRequest> request =
      DecodeControlRequest(EncodeControlRequest(FullControlRequest()));
  ASSERT_TRUE(request.ok()) << request.status().message();
  EXPECT_EQ(EncodeControlRequest(*request), EncodeControlRequest(FullControlRequest()));
  EXPECT_EQ(request->worker_index, std::optional<uint32_t>(4));
  EXPECT_EQ(request->workers, std::vector<uint32_t>({6, 7}));
  EXPECT_EQ(request->seconds, 1.5);
  EXPECT_EQ(request->minor, kProtocolMinor);
  EXPECT_EQ(request->epoch, 8u);
  EXPECT_EQ(request->batch, 9u);
  EXPECT_EQ(request->text, "words");
  const Result<ControlReply> reply = DecodeControlReply(EncodeControlReply(FullControlReply()));
  ASSERT_TRUE(reply.ok()) << reply.status().message();
  EXPECT_EQ(EncodeControlReply(*reply), EncodeControlReply(FullControlReply()));
  EXPECT_EQ(reply->status.code(), StatusCode::kAborted);
  EXPECT_EQ(reply->status.scope(), FailureScope::kLease);
  ASSERT_EQ(reply->members.size(), 1u);
  EXPECT_EQ(reply->members[0].finished, 11u);
  EXPECT_EQ(reply->members[0].epoch, 12u);
  EXPECT_EQ(reply->members[0].batch, 13u);
  EXPECT_EQ(reply->members[0].phase, 14u);
  EXPECT_EQ(reply->text, "words");
}

TEST(SegmentMessagesTest, DataRoundTrips) {
  const std::string request_bytes = EncodeDataRequest(FullDataRequest());
  const Result<DataRequest> request = DecodeDataRequest(request_bytes);
  ASSERT_TRUE(request.ok()) << request.status().message();
  EXPECT_EQ(EncodeDataRequest(*request), request_bytes);
  EXPECT_EQ(request->payload, "values");
  EXPECT_EQ(request->spans[0].count, 7u);
  const std::string reply_bytes = EncodeDataReply(FullDataReply());
  const Result<DataReply> reply = DecodeDataReply(reply_bytes);
  ASSERT_TRUE(reply.ok()) << reply.status().message();
  EXPECT_EQ(EncodeDataReply(*reply), reply_bytes);
  EXPECT_EQ(reply->non_finite_variable, std::optional<uint32_t>(6));
  EXPECT_EQ(reply->payload, "values");
}

struct Kind {
  std::string bytes;
  std::function<Status(const std::string&)> decode;
};

std::vector<Kind> AllKinds() {
  return {{EncodeGrant(FullGrant()),
           [](const std::string& bytes) { return DecodeGrant(bytes).status(); }},
          {EncodeControlRequest(FullControlRequest()),
           [](const std::string& bytes) { return DecodeControlRequest(bytes).status(); }},
          {EncodeControlReply(FullControlReply()),
           [](const std::string& bytes) { return DecodeControlReply(bytes).status(); }},
          {EncodeDataRequest(FullDataRequest()),
           [](const std::string& bytes) { return DecodeDataRequest(bytes).status(); }},
          {EncodeDataReply(FullDataReply()),
           [](const std::string& bytes) { return DecodeDataReply(bytes).status(); }}};
}

TEST(SegmentMessagesTest, EveryTruncationIsRefused) {
  for (const Kind& kind : AllKinds()) {
    EXPECT_TRUE(kind.decode(kind.bytes).ok());
    for (size_t length = 0; length < kind.bytes.size(); ++length) {
      EXPECT_EQ(kind.decode(kind.bytes.substr(0, length)).code(), StatusCode::kDataLoss);
    }
    EXPECT_EQ(kind.decode(kind.bytes + '\0').code(), StatusCode::kDataLoss);
  }
}

TEST(SegmentMessagesTest, OneKindIsNotAnother) {
  const std::vector<Kind> kinds = AllKinds();
  for (size_t i = 0; i < kinds.size(); ++i) {
    for (size_t j = 0; j < kinds.size(); ++j) {
      EXPECT_EQ(kinds[i].decode(kinds[j].bytes).ok(), i == j);
    }
  }
}

// Whatever the bits: refused with a sentence, or a message within its bounds.
TEST(SegmentMessagesTest, FlippedBitsAreRefusedOrDecode) {
  const std::vector<Kind> kinds = AllKinds();
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    const Kind& kind = kinds[random() % kinds.size()];
    std::string damaged = kind.bytes;
    for (uint32_t flips = 1 + random() % 4; flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1 << (random() % 8));
    }
    const Status status = kind.decode(damaged);
    EXPECT_EQ(status.ok(), status.message().empty());
  }
}

bool Says(const Status& status, const std::string& text) {
  return status.code() == StatusCode::kDataLoss && status.message().find(text) != std::string::npos;
}

TEST(SegmentMessagesTest, ValuesOutOfRangeAreNamed) {
  ControlRequest request = FullControlRequest();
  request.call = static_cast<ControlCall>(47);
  EXPECT_TRUE(Says(DecodeControlRequest(EncodeControlRequest(request)).status(),
                   "unknown control call 47"));
  request = FullControlRequest();
  request.workers.assign(1025, 0);
  EXPECT_TRUE(Says(DecodeControlRequest(EncodeControlRequest(request)).status(),
                   "a message lists 1025 workers, at most 1024 are accepted"));
  DataRequest data = FullDataRequest();
  data.spans.assign(4097, WireSpan{});
  EXPECT_TRUE(Says(DecodeDataRequest(EncodeDataRequest(data)).status(),
                   "a message lists 4097 spans, at most 4096 are accepted"));
  std::string reply = EncodeControlReply(ControlReply());
  reply[17] = 12;
  EXPECT_TRUE(Says(DecodeControlReply(reply).status(), "a reply has status code 12"));
  reply[17] = 1;
  reply[21] = 4;
  EXPECT_TRUE(Says(DecodeControlReply(reply).status(), "a reply has failure scope 4"));
  std::string newer = EncodeControlRequest(FullControlRequest());
  newer[0] = 2;
  EXPECT_EQ(DecodeControlRequest(newer).status().code(), StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace tf_smb
