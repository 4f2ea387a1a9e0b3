// AttachedSegment and Client, against a server in this process.
#include "cc/client/attached_segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/client/client.h"
#include "cc/client/segment_registry.h"
#include "cc/server/server.h"
#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

constexpr auto kChunkFloats = static_cast<int64_t>(kChunkBytes / sizeof(float));

// A worker of a model with two variables, the first beyond one chunk.
class Worker {
 public:
  explicit Worker(std::shared_ptr<AttachedSegment> segment) : segment(std::move(segment)) {
    for (const Variable& variable : this->segment->layout().variables()) {
      x.emplace_back(variable.num_elements, 0.0f);
    }
  }
  void Fill(float value) {
    for (std::vector<float>& v : x) std::fill(v.begin(), v.end(), value);
  }
  bool AllEqual(float value) const {
    for (const std::vector<float>& v : x) {
      for (const float element : v) {
        if (element != value) return false;
      }
    }
    return true;
  }
  std::vector<void*> pointers() {
    std::vector<void*> result;
    for (std::vector<float>& v : x) result.push_back(v.data());
    return result;
  }
  std::vector<Span> spans() { return WholeSpans(segment->layout(), pointers()); }
  std::vector<ConstSpan> const_spans() const {
    std::vector<const void*> result;
    for (const std::vector<float>& v : x) result.push_back(v.data());
    return WholeSpans(segment->layout(), result);
  }
  Result<ExchangeOutcome> TryExchange() {
    return segment->Exchange(const_spans(), pointers(), MoveOutput::kValue, ++steps);
  }
  ExchangeOutcome Exchange() {
    const Result<ExchangeOutcome> outcome = TryExchange();
    EXPECT_TRUE(outcome.ok()) << outcome.status().message();
    return outcome.ok() ? *outcome : ExchangeOutcome::kSkipped;
  }
  float Center() {
    Worker reader(segment);
    EXPECT_TRUE(segment->Read(reader.spans(), Long()).ok());
    EXPECT_TRUE(reader.AllEqual(reader.x[0][0]));
    return reader.x[0][0];
  }

  std::shared_ptr<AttachedSegment> segment;
  std::vector<std::vector<float>> x;
  uint64_t steps = 0;
};

class AttachedSegmentTest : public testing::Test {
 protected:
  void SetUp() override { StartServer(3600.0); }

  void StartServer(double lease_s) {
    static int count = 0;
    client_.reset();
    server_ = std::move(Server::Start({"shm://attached_segment_test-" + std::to_string(getpid()) +
                                           "-" + std::to_string(++count),
                                       lease_s, directory_}))
                  .value();
    client_ = std::move(Client::Connect(server_->address(), Long())).value();
  }

  static OpenRequest Request(const std::string& name = "run/0") {
    OpenRequest request;
    request.segment_name = name;
    request.job_id = "job";
    request.num_workers = 2;
    std::vector<Variable> variables(2);
    variables[0].name = "kernel";
    variables[0].shape = {kChunkFloats + 7};
    variables[1].name = "bias";
    variables[1].shape = {3};
    request.layout = *Layout::Create(variables);
    return request;
  }
  Worker Open(int num_threads = 1) {
    Result<std::shared_ptr<AttachedSegment>> segment =
        client_->Open(Request(), num_threads, Long());
    EXPECT_TRUE(segment.ok()) << segment.status().message();
    return Worker(*segment);
  }
  Worker Joined(const ExchangeRule& rule = ExchangeRule()) {
    Worker worker = Open();
    EXPECT_TRUE(worker.segment->SetRule(rule).ok());
    const Status status = worker.segment->Join(std::nullopt);
    EXPECT_TRUE(status.ok()) << status.message();
    return worker;
  }
  // The server's own.
  std::shared_ptr<Segment> Raw() {
    tf_smb::Request request;
    request.type = MessageType::kAttach;
    request.segment_name = "run/0";
    return server_->Handle(request).segment;
  }
  // As if `worker` had not renewed for long, and somebody noticed.
  void Fence(Worker* worker) {
    const MemberId member = *worker->segment->member();
    const std::shared_ptr<Segment> segment = Raw();
    RawSegment(segment->fd()).Expire(member);
    EXPECT_TRUE(segment->Reap());
  }

  std::string directory_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Client> client_;
};

TEST_F(AttachedSegmentTest, JoiningAndLeaving) {
  Worker a = Open(), b = Open();
  EXPECT_TRUE(a.segment->created());
  EXPECT_FALSE(b.segment->created());
  EXPECT_FALSE(a.segment->joined());
  EXPECT_EQ(a.segment->worker_index().status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(a.segment->Join(5).ok());
  EXPECT_TRUE(a.segment->joined());
  EXPECT_EQ(*a.segment->worker_index(), 5u);
  EXPECT_EQ(a.segment->Join(6).code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(b.segment->Join(5).code(), StatusCode::kAlreadyExists);
  EXPECT_FALSE(b.segment->joined());
  ASSERT_TRUE(b.segment->Join(std::nullopt).ok());
  EXPECT_EQ(*b.segment->worker_index(), 0u);
  a.segment->Leave();
  a.segment->Leave();
  EXPECT_FALSE(a.segment->joined());
  EXPECT_EQ(b.segment->control()->CountLive(), 1u);
  EXPECT_TRUE(a.segment->Join(5).ok());
  a.segment.reset();  // leaves
  EXPECT_EQ(b.segment->control()->CountLive(), 1u);
}

TEST_F(AttachedSegmentTest, OnlyMembersExchange) {
  Worker worker = Open(), other = Joined();
  EXPECT_EQ(worker.TryExchange().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(worker.segment->last_error().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(worker.segment->TrySeed(worker.const_spans(), Long()).status().code(),
            StatusCode::kFailedPrecondition);
  ASSERT_EQ(worker.segment->Join(0).code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(worker.TryExchange().status().code(), StatusCode::kFailedPrecondition);
  ASSERT_TRUE(worker.segment->Join(1).ok());
  EXPECT_EQ(worker.Exchange(), ExchangeOutcome::kMoved);
  EXPECT_TRUE(worker.segment->last_error().ok());
  worker.segment->Leave();
  EXPECT_EQ(worker.TryExchange().status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(worker.segment->stats().exchanges, 1u);
  EXPECT_EQ(worker.segment->stats().skipped_exchanges, 0u);
}

TEST_F(AttachedSegmentTest, AloneCopies) {
  Worker worker = Joined();
  worker.Fill(3.0f);
  EXPECT_EQ(worker.Exchange(), ExchangeOutcome::kUnchanged);
  EXPECT_TRUE(worker.AllEqual(3.0f));
  EXPECT_EQ(worker.Center(), 3.0f);
  EXPECT_EQ(worker.segment->stats().last_num_live, 1u);
  EXPECT_EQ(worker.segment->control()->Members().at(0).steps, 1u);
}

TEST_F(AttachedSegmentTest, ElasticMovesBothAndTheLastMeetsTheCenterOnce) {
  Worker a = Joined({MoveKind::kElastic, 0.5, true}), b = Joined({MoveKind::kElastic, 0.5, true});
  a.Fill(8.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);  // rate 0.5 / 2, center 0
  EXPECT_TRUE(a.AllEqual(6.0f));
  EXPECT_EQ(b.Center(), 2.0f);
  EXPECT_EQ(a.segment->stats().last_rate, 0.25);
  EXPECT_EQ(a.segment->stats().last_num_live, 2u);
  EXPECT_EQ(b.Exchange(), ExchangeOutcome::kMoved);
  EXPECT_TRUE(b.AllEqual(0.5f));
  EXPECT_EQ(b.segment->stats().last_staleness, 1u);
  b.segment->Leave();
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);  // half way to what b left behind
  EXPECT_TRUE(a.AllEqual(3.75f));
  EXPECT_EQ(a.Center(), 3.75f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kUnchanged);
}

TEST_F(AttachedSegmentTest, DeltaMeasuresFromTheLastExchange) {
  const ExchangeRule rule{MoveKind::kDelta, 1.0, true};
  Worker a = Joined(rule), b = Joined(rule);
  for (Worker* const worker : {&a, &b}) {
    ASSERT_TRUE(worker->segment->Rebase(worker->const_spans()).ok());
  }
  a.Fill(4.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
  EXPECT_TRUE(a.AllEqual(2.0f));  // half of its progress
  b.Fill(6.0f);
  b.Exchange();
  EXPECT_TRUE(b.AllEqual(5.0f));
  a.Exchange();  // no progress of its own
  EXPECT_TRUE(a.AllEqual(5.0f));
  b.segment->Leave();
  a.Fill(6.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);  // alone: its whole progress
  EXPECT_EQ(a.Center(), 6.0f);
}

TEST_F(AttachedSegmentTest, WhatAnotherRuleMovedIsNoProgress) {
  const ExchangeRule delta{MoveKind::kDelta, 1.0, true};
  Worker a = Joined(delta), b = Joined();
  ASSERT_TRUE(a.segment->Rebase(a.const_spans()).ok());
  ASSERT_TRUE(a.segment->SetRule({MoveKind::kElastic, 1.0, false}).ok());
  a.Fill(100.0f);
  a.Exchange();  // takes the center, 0, which becomes 100
  ASSERT_TRUE(a.AllEqual(0.0f));
  ASSERT_TRUE(a.segment->SetRule(delta).ok());
  a.Fill(50.0f);
  a.Exchange();  // measures from here on
  EXPECT_TRUE(a.AllEqual(100.0f));
  EXPECT_EQ(b.Center(), 100.0f);
}

TEST_F(AttachedSegmentTest, NotFiniteIsNamedAndTouchesNothing) {
  Worker a = Joined(), b = Joined();
  a.Fill(1.0f);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity()}) {
    a.x[1][2] = bad;
    const Status status = a.TryExchange().status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("'bias' float32[3]"), std::string::npos);
    EXPECT_EQ(b.Center(), 0.0f);
    EXPECT_EQ(a.x[0][0], 1.0f);
    EXPECT_EQ(a.segment->last_error().message(), status.message());
  }
}

// A model larger than what is looked at beforehand: one bad element at its very end.
TEST(AttachedSegmentLargeTest, NotFiniteNeverReachesTheCenter) {
  const std::string address = "shm://large-" + std::to_string(getpid());
  const auto server = Server::Start({address, 10.0, ""});
  ASSERT_TRUE(server.ok());
  const auto client = Client::Connect(address, Deadline::After(10.0));
  ASSERT_TRUE(client.ok());
  OpenRequest request;
  request.segment_name = "large";
  request.job_id = "job";
  Variable kernel;
  kernel.name = "kernel";
  kernel.shape = {5 << 20};
  request.layout = *Layout::Create({kernel});
  const auto segment = *(*client)->Open(request, 1, Deadline::After(10.0));
  const auto other = *(*client)->Attach("large", 1, Deadline::After(10.0));
  ASSERT_TRUE(segment->Join(0).ok());
  ASSERT_TRUE(other->Join(1).ok());
  std::vector<float> x(5 << 20, 1.0f), center(5 << 20);
  x.back() = std::numeric_limits<float>::quiet_NaN();
  const auto outcome =
      segment->Exchange({{0, 0, 5 << 20, x.data()}}, {x.data()}, MoveOutput::kValue, 1);
  EXPECT_EQ(outcome.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(outcome.status().message().find("'kernel'"), std::string::npos);
  ASSERT_TRUE(segment->Read({{0, 0, 5 << 20, center.data()}}, Deadline::After(10.0)).ok());
  EXPECT_TRUE(AllFinite(DType::kFloat32, center.data(), center.size()));
  EXPECT_EQ(center.back(), 0.0f);
}

TEST_F(AttachedSegmentTest, FirstSeedsOthersDoNot) {
  Worker a = Joined(), b = Joined();
  a.Fill(2.0f);
  b.Fill(7.0f);
  EXPECT_TRUE(*a.segment->TrySeed(a.const_spans(), Long()));
  EXPECT_FALSE(*b.segment->TrySeed(b.const_spans(), Long()));
  EXPECT_TRUE(b.segment->control()->seeded());
  EXPECT_EQ(b.Center(), 2.0f);
}

TEST_F(AttachedSegmentTest, FencedWorkerSkipsAndJoinsAgain) {
  Worker a = Joined(), b = Joined();
  const uint64_t incarnation = a.segment->member()->incarnation;
  Fence(&a);
  EXPECT_EQ(b.segment->control()->CountLive(), 1u);
  a.Fill(1.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kSkipped);
  EXPECT_TRUE(a.AllEqual(1.0f));
  EXPECT_EQ(b.Center(), 0.0f);
  // The skipped exchange made it renew at once, long before a fifth of its lease.
  ASSERT_TRUE(WaitUntil([&] {
    const Result<MemberId> member = a.segment->member();
    return member.ok() && member->incarnation > incarnation;
  }));
  EXPECT_EQ(*a.segment->worker_index(), 0u);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
  EXPECT_EQ(a.segment->stats().times_fenced, 1u);
  EXPECT_EQ(a.segment->stats().skipped_exchanges, 1u);
}

TEST_F(AttachedSegmentTest, RenewsByItself) {
  StartServer(/*lease_s=*/1.0);
  Worker a = Joined(), b = Joined();
  const Deadline deadline = Deadline::After(2.0);
  while (!deadline.Expired()) {
    ASSERT_EQ(b.segment->control()->Members().size(), 2u);
    usleep(50'000);
  }
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
}

TEST_F(AttachedSegmentTest, LeavingEarlyIsNotFencing) {
  StartServer(/*lease_s=*/0.1);  // renews every 20 ms
  Worker a = Joined(), b = Joined();
  a.segment->control()->SetTraining(*a.segment->member(), true);
  b.segment->control()->SetTraining(*b.segment->member(), true);
  ASSERT_TRUE(a.segment->control()->LeaveUnlessLast(*a.segment->member()));
  usleep(200'000);
  EXPECT_EQ(a.segment->stats().times_fenced, 0u);
  uint32_t of_worker_0 = 0;
  for (const MemberInfo& member : b.segment->control()->Members()) {
    of_worker_0 += member.worker_index == 0 ? 1 : 0;
  }
  EXPECT_EQ(of_worker_0, 1u);  // it did not join again
  a.segment->Leave();
}

TEST_F(AttachedSegmentTest, IsThreadSafe) {
  StartServer(/*lease_s=*/0.5);
  Worker a = Joined(), b = Joined(), c = Open();
  std::atomic<bool> stopping{false};
  std::vector<std::thread> threads;
  for (Worker* const worker : {&a, &b}) {
    threads.emplace_back([&stopping, worker] {
      worker->Fill(1.0f);
      while (!stopping.load()) {
        EXPECT_TRUE(worker->TryExchange().ok());
        worker->segment->stats();
      }
    });
  }
  threads.emplace_back([&] {
    while (!stopping.load()) {
      Worker reader(b.segment);
      EXPECT_TRUE(b.segment->Read(reader.spans(), Long()).ok());
      for (const float value : reader.x[0]) ASSERT_TRUE(value >= 0.0f && value <= 1.0f);
      EXPECT_TRUE(a.segment->SetRule(ExchangeRule()).ok());
    }
  });
  for (int i = 0; i < 2; ++i) {  // two that join and leave the same object
    threads.emplace_back([&] {
      while (!stopping.load()) {
        const Status status = c.segment->Join(std::nullopt);
        EXPECT_TRUE(status.ok() || status.code() == StatusCode::kFailedPrecondition);
        c.segment->Leave();
      }
    });
  }
  usleep(300'000);
  stopping.store(true);
  for (std::thread& thread : threads) thread.join();
}

TEST_F(AttachedSegmentTest, ThreadsShareTheChunks) {
  Worker a = Open(/*num_threads=*/3), b = Joined({MoveKind::kElastic, 0.5, false});
  ASSERT_TRUE(a.segment->SetRule({MoveKind::kElastic, 0.5, false}).ok());
  ASSERT_TRUE(a.segment->Join(std::nullopt).ok());
  a.Fill(4.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
  EXPECT_TRUE(a.AllEqual(2.0f));
  EXPECT_EQ(b.Center(), 2.0f);
}

TEST_F(AttachedSegmentTest, EmptyVariablesOnly) {
  OpenRequest request = Request("empty");
  std::vector<Variable> variables(1);
  variables[0].name = "none";
  variables[0].shape = {0};
  request.layout = *Layout::Create(variables);
  Worker a(*client_->Open(request, 1, Long())), b(*client_->Open(request, 1, Long()));
  for (Worker* const worker : {&a, &b}) {
    ASSERT_TRUE(worker->segment->SetRule({MoveKind::kDelta, 1.0, true}).ok());
    ASSERT_TRUE(worker->segment->Join(std::nullopt).ok());
    ASSERT_TRUE(worker->segment->Rebase(worker->const_spans()).ok());
    EXPECT_TRUE(worker->TryExchange().ok());
  }
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
}

TEST_F(AttachedSegmentTest, NamesAreCheckedBeforeTheyTravel) {
  EXPECT_EQ(client_->Open(Request(std::string(201, 'x')), 1, Long()).status().code(),
            StatusCode::kInvalidArgument);
  OpenRequest long_job = Request();
  long_job.job_id = std::string(101, 'x');
  EXPECT_EQ(client_->Open(long_job, 1, Long()).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Attach("", 1, Long()).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Free("", Long()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->Free("absent", Long()).code(), StatusCode::kNotFound);
}

TEST_F(AttachedSegmentTest, HandlesAreNeverUsedTwice) {
  Worker a = Open(), b = Open();
  const int64_t first = RegisterSegment(a.segment);
  EXPECT_EQ(FindSegment(first), a.segment);
  UnregisterSegment(first);
  UnregisterSegment(first);
  EXPECT_EQ(FindSegment(first), nullptr);
  const int64_t second = RegisterSegment(b.segment);
  EXPECT_GT(second, first);
  UnregisterSegment(second);
}

// --- Each other --------------------------------------------------------------------

WaitOptions Within(double seconds) {
  WaitOptions options;
  options.timeout_s = seconds;
  return options;
}

TEST_F(AttachedSegmentTest, BarrierLetsNobodyThroughAlone) {
  Worker a = Joined(), b = Joined();
  const Status early = a.segment->Barrier({0, 1}, Within(0.05));
  EXPECT_EQ(early.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(early.message().find("waited 0.05 s in vain for worker 1 at the barrier"),
            std::string::npos)
      << early.message();
  std::atomic<bool> through{false};
  std::thread other([&] {
    EXPECT_TRUE(b.segment->Barrier({0, 1}, Within(kLongSeconds)).ok());
    through.store(true);
  });
  usleep(50'000);
  EXPECT_FALSE(through.load());  // a's first coming was withdrawn
  EXPECT_TRUE(a.segment->Barrier({0, 1}, Within(kLongSeconds)).ok());
  other.join();
}

TEST_F(AttachedSegmentTest, BarrierOfAFencedMember) {
  Worker a = Joined(), b = Joined();
  std::thread fencer([&] {
    usleep(50'000);
    Fence(&a);
  });
  const Status status = a.segment->Barrier({0, 1}, Within(kLongSeconds));
  fencer.join();
  EXPECT_EQ(status.code(), StatusCode::kAborted) << status.message();
}

TEST_F(AttachedSegmentTest, PollEndsAnyWait) {
  Worker a = Joined(), b = Joined();
  WaitOptions options = Within(kLongSeconds);
  options.poll = [] { return InternalError("interrupted"); };
  ASSERT_TRUE(b.segment->Lock(60.0, Within(1.0)).ok());
  for (const Status& status :
       {a.segment->Barrier({0, 1}, options), a.segment->Lock(1.0, options).status(),
        a.segment->WaitForVersion(100, options).status(),
        a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, options).status()}) {
    EXPECT_EQ(status.ToString(), "INTERNAL: interrupted");
  }
}

TEST_F(AttachedSegmentTest, LockNamesItsHolder) {
  Worker a = Joined(), b = Joined();
  const Result<uint64_t> token = b.segment->Lock(60.0, Within(1.0));
  ASSERT_TRUE(token.ok());
  const Status status = a.segment->Lock(60.0, Within(0.05)).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("the lock of segment 'run/0', which worker 1 has"),
            std::string::npos)
      << status.message();
  std::thread releaser([&] {
    usleep(50'000);
    EXPECT_TRUE(b.segment->Unlock(*token).ok());
  });
  const Result<uint64_t> next = a.segment->Lock(60.0, Within(kLongSeconds));
  releaser.join();
  ASSERT_TRUE(next.ok());
  EXPECT_GT(*next, *token);
  EXPECT_EQ(b.segment->Unlock(*token).code(), StatusCode::kAborted);
}

TEST_F(AttachedSegmentTest, LockLapses) {
  Worker a = Joined(), b = Joined();
  const Result<uint64_t> token = b.segment->Lock(0.1, Within(1.0));
  EXPECT_TRUE(a.segment->Lock(1.0, Within(kLongSeconds)).ok());  // no change tells of it
  EXPECT_EQ(b.segment->Unlock(*token).code(), StatusCode::kAborted);
}

TEST_F(AttachedSegmentTest, WaitingForAVersion) {
  Worker a = Joined(), b = Joined();
  const Status status = a.segment->WaitForVersion(1, Within(0.05)).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("segment 'run/0' is at version 0, and did not come to 1"),
            std::string::npos);
  std::thread writer([&] {
    usleep(20'000);
    EXPECT_TRUE(b.segment->Write(b.const_spans(), Long()).ok());
  });
  EXPECT_EQ(*a.segment->WaitForVersion(1, Within(kLongSeconds)), 1u);
  writer.join();
}

// --- Accumulate and rounds -----------------------------------------------------------

TEST_F(AttachedSegmentTest, AccumulateAddsAndSaysWhatIsWrong) {
  Worker a = Open();  // nobody has to be a member
  a.Fill(2.0f);
  ASSERT_TRUE(a.segment->Accumulate(a.const_spans(), 1.5, Long()).ok());
  ASSERT_TRUE(a.segment->Accumulate(a.const_spans(), -0.5, Long()).ok());
  EXPECT_EQ(a.Center(), 2.0f);
  Status status = a.segment->Accumulate(
      a.const_spans(), std::numeric_limits<double>::quiet_NaN(), Long());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  a.x[0][5] = std::numeric_limits<float>::infinity();
  status = a.segment->Accumulate(a.const_spans(), 1.0, Long());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("'kernel'"), std::string::npos);
  EXPECT_EQ(a.Center(), 2.0f);
  EXPECT_EQ(a.segment->control()->version(), 2u);
}

TEST_F(AttachedSegmentTest, AxpyOfTwoSegments) {
  Worker a = Open();
  Worker b(*client_->Open(Request("run/1"), 1, Long()));
  a.Fill(1.0f);
  b.Fill(4.0f);
  ASSERT_TRUE(a.segment->Write(a.const_spans(), Long()).ok());
  ASSERT_TRUE(b.segment->Write(b.const_spans(), Long()).ok());
  ASSERT_TRUE(a.segment->Axpy(0.5, b.segment.get(), Long()).ok());
  EXPECT_EQ(a.Center(), 3.0f);
  EXPECT_EQ(b.Center(), 4.0f);
}

TEST_F(AttachedSegmentTest, AveragesOfAllMembers) {
  Worker a = Joined(), b = Joined();
  for (int round = 1; round <= 3; ++round) {
    a.Fill(static_cast<float>(8 * round));
    b.Fill(static_cast<float>(4 * round));
    std::thread other([&] {
      const Result<RoundResult> result =
          b.segment->Average(b.const_spans(), b.pointers(), 1.0, 20, Within(kLongSeconds));
      ASSERT_TRUE(result.ok()) << result.status().message();
      EXPECT_EQ(result->round, static_cast<uint64_t>(round));
      EXPECT_TRUE(result->missing.empty());
    });
    const Result<RoundResult> result =
        a.segment->Average(a.const_spans(), a.pointers(), 3.0, 10, Within(kLongSeconds));
    other.join();
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_TRUE(a.AllEqual(static_cast<float>(7 * round)));
    EXPECT_TRUE(b.AllEqual(static_cast<float>(7 * round)));
  }
  EXPECT_EQ(a.segment->control()->Members().at(1).steps, 20u);
}

TEST_F(AttachedSegmentTest, AverageGoesOnWithoutTheLate) {
  Worker a = Joined(), late = Joined();
  a.Fill(8.0f);
  late.Fill(4.0f);
  Result<RoundResult> result =
      a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, Within(0.05));
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->round, 1u);
  EXPECT_EQ(result->missing, (std::vector<uint32_t>{1}));
  EXPECT_TRUE(a.AllEqual(8.0f));
  // The late one comes to the next round.
  result = late.segment->Average(late.const_spans(), late.pointers(), 1.0, 1, Within(0.05));
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->round, 2u);
  EXPECT_EQ(result->missing, (std::vector<uint32_t>{0}));
  EXPECT_TRUE(late.AllEqual(4.0f));
}

// An interrupted worker neither holds up the others nor itself.
TEST_F(AttachedSegmentTest, InterruptedAverageCanBeMadeAgain) {
  Worker a = Joined(), b = Joined();
  a.Fill(8.0f);
  b.Fill(4.0f);
  WaitOptions interrupted = Within(kLongSeconds);
  interrupted.poll = [] { return InternalError("interrupted"); };
  EXPECT_EQ(a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, interrupted).status().code(),
            StatusCode::kInternal);
  Result<RoundResult> result =
      b.segment->Average(b.const_spans(), b.pointers(), 1.0, 1, Within(kLongSeconds));
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(b.AllEqual(6.0f));  // its share had been in
  std::thread other([&] {
    EXPECT_TRUE(
        b.segment->Average(b.const_spans(), b.pointers(), 1.0, 1, Within(kLongSeconds)).ok());
  });
  result = a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, Within(kLongSeconds));
  other.join();
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->round, 2u);
  EXPECT_TRUE(a.AllEqual(7.0f));
}

// A stopped process has a chunk: who could not put its share in is told, the others go on
// with what is in, and it comes to the next round, not to this one again.
TEST_F(AttachedSegmentTest, ShareThatFailedHoldsUpNobody) {
  Worker a = Joined(), b = Joined();
  const RawSegment raw(Raw()->fd());
  const pid_t holder = Spawn([&raw] {
    if (!Holds(raw.chunk(1)->mutex.TryLock())) return 1;
    raise(SIGSTOP);
    raw.chunk(1)->mutex.Unlock();
    return 0;
  });
  WaitStopped(holder);
  a.Fill(8.0f);
  b.Fill(4.0f);
  const Status status =
      a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, Within(kLongSeconds)).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("1 chunks of segment 'run/0' stayed locked in round 1"),
            std::string::npos)
      << status.message();
  EXPECT_TRUE(a.AllEqual(8.0f));
  kill(holder, SIGCONT);
  EXPECT_EQ(WaitExit(holder), 0);
  const Result<RoundResult> result =
      b.segment->Average(b.const_spans(), b.pointers(), 1.0, 1, Within(kLongSeconds));
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->round, 1u);
  EXPECT_EQ(b.x[0][0], 6.0f);
  EXPECT_EQ(b.x[1][2], 4.0f);  // in chunk 1
  EXPECT_EQ(a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, Within(0.05))->round, 2u);
}

TEST_F(AttachedSegmentTest, BadSharesAreRefused) {
  Worker a = Joined();
  for (const double weight : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(a.segment->Average(a.const_spans(), a.pointers(), weight, 1, Within(1.0))
                  .status()
                  .code(),
              StatusCode::kInvalidArgument);
  }
  a.x[1][0] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, Within(1.0)).status().code(),
            StatusCode::kInvalidArgument);
  a.x[1][0] = 1.0f;
  EXPECT_EQ(a.segment->Average(a.const_spans(), a.pointers(), 1.0, 1, Within(1.0))->round, 1u);
}

TEST_F(AttachedSegmentTest, NonAtomicElasticIsThePapers) {
  const ExchangeRule rule{MoveKind::kElastic, 0.5, true, false};
  Worker a = Joined(rule), b = Joined(rule);
  a.Fill(8.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);  // rate 0.25, center 0
  EXPECT_TRUE(a.AllEqual(6.0f));
  EXPECT_EQ(b.Center(), 2.0f);
  b.Fill(6.0f);
  EXPECT_EQ(b.Exchange(), ExchangeOutcome::kMoved);
  EXPECT_TRUE(b.AllEqual(5.0f));
  EXPECT_EQ(b.Center(), 3.0f);
  // One that is not finite, found during: nothing has moved on either side.
  ASSERT_TRUE(a.segment->SetFiniteCheck(FiniteCheck::kDuring).ok());
  a.x[1][2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(a.TryExchange().status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(a.x[0][0], 6.0f);
  EXPECT_EQ(b.Center(), 3.0f);
}

// 'bias' is one: a half of the way at two workers, whatever happens to 'kernel'.
TEST_F(AttachedSegmentTest, StatisticsMoveByThemselves) {
  for (const ExchangeRule& rule :
       {ExchangeRule{MoveKind::kDelta, 0.5, true}, ExchangeRule{MoveKind::kElastic, 0.25, false},
        ExchangeRule{MoveKind::kElastic, 0.25, false, false}}) {
    StartServer(3600.0);
    Worker a = Joined(rule), b = Joined(rule);
    ASSERT_TRUE(a.segment->SetStatistics({false, true}).ok());
    ASSERT_TRUE(a.segment->Rebase(a.const_spans()).ok());
    a.Fill(8.0f);
    EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
    EXPECT_EQ(a.x[1][0], 4.0f);
    EXPECT_EQ(a.x[0][0], rule.kind == MoveKind::kDelta ? 2.0f : 6.0f);
    Worker reader(b.segment);
    ASSERT_TRUE(b.segment->Read(reader.spans(), Long()).ok());
    EXPECT_EQ(reader.x[0][0], 2.0f);
    EXPECT_EQ(reader.x[1][0], 4.0f);
    EXPECT_EQ(b.segment->control()->version(), 1u);  // one update
    b.segment->Leave();
    a.Fill(6.0f);
    EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);
    EXPECT_EQ(a.x[1][0], 5.0f);  // half way to what was left behind
    a.Fill(1.0f);
    EXPECT_EQ(a.Exchange(), ExchangeOutcome::kUnchanged);
    EXPECT_EQ(a.Center(), 1.0f);
    EXPECT_EQ(a.segment->SetStatistics({true}).code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(AttachedSegmentTest, DeltaExchangesWholeVariables) {
  const ExchangeRule rule{MoveKind::kDelta, 1.0, true};
  Worker a = Joined(rule), b = Joined(rule);
  a.Fill(1.0f);
  const Status status =
      a.segment->Exchange({{0, 0, 10, a.x[0].data()}}, {a.x[0].data()}, MoveOutput::kValue, 1)
          .status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("exchanges whole variables: of 'kernel' float32[65543] it was "
                                  "given 10 elements"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(b.Center(), 0.0f);
  // Some of the variables, in turn: each measures from when it was last there.
  ASSERT_TRUE(a.segment->Rebase(a.const_spans()).ok());
  a.Fill(3.0f);
  ASSERT_TRUE(
      a.segment->Exchange({{1, 0, 3, a.x[1].data()}}, {a.x[1].data()}, MoveOutput::kValue, 1).ok());
  EXPECT_EQ(a.x[1][0], 1.0f);  // half of its progress
  EXPECT_EQ(a.x[0][0], 3.0f);
}

TEST_F(AttachedSegmentTest, BadSpansAreRefusedBeforeTheyTravel) {
  Worker a = Joined();
  const std::vector<ConstSpan> bad = {{7, 0, 1, a.x[0].data()}};
  const std::vector<Span> bad_target = {{7, 0, 1, a.x[0].data()}};
  for (const Status& status :
       {a.segment->Write(bad, Long()), a.segment->Read(bad_target, Long()),
        a.segment->Accumulate(bad, 1.0, Long()), a.segment->Rebase(bad),
        a.segment->Exchange(bad, {a.x[0].data()}, MoveOutput::kValue, 1).status(),
        a.segment->Average(bad, {a.x[0].data()}, 1.0, 1, Within(1.0)).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("there is no variable 7"), std::string::npos);
  }
}

Schedule OnePhase() {
  return *Schedule::Create({{0, ExchangeRule(), 1}}, ScheduleUnit::kSteps);
}

// In a forked child every use is refused, and the child ends, whatever the parent's
// threads were doing at the fork.
TEST_F(AttachedSegmentTest, ForkedChildIsRefusedAndEnds) {
  auto a = std::make_unique<Worker>(Joined());
  auto b = std::make_unique<Worker>(Open());
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // a hang is a SIGALRM
      const Status refused[] = {a->TryExchange().status(),
                                a->segment->Read(a->spans(), Long()),
                                a->segment->Write(a->const_spans(), Long()),
                                a->segment->Rebase(a->const_spans()),
                                a->segment->Accumulate(a->const_spans(), 1.0, Long()),
                                a->segment->Axpy(1.0, b->segment.get(), Long()),
                                a->segment->SetFiniteCheck(FiniteCheck::kDuring),
                                a->segment
                                    ->Average(a->const_spans(), a->pointers(), 1.0, 1,
                                              WaitOptions())
                                    .status(),
                                a->segment->Barrier({0}, WaitOptions()),
                                a->segment->Lock(1.0, WaitOptions()).status(),
                                a->segment->Unlock(1),
                                a->segment->WaitForVersion(100, WaitOptions()).status(),
                                a->segment->SetRule(ExchangeRule()),
                                a->segment->SetSchedule(OnePhase(), 0),
                                a->segment->SetPeriod(2),
                                a->segment->SetStatistics({true, false}),
                                a->segment->BeginEpoch(1, 1),
                                a->segment->IsDue(1, 1).status(),
                                a->segment
                                    ->ExchangeScheduled(a->const_spans(), a->pointers(),
                                                        MoveOutput::kValue, 1, 1, WaitOptions())
                                    .status(),
                                a->segment->TrySeed(a->const_spans(), Long()).status(),
                                a->segment->member().status(),
                                a->segment->worker_index().status(),
                                a->segment->last_error(),
                                a->segment->CheckProcess(),
                                b->segment->Join(std::nullopt),
                                client_->List(Long()).status(),
                                client_->Open(Request(), 1, Long()).status(),
                                client_->Attach("run/0", 1, Long()).status(),
                                client_->Free("run/0", Long())};
      int code = 0;
      for (const Status& status : refused) {
        if (status.code() != StatusCode::kFailedPrecondition ||
            status.message().find("fork()") == std::string::npos ||
            status.message().find("'spawn'") == std::string::npos) {
          code = 1;
        }
      }
      if (a->segment->joined() || a->segment->stats().exchanges != 0) code = 2;
      a->segment->Leave();
      a.reset();
      b.reset();
      client_.reset();
      server_.reset();
      _exit(code);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  // The parent did not notice.
  EXPECT_TRUE(a->segment->joined());
  EXPECT_EQ(a->Exchange(), ExchangeOutcome::kUnchanged);
  EXPECT_TRUE(client_->List(Long()).ok());
}

}  // namespace
}  // namespace tf_smb
