#include "cc/wire/messages.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

namespace tf_smb {
namespace {

Request OpenOf(const std::string& name) {
  Variable variable;
  variable.name = "w";
  variable.shape = {2, 3};
  Request request;
  request.type = MessageType::kOpen;
  request.open.segment_name = name;
  request.open.job_id = "job";
  request.open.num_workers = 3;
  request.open.on_existing = OnExisting::kResume;
  request.open.layout = *Layout::Create({variable});
  return request;
}

std::vector<Request> AllRequests() {
  std::vector<Request> requests = {OpenOf("run/0"), {}, {}, {}, OpenOf("run/1")};
  requests[1].type = MessageType::kAttach;
  requests[1].segment_name = "run/0";
  requests[2].type = MessageType::kFree;
  requests[2].segment_name = "";
  requests[3].type = MessageType::kList;
  requests[4].open.sparse = true;
  return requests;
}

Reply FullReply() {
  Reply reply;
  reply.status = NotFoundError("no such thing");
  reply.created = true;
  reply.segments = {{"run/0", "job", 1ULL << 40, 3}, {"", "", 0, 0}};
  return reply;
}

TEST(MessagesTest, RequestBytesAreFrozen) {
  const std::string header("\x01\x00\x00\x00\x02\x00\x00\x00", 8);
  EXPECT_EQ(EncodeRequest(OpenOf("run")),
            header + std::string("\x01"
                                 "\x03\x00\x00\x00"
                                 "run"
                                 "\x03\x00\x00\x00"
                                 "job"
                                 "\x03\x00\x00\x00"
                                 "\x01"
                                 "\x1b\x00\x00\x00"
                                 "\x01\x00\x00\x00"
                                 "\x01\x00\x00\x00"
                                 "w"
                                 "\x01\x02"
                                 "\x02\x00\x00\x00\x00\x00\x00\x00"
                                 "\x03\x00\x00\x00\x00\x00\x00\x00",
                                 51));
  Request sparse = OpenOf("run");
  sparse.open.sparse = true;
  EXPECT_EQ(EncodeRequest(sparse), EncodeRequest(OpenOf("run")) + "\x01");
  const std::vector<Request> all = AllRequests();
  EXPECT_EQ(EncodeRequest(all[1]), header + std::string("\x02\x05\x00\x00\x00run/0", 10));
  EXPECT_EQ(EncodeRequest(all[2]), header + std::string("\x03\x00\x00\x00\x00", 5));
  EXPECT_EQ(EncodeRequest(all[3]), header + "\x04");
}

TEST(MessagesTest, ReplyBytesAreFrozen) {
  EXPECT_EQ(EncodeReply(FullReply()), std::string("\x01\x00\x00\x00\x02\x00\x00\x00\x80"
                                                  "\x02\x00\x00\x00"
                                                  "\x0d\x00\x00\x00"
                                                  "no such thing"
                                                  "\x01"
                                                  "\x02\x00\x00\x00"
                                                  "\x05\x00\x00\x00run/0"
                                                  "\x03\x00\x00\x00job"
                                                  "\x00\x00\x00\x00\x00\x01\x00\x00"
                                                  "\x03\x00\x00\x00"
                                                  "\x00\x00\x00\x00"
                                                  "\x00\x00\x00\x00"
                                                  "\x00\x00\x00\x00\x00\x00\x00\x00"
                                                  "\x00\x00\x00\x00",
                                                  83));
}

TEST(MessagesTest, RequestsRoundTrip) {
  for (const Request& request : AllRequests()) {
    const Result<Request> again = DecodeRequest(EncodeRequest(request));
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(again->type, request.type);
    EXPECT_EQ(again->segment_name, request.segment_name);
    EXPECT_EQ(again->open.segment_name, request.open.segment_name);
    EXPECT_EQ(again->open.job_id, request.open.job_id);
    EXPECT_EQ(again->open.num_workers, request.open.num_workers);
    EXPECT_EQ(again->open.on_existing, request.open.on_existing);
    EXPECT_EQ(again->open.sparse, request.open.sparse);
    EXPECT_EQ(again->open.layout.size_bytes(), request.open.layout.size_bytes());
  }
}

TEST(MessagesTest, RepliesRoundTripEveryCode) {
  for (int code = 0; code <= static_cast<int>(StatusCode::kInternal); ++code) {
    Reply reply = FullReply();
    reply.status = Status(static_cast<StatusCode>(code), "why");
    const Result<Reply> again = DecodeReply(EncodeReply(reply));
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(again->status.ToString(), reply.status.ToString());
    EXPECT_TRUE(again->created);
    ASSERT_EQ(again->segments.size(), 2u);
    EXPECT_EQ(again->segments[0].name, "run/0");
    EXPECT_EQ(again->segments[0].job_id, "job");
    EXPECT_EQ(again->segments[0].center_bytes, 1ULL << 40);
    EXPECT_EQ(again->segments[0].live_members, 3u);
  }
}

TEST(MessagesTest, EveryTruncationIsRefused) {
  for (const Request& request : AllRequests()) {
    const std::string bytes = EncodeRequest(request);
    // The last field of an open request came with protocol 1.1, and may be missing.
    const size_t shortest = bytes.size() - (request.open.sparse ? 1 : 0);
    for (size_t length = 0; length < shortest; ++length) {
      EXPECT_EQ(DecodeRequest(bytes.substr(0, length)).status().code(), StatusCode::kDataLoss);
    }
    EXPECT_TRUE(DecodeRequest(bytes.substr(0, shortest)).ok());
    EXPECT_EQ(DecodeRequest(bytes + std::string(2, '\0')).status().code(),
              StatusCode::kDataLoss);
  }
  const std::string bytes = EncodeReply(FullReply());
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_EQ(DecodeReply(bytes.substr(0, length)).status().code(), StatusCode::kDataLoss);
  }
  EXPECT_EQ(DecodeReply(bytes + '\0').status().code(), StatusCode::kDataLoss);
}

// Whatever the bits: refused with a sentence, or a message within its bounds.
TEST(MessagesTest, FlippedBitsAreRefusedOrDecode) {
  std::vector<std::string> messages = {EncodeReply(FullReply())};
  for (const Request& request : AllRequests()) messages.push_back(EncodeRequest(request));
  std::mt19937 random(2);
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = messages[random() % messages.size()];
    for (uint32_t flips = 1 + random() % 4; flips > 0; --flips) {
      damaged[random() % damaged.size()] ^= static_cast<char>(1 << (random() % 8));
    }
    const Result<Request> request = DecodeRequest(damaged);
    if (request.ok()) {
      EXPECT_LE(request->open.segment_name.size(), kMaxSegmentNameBytes);
      EXPECT_LE(request->segment_name.size(), kMaxSegmentNameBytes);
      EXPECT_LE(request->open.job_id.size(), kMaxJobIdBytes);
      EXPECT_LE(static_cast<int>(request->open.on_existing), 2);
    } else {
      EXPECT_FALSE(request.status().message().empty());
    }
    const Result<Reply> reply = DecodeReply(damaged);
    if (reply.ok()) {
      EXPECT_LE(static_cast<int>(reply->status.code()), static_cast<int>(StatusCode::kInternal));
    } else {
      EXPECT_FALSE(reply.status().message().empty());
    }
  }
}

TEST(MessagesTest, OtherMajorVersionNamesTheSideToUpgrade) {
  std::string bytes = EncodeRequest(AllRequests()[3]);
  bytes[0] = 2;
  bytes[4] = 7;
  const Status newer = DecodeRequest(bytes).status();
  EXPECT_EQ(newer.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(newer.message(),
            "the peer speaks protocol 2.7, this side 1.2: upgrade this side [SMB-E021]");
  bytes[0] = 0;
  EXPECT_EQ(DecodeRequest(bytes).status().message(),
            "the peer speaks protocol 0.7, this side 1.2: upgrade the peer [SMB-E021]");
}

TEST(MessagesTest, NewerMinorVersionIsUnderstood) {
  std::string bytes = EncodeRequest(AllRequests()[3]);
  bytes[4] = 9;
  EXPECT_TRUE(DecodeRequest(bytes).ok());
}

TEST(MessagesTest, UnknownValuesAreNamed) {
  std::string bytes = EncodeRequest(AllRequests()[3]);
  bytes[8] = 77;
  EXPECT_EQ(DecodeRequest(bytes).status().message(), "unknown request type 77 [SMB-E023]");
  EXPECT_EQ(DecodeReply(bytes).status().message(), "a message is not a reply [SMB-E024]");
  bytes[8] = static_cast<char>(128);
  EXPECT_EQ(DecodeRequest(bytes).status().code(), StatusCode::kDataLoss);
  std::string reply = EncodeReply(Reply());
  reply[9] = 12;
  EXPECT_EQ(DecodeReply(reply).status().message(), "a reply has status code 12 [SMB-E026]");
}

TEST(MessagesTest, LongTextIsCutNotLost) {
  Reply reply;
  reply.status = NotFoundError(std::string(1 << 20, 'x'));
  const Result<Reply> again = DecodeReply(EncodeReply(reply));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->status.code(), StatusCode::kNotFound);
  EXPECT_EQ(again->status.message(), std::string(64 * 1024, 'x'));
}

TEST(MessagesTest, StatusesHaveTheScopeOfTheirCode) {
  Reply reply;
  for (const auto& [status, scope] : {std::make_pair(AbortedError("why"), FailureScope::kLease),
                                      {UnavailableError("why"), FailureScope::kConnection},
                                      {NotFoundError("why"), FailureScope::kCall}}) {
    reply.status = status;
    EXPECT_EQ(DecodeReply(EncodeReply(reply))->status.scope(), scope);
  }
}

TEST(MessagesTest, TypeOfAnyMessage) {
  EXPECT_EQ(*MessageTypeOf(EncodeReply(Reply())), 128);
  EXPECT_EQ(*MessageTypeOf(EncodeRequest(AllRequests()[1])), 2);
  EXPECT_EQ(MessageTypeOf("short").status().code(), StatusCode::kDataLoss);
}

TEST(MessagesTest, NamesHaveLimits) {
  EXPECT_TRUE(CheckSegmentName("a").ok());
  EXPECT_TRUE(CheckSegmentName(std::string(200, 'a')).ok());
  EXPECT_TRUE(CheckJobId(std::string(100, 'a')).ok());
  for (const std::string& bad : {std::string(), std::string(201, 'a'), std::string("a\0b", 3)}) {
    EXPECT_EQ(CheckSegmentName(bad).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(CheckJobId(bad).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_NE(CheckJobId(std::string(101, 'a')).message().find("1 to 100 bytes"), std::string::npos);
}

}  // namespace
}  // namespace tf_smb
