#include "cc/server/server.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tf_smb {
namespace {

std::string UniqueAddress() {
  static int count = 0;
  return "shm://server_test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

class ServerTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Server>> server = Server::Start({UniqueAddress(), 10.0, ""});
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(server).value();
  }

  static Request OpenOf(const std::string& job = "job-1",
                        OnExisting on_existing = OnExisting::kFail,
                        uint32_t num_workers = 2, int64_t size = 4) {
    Variable variable;
    variable.name = "w";
    variable.shape = {size};
    Request request;
    request.type = MessageType::kOpen;
    request.open.segment_name = "run/0";
    request.open.job_id = job;
    request.open.num_workers = num_workers;
    request.open.on_existing = on_existing;
    request.open.layout = *Layout::Create({variable});
    return request;
  }
  static Request Of(MessageType type, const std::string& name = "") {
    Request request;
    request.type = type;
    request.segment_name = name;
    return request;
  }
  std::shared_ptr<Segment> Granted(const Request& request, bool created) {
    const HandledRequest handled = server_->Handle(request);
    EXPECT_TRUE(handled.reply.status.ok()) << handled.reply.status.message();
    EXPECT_EQ(handled.reply.created, created);
    EXPECT_NE(handled.segment, nullptr);
    return handled.segment;
  }
  void Refused(const Request& request, StatusCode code, const std::string& text) {
    const HandledRequest handled = server_->Handle(request);
    EXPECT_EQ(handled.reply.status.code(), code) << handled.reply.status.ToString();
    EXPECT_NE(handled.reply.status.message().find(text), std::string::npos)
        << handled.reply.status.message();
    EXPECT_EQ(handled.segment, nullptr);
  }

  std::unique_ptr<Server> server_;
};

TEST_F(ServerTest, FirstCreatesOthersJoin) {
  const std::shared_ptr<Segment> segment = Granted(OpenOf(), /*created=*/true);
  EXPECT_EQ(segment->lease_s(), 10.0);
  EXPECT_EQ(Granted(OpenOf(), /*created=*/false), segment);
  // Also while workers come: nobody has left, and worker 1 is expected.
  const MemberId member = *segment->Join(0);
  EXPECT_EQ(Granted(OpenOf(), /*created=*/false), segment);
  EXPECT_EQ(Granted(Of(MessageType::kAttach, "run/0"), /*created=*/false), segment);
  segment->Leave(member);
}

TEST_F(ServerTest, OtherLayoutIsToldTheFirstDifference) {
  Granted(OpenOf(), true);
  Refused(OpenOf("job-1", OnExisting::kFail, 2, 5), StatusCode::kFailedPrecondition,
          "the models differ at variable 0: here 'w' float32[5], in segment 'run/0' 'w' "
          "float32[4]");
  Refused(OpenOf("job-2", OnExisting::kResume, 2, 5), StatusCode::kFailedPrecondition,
          "the models differ");
}

TEST_F(ServerTest, OtherJobsRunningSegment) {
  const std::shared_ptr<Segment> segment = Granted(OpenOf(), true);
  const MemberId member = *segment->Join(0);
  Refused(OpenOf("job-2"), StatusCode::kFailedPrecondition,
          "from another job ('job-1') that is still running");
  Refused(OpenOf("job-2", OnExisting::kReplace), StatusCode::kFailedPrecondition,
          "has 1 live workers");
  EXPECT_EQ(Granted(OpenOf("job-2", OnExisting::kResume), false), segment);
  // "replace" is about other jobs: this job's own running segment is joined.
  EXPECT_EQ(Granted(OpenOf("job-1", OnExisting::kReplace), false), segment);
  segment->Leave(member);
  const std::shared_ptr<Segment> fresh = Granted(OpenOf("job-2", OnExisting::kReplace), true);
  EXPECT_NE(fresh, segment);
  EXPECT_EQ(fresh->job_id(), "job-2");
}

TEST_F(ServerTest, FinishedRunIsNotJoinedSilently) {
  const std::shared_ptr<Segment> segment = Granted(OpenOf(), true);
  segment->Leave(*segment->Join(0));
  Refused(OpenOf(), StatusCode::kFailedPrecondition,
          "an earlier run of this job that is finished");
  EXPECT_EQ(Granted(OpenOf("job-1", OnExisting::kResume), false), segment);
  EXPECT_NE(Granted(OpenOf("job-1", OnExisting::kReplace), true), segment);
}

TEST_F(ServerTest, MissingSegmentListsThoseThereAre) {
  Refused(Of(MessageType::kAttach, "x"), StatusCode::kNotFound,
          "no segment 'x' at " + server_->address() + "; it has none");
  Granted(OpenOf(), true);
  Refused(Of(MessageType::kFree, "x"), StatusCode::kNotFound, "it has 'run/0'");
}

TEST_F(ServerTest, ManySegmentsAreNotAllListed) {
  for (int i = 0; i < 25; ++i) {
    Request request = OpenOf();
    request.open.segment_name = "run/" + std::to_string(i);
    Granted(request, true);
  }
  Refused(Of(MessageType::kAttach, "x"), StatusCode::kNotFound, "' and 5 more");
}

TEST_F(ServerTest, FreedNameIsFreeMemoryIsNot) {
  const std::shared_ptr<Segment> segment = Granted(OpenOf(), true);
  EXPECT_TRUE(server_->Handle(Of(MessageType::kFree, "run/0")).reply.status.ok());
  Refused(Of(MessageType::kAttach, "run/0"), StatusCode::kNotFound, "run/0");
  segment->center()[0] = 1.0f;  // who uses it goes on
  EXPECT_NE(Granted(OpenOf(), true), segment);
}

TEST_F(ServerTest, ListCountsTheLiving) {
  EXPECT_TRUE(server_->List().empty());
  const std::shared_ptr<Segment> segment = Granted(OpenOf(), true);
  const MemberId member = *segment->Join(0), other = *segment->Join(1);
  for (const auto& segments :
       {server_->List(), server_->Handle(Of(MessageType::kList)).reply.segments}) {
    ASSERT_EQ(segments.size(), 1u);
    EXPECT_EQ(segments[0].name, "run/0");
    EXPECT_EQ(segments[0].job_id, "job-1");
    EXPECT_EQ(segments[0].center_bytes, 64u);  // padded to a cache line
    EXPECT_EQ(segments[0].live_members, 2u);
  }
  segment->Leave(member);
  EXPECT_EQ(server_->List().at(0).live_members, 1u);
  segment->Leave(other);
}

TEST_F(ServerTest, AbsentWorkersConcernSegmentsOfNowAndLater) {
  const std::shared_ptr<Segment> now = Granted(OpenOf(), true);
  server_->MarkWorkerAbsent(1);
  server_->MarkWorkerAbsent(1u << 31);  // no such worker: harmless
  EXPECT_TRUE(now->IsAbsent(1));
  EXPECT_FALSE(now->IsAbsent(0));
  Request later = OpenOf();
  later.open.segment_name = "run/1";
  EXPECT_TRUE(Granted(later, true)->IsAbsent(1));
}

TEST_F(ServerTest, BadRequestsCreateNothing) {
  Refused(OpenOf("job-1", OnExisting::kFail, 0), StatusCode::kInvalidArgument, "num_workers");
  Refused(OpenOf(""), StatusCode::kInvalidArgument, "job id");
  Refused(OpenOf("job-1", OnExisting::kFail, 1, 1LL << 46), StatusCode::kResourceExhausted, "MiB");
  Refused(Of(MessageType::kReply), StatusCode::kInvalidArgument, "takes requests");
  EXPECT_TRUE(server_->List().empty());
}

TEST_F(ServerTest, OneServerAnAddress) {
  const std::string address = server_->address();
  const Status status = Server::Start({address, 10.0, ""}).status();
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(status.message().find(address), std::string::npos);
  server_.reset();
  EXPECT_TRUE(Server::Start({address, 10.0, ""}).ok());  // nothing was left behind
}

TEST(ServerStartTest, BadAddresses) {
  EXPECT_EQ(Server::Start({"nowhere", 10.0, ""}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Server::Start({"ftp://x", 10.0, ""}).status().code(), StatusCode::kInvalidArgument);
  const Status status = Server::Start({"shm://" + std::string(200, 'x'), 10.0, ""}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("longer than"), std::string::npos);
}

}  // namespace
}  // namespace tf_smb
