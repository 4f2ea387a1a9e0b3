// AttachedSegment and Client, against a server in this process.
#include "cc/client/attached_segment.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

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

namespace tf_smb {
namespace {

constexpr double kLongSeconds = 60.0;

Deadline Long() { return Deadline::After(kLongSeconds); }

bool WaitUntil(const std::function<bool()>& condition) {
  const Deadline deadline = Long();
  while (!condition()) {
    if (deadline.Expired()) return false;
    usleep(1000);
  }
  return true;
}

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
  std::vector<float*> pointers() {
    std::vector<float*> result;
    for (std::vector<float>& v : x) result.push_back(v.data());
    return result;
  }
  std::vector<const float*> const_pointers() const {
    std::vector<const float*> result;
    for (const std::vector<float>& v : x) result.push_back(v.data());
    return result;
  }
  Result<ExchangeOutcome> TryExchange() {
    return segment->Exchange(const_pointers(), pointers(), MoveOutput::kValue, ++steps);
  }
  ExchangeOutcome Exchange() {
    const Result<ExchangeOutcome> outcome = TryExchange();
    EXPECT_TRUE(outcome.ok()) << outcome.status().message();
    return outcome.ok() ? *outcome : ExchangeOutcome::kSkipped;
  }
  float Center() {
    Worker reader(segment);
    EXPECT_TRUE(segment->Read(reader.pointers(), Long()).ok());
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
                                       lease_s}))
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
    variables[0].shape = {static_cast<int64_t>(kChunkElements) + 7};
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
  // As if `worker` had not renewed for long, and somebody noticed.
  void Fence(Worker* worker) {
    const MemberId member = *worker->segment->member();
    const HandledRequest handled = server_->Handle([] {
      tf_smb::Request request;
      request.type = MessageType::kAttach;
      request.segment_name = "run/0";
      return request;
    }());
    const Result<MemoryMapping> raw = MemoryMapping::MapShared(
        handled.segment->fd(), kPageBytes);
    const uint64_t control_offset =
        reinterpret_cast<const SegmentHeader*>(raw->data())->control_offset;
    const Result<MemoryMapping> whole = MemoryMapping::MapShared(
        handled.segment->fd(), control_offset + sizeof(ControlBlock));
    auto* const control = reinterpret_cast<ControlBlock*>(whole->data() + control_offset);
    control->members[member.slot].renewed_nanos.store(BootTimeNanos() - 36000 * kNanosPerSecond);
    EXPECT_TRUE(handled.segment->Reap());
  }

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
  EXPECT_EQ(worker.segment->TrySeed(worker.const_pointers(), Long()).status().code(),
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
  Worker a = Joined({MoveKind::kElastic, 0.5f, true}), b = Joined({MoveKind::kElastic, 0.5f, true});
  a.Fill(8.0f);
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kMoved);  // rate 0.5 / 2, center 0
  EXPECT_TRUE(a.AllEqual(6.0f));
  EXPECT_EQ(b.Center(), 2.0f);
  EXPECT_EQ(a.segment->stats().last_rate, 0.25f);
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
  const ExchangeRule rule{MoveKind::kDelta, 1.0f, true};
  Worker a = Joined(rule), b = Joined(rule);
  for (Worker* const worker : {&a, &b}) {
    ASSERT_TRUE(worker->segment->Rebase(worker->const_pointers()).ok());
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
  const ExchangeRule delta{MoveKind::kDelta, 1.0f, true};
  Worker a = Joined(delta), b = Joined();
  ASSERT_TRUE(a.segment->Rebase(a.const_pointers()).ok());
  ASSERT_TRUE(a.segment->SetRule({MoveKind::kElastic, 1.0f, false}).ok());
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
  const auto server = Server::Start({address, 10.0});
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
  const auto outcome = segment->Exchange({x.data()}, {x.data()}, MoveOutput::kValue, 1);
  EXPECT_EQ(outcome.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(outcome.status().message().find("'kernel'"), std::string::npos);
  ASSERT_TRUE(segment->Read({center.data()}, Deadline::After(10.0)).ok());
  EXPECT_TRUE(AllFinite(center.data(), center.size()));
  EXPECT_EQ(center.back(), 0.0f);
}

TEST_F(AttachedSegmentTest, FirstSeedsOthersDoNot) {
  Worker a = Joined(), b = Joined();
  a.Fill(2.0f);
  b.Fill(7.0f);
  EXPECT_TRUE(*a.segment->TrySeed(a.const_pointers(), Long()));
  EXPECT_FALSE(*b.segment->TrySeed(b.const_pointers(), Long()));
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
      EXPECT_TRUE(b.segment->Read(reader.pointers(), Long()).ok());
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
  Worker a = Open(/*num_threads=*/3), b = Joined({MoveKind::kElastic, 0.5f, false});
  ASSERT_TRUE(a.segment->SetRule({MoveKind::kElastic, 0.5f, false}).ok());
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
    ASSERT_TRUE(worker->segment->SetRule({MoveKind::kDelta, 1.0f, true}).ok());
    ASSERT_TRUE(worker->segment->Join(std::nullopt).ok());
    ASSERT_TRUE(worker->segment->Rebase(worker->const_pointers()).ok());
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
                                a->segment->Read(a->pointers(), Long()),
                                a->segment->Write(a->const_pointers(), Long()),
                                a->segment->Rebase(a->const_pointers()),
                                a->segment->SetRule(ExchangeRule()),
                                a->segment->TrySeed(a->const_pointers(), Long()).status(),
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
