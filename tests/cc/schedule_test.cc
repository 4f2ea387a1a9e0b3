// Schedules: what they are, and several workers that train by one.
#include "cc/client/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/client/client.h"
#include "cc/server/server.h"
#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

const ExchangeRule kElastic{MoveKind::kElastic, 0.5, false};
const ExchangeRule kDelta{MoveKind::kDelta, 1.0, true};
const ExchangeRule kRounds{MoveKind::kElastic, 1.0, true, true, true};

Schedule Make(std::vector<Phase> phases, ScheduleUnit unit = ScheduleUnit::kSteps) {
  const Result<Schedule> schedule = Schedule::Create(std::move(phases), unit);
  EXPECT_TRUE(schedule.ok()) << schedule.status().message();
  return *schedule;
}

// --- What they are -------------------------------------------------------------------

TEST(ScheduleTest, PhasesByPosition) {
  const Schedule schedule = Make({{0, kRounds, 1}, {10, kElastic, 4}, {11, kDelta, 4}});
  const std::vector<std::pair<uint64_t, uint64_t>> expected = {
      {0, 0}, {9, 0}, {10, 1}, {11, 2}, {1'000'000, 2}};
  for (const auto& [position, phase] : expected) EXPECT_EQ(schedule.PhaseAt(position), phase);
  EXPECT_FALSE(schedule.EndsPhase(0, 9));
  EXPECT_TRUE(schedule.EndsPhase(0, 10));
  EXPECT_TRUE(schedule.EndsPhase(1, 500));
  EXPECT_FALSE(schedule.EndsPhase(2, 500));
  EXPECT_FALSE(schedule.EndsPhase(7, 500));
}

TEST(ScheduleTest, WordsTellAllDifferences) {
  EXPECT_EQ(Make({{0, kRounds, 8}, {500, {MoveKind::kElastic, 0.9, true}, 16}}).ToString(),
            "by steps: from 0 rounds every 8; from 500 elastic at 0.9 / workers every 16");
  EXPECT_EQ(Make({{0, {MoveKind::kElastic, 0.2, false, false}, 1}, {2, kDelta, 3}},
                 ScheduleUnit::kEpochs)
                .ToString(),
            "by epochs: from 0 elastic (read, then accumulate) at 0.2 every 1; from 2 delta at 1 "
            "/ workers every 3");
  const ExchangeRule close{MoveKind::kElastic, std::nextafter(0.5, 1.0), false};
  EXPECT_NE(Make({{0, close, 1}}).ToString(), Make({{0, kElastic, 1}}).ToString());
  // What a rule of rounds does not look at makes no difference.
  const ExchangeRule rounds{MoveKind::kDelta, 7.0, false, false, true};
  EXPECT_EQ(Make({{0, rounds, 1}}).ToString(), Make({{0, kRounds, 1}}).ToString());
}

TEST(ScheduleTest, BadOnesAreRefused) {
  const std::vector<std::pair<std::vector<Phase>, std::string>> bad = {
      {{}, "1 to 64 phases, got 0"},
      {std::vector<Phase>(65), "1 to 64 phases, got 65"},
      {{{1, kElastic, 1}}, "begins at 0, got 1"},
      {{{0, kElastic, 1}, {5, kElastic, 1}, {5, kElastic, 1}},
       "must begin at 6 or later, after the one before it, got 5"},
      {{{0, kElastic, 0}}, "1 to 1000000000 steps, got 0"},
      {{{0, kElastic, kMaxPeriod + 1}}, "steps, got 1000000001"},
      {{{0, {MoveKind::kElastic, 1.5, true}, 1}}, "above 0 and at most 1"},
  };
  for (const auto& [phases, words] : bad) {
    const Status status = Schedule::Create(phases, ScheduleUnit::kSteps).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(WithoutAnchor(status.message()).find(words), std::string::npos)
        << status.message();
  }
}

// --- Workers -------------------------------------------------------------------------

WaitOptions Within(double seconds) {
  WaitOptions options;
  options.timeout_s = seconds;
  return options;
}

// A worker of a model of one variable, every element the same.
class Worker {
 public:
  explicit Worker(std::shared_ptr<AttachedSegment> segment) : segment(std::move(segment)) {}

  void Join(const Schedule& schedule) {
    ASSERT_TRUE(segment->SetSchedule(schedule, 0).ok());
    const Status joined = segment->Join(std::nullopt);
    ASSERT_TRUE(joined.ok()) << joined.message();
    SetTraining(true);
  }
  void SetTraining(bool training) {
    segment->control()->SetTraining(*segment->member(), training);
  }
  void Fill(float value) { x.assign(x.size(), value); }
  bool IsDue() {
    const Result<bool> due = segment->IsDue(steps, steps);
    EXPECT_TRUE(due.ok()) << due.status().message();
    return due.ok() && *due;
  }
  Result<ExchangeOutcome> TryExchange(const WaitOptions& options) {
    return segment->ExchangeScheduled(local(), {x.data()}, MoveOutput::kValue, steps, steps,
                                      options);
  }
  ExchangeOutcome Exchange() {
    const Result<ExchangeOutcome> outcome = TryExchange(Within(kLongSeconds));
    EXPECT_TRUE(outcome.ok()) << outcome.status().message();
    return outcome.ok() ? *outcome : ExchangeOutcome::kSkipped;
  }
  // One step; true if it exchanged. Never is a phase left out.
  bool Step(float change = 1.0f) {
    ++steps;
    for (float& element : x) element += change;
    const uint64_t before = phase();
    const bool due = IsDue();
    const uint64_t between = phase();
    EXPECT_LE(between, before + 1);
    if (!due) return false;
    exchanged_at.push_back(steps);
    outcomes.push_back(Exchange());
    EXPECT_LE(phase(), between + 1);
    return true;
  }
  std::vector<ConstSpan> local() const { return {{0, 0, x.size(), x.data()}}; }
  uint64_t phase() const { return segment->phase(); }
  float Center() {
    std::vector<float> center(x.size());
    EXPECT_TRUE(segment->Read({{0, 0, center.size(), center.data()}}, Long()).ok());
    return center[0];
  }

  std::shared_ptr<AttachedSegment> segment;
  std::vector<float> x = std::vector<float>(3, 0.0f);
  uint64_t steps = 0;
  std::vector<uint64_t> exchanged_at;
  std::vector<ExchangeOutcome> outcomes;
};

class ScheduledWorkersTest : public testing::Test {
 protected:
  void SetUp() override {
    static int count = 0;
    server_ = std::move(Server::Start({"shm://schedule_test-" + std::to_string(getpid()) + "-" +
                                           std::to_string(++count),
                                       3600.0, ""}))
                  .value();
    client_ = std::move(Client::Connect(server_->address(), Long())).value();
  }
  std::unique_ptr<Worker> Open() {
    OpenRequest request;
    request.segment_name = "run/0";
    request.job_id = "job";
    request.num_workers = 2;
    request.layout = LayoutOf({{3}});
    Result<std::shared_ptr<AttachedSegment>> segment = client_->Open(request, 1, Long());
    EXPECT_TRUE(segment.ok()) << segment.status().message();
    return std::make_unique<Worker>(*segment);
  }
  std::unique_ptr<Worker> Joined(const Schedule& schedule) {
    std::unique_ptr<Worker> worker = Open();
    worker->Join(schedule);
    return worker;
  }
  std::vector<std::unique_ptr<Worker>> Several(size_t count, const Schedule& schedule) {
    std::vector<std::unique_ptr<Worker>> workers;
    for (size_t i = 0; i < count; ++i) workers.push_back(Joined(schedule));
    return workers;
  }
  // Each worker on a thread.
  template <typename Work>
  static void Together(std::vector<std::unique_ptr<Worker>>* workers, const Work& work) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < workers->size(); ++i) {
      threads.emplace_back([&, i] { work((*workers)[i].get(), i); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  std::shared_ptr<Segment> Raw() {
    tf_smb::Request request;
    request.type = MessageType::kAttach;
    request.segment_name = "run/0";
    return server_->Handle(request).segment;
  }
  void Fence(Worker* worker) {
    const MemberId member = *worker->segment->member();
    const std::shared_ptr<Segment> segment = Raw();
    RawSegment(segment->fd()).Expire(member);
    EXPECT_TRUE(segment->Reap());
  }

  std::unique_ptr<Server> server_;
  std::unique_ptr<Client> client_;
};

TEST_F(ScheduledWorkersTest, PeriodsAreExact) {
  const auto a = Joined(Make({{0, kElastic, 3}, {10, kElastic, 5}}));
  for (int step = 0; step < 30; ++step) a->Step();
  // At 10 the phase ends, and counting begins anew.
  EXPECT_EQ(a->exchanged_at, (std::vector<uint64_t>{3, 6, 9, 10, 15, 20, 25, 30}));
  EXPECT_EQ(a->phase(), 1u);
  EXPECT_EQ(a->segment->period(), 5u);
  EXPECT_EQ(a->segment->control()->phase(), 1u);
  EXPECT_EQ(a->segment->control()->Members().at(0).phase, 1u);
}

TEST_F(ScheduledWorkersTest, LockstepEndsASynchronousPhaseExactly) {
  // Of a period that does not divide it, and of one that does.
  auto workers = Several(3, Make({{0, kRounds, 4}, {10, kRounds, 5}, {25, kElastic, 7}}));
  Together(&workers, [](Worker* worker, size_t) {
    for (int step = 0; step < 39; ++step) worker->Step();
  });
  for (const auto& worker : workers) {
    EXPECT_EQ(worker->exchanged_at, (std::vector<uint64_t>{4, 8, 10, 15, 20, 25, 32, 39}));
    std::vector<ExchangeOutcome> outcomes(6, ExchangeOutcome::kReplaced);
    outcomes.insert(outcomes.end(), 2, ExchangeOutcome::kMoved);
    EXPECT_EQ(worker->outcomes, outcomes);
    EXPECT_EQ(worker->phase(), 2u);
    EXPECT_EQ(worker->segment->stats().rounds, 6u);
    EXPECT_EQ(worker->segment->stats().exchanges, 8u);
  }
  EXPECT_EQ(workers[0]->segment->control()->rounds_closed(), 6u);
}

TEST_F(ScheduledWorkersTest, SharesWeighAsManySteps) {
  auto workers = Several(2, Make({{0, kRounds, 4}}));
  Together(&workers, [](Worker* worker, size_t i) {
    worker->steps = i == 0 ? 4 : 12;
    worker->Fill(i == 0 ? 8.0f : 4.0f);
    EXPECT_TRUE(worker->IsDue());
    EXPECT_EQ(worker->Exchange(), ExchangeOutcome::kReplaced);
  });
  EXPECT_EQ(workers[0]->x[0], 5.0f);  // (4 * 8 + 12 * 4) / 16
  EXPECT_EQ(workers[1]->x[0], 5.0f);
}

// Whoever comes first: the shares are added by index, and floats are not associative.
TEST_F(ScheduledWorkersTest, BitsDoNotDependOnWhoComesFirst) {
  auto workers = Several(3, Make({{0, kRounds, 1}}));
  std::vector<float> first;
  for (const auto& delays : std::vector<std::vector<int>>{{0, 10, 20}, {20, 10, 0}, {10, 20, 0}}) {
    Together(&workers, [&](Worker* worker, size_t i) {
      usleep(static_cast<useconds_t>(delays[i]) * 1000);
      worker->steps += i + 1;
      worker->x = {0.1f + static_cast<float>(i), 1e8f / static_cast<float>(i + 1), -3.3e-5f};
      EXPECT_EQ(worker->Exchange(), ExchangeOutcome::kReplaced);
    });
    if (first.empty()) first = workers[0]->x;
    for (const auto& worker : workers) EXPECT_EQ(worker->x, first);
  }
}

// Workers of very different speeds, through phases of all kinds.
TEST_F(ScheduledWorkersTest, NeverTwoPhasesApart) {
  const Schedule schedule = Make({{0, kElastic, 2},
                                  {8, kRounds, 3},
                                  {16, kDelta, 2},
                                  {24, kElastic, 5},
                                  {32, kRounds, 2},
                                  {36, kRounds, 4},
                                  {48, kDelta, 3}});
  auto workers = Several(3, schedule);
  std::atomic<size_t> done{0};
  std::thread watcher([&] {
    while (done.load() < workers.size()) {
      uint64_t lowest = 100, highest = 0;
      for (const MemberInfo& info : workers[0]->segment->control()->Members()) {
        lowest = std::min(lowest, info.phase);
        highest = std::max(highest, info.phase);
      }
      // The members are looked at one after the other, and may move on meanwhile by one.
      EXPECT_LE(highest - lowest, 2u);
      usleep(100);
    }
  });
  Together(&workers, [&](Worker* worker, size_t i) {
    const Deadline deadline = Long();
    while (worker->phase() < 6 && !deadline.Expired()) {
      usleep(static_cast<useconds_t>(i * 700));
      worker->Step();
    }
    EXPECT_EQ(worker->phase(), 6u);
    worker->SetTraining(false);
    worker->segment->Leave();  // rounds do not wait for it
    ++done;
  });
  watcher.join();
}

TEST_F(ScheduledWorkersTest, AnAsynchronousPhaseEndsForAllWithTheFirst) {
  auto workers = Several(2, Make({{0, kElastic, 100}, {5, kElastic, 100}}));
  Worker& a = *workers[0];
  Worker& b = *workers[1];
  b.Step();
  for (int step = 0; step < 5; ++step) a.Step();
  EXPECT_EQ(a.exchanged_at, (std::vector<uint64_t>{5}));
  EXPECT_EQ(a.phase(), 1u);
  EXPECT_EQ(b.phase(), 0u);
  EXPECT_TRUE(b.Step());  // its last one by the old rule
  EXPECT_EQ(b.phase(), 1u);
  for (int step = 0; step < 50; ++step) EXPECT_FALSE(b.Step());
}

// The next phase's end waits for all to have entered it, and nobody waits for that.
TEST_F(ScheduledWorkersTest, TheFirstGoesOnUntilTheOthersHaveEntered) {
  auto workers = Several(2, Make({{0, kElastic, 4}, {2, kElastic, 4}, {4, kElastic, 50}}));
  Worker& a = *workers[0];
  Worker& b = *workers[1];
  for (int step = 0; step < 14; ++step) a.Step();
  EXPECT_EQ(a.phase(), 1u);  // b has not entered it
  // At 4 the phase's last one; then its period goes on.
  EXPECT_EQ(a.exchanged_at, (std::vector<uint64_t>{2, 4, 8, 12}));
  EXPECT_TRUE(b.Step());
  EXPECT_EQ(b.phase(), 1u);
  EXPECT_FALSE(a.Step());  // enters without another one
  EXPECT_EQ(a.phase(), 2u);
  EXPECT_TRUE(b.Step());
  EXPECT_EQ(b.phase(), 2u);
}

TEST_F(ScheduledWorkersTest, ALateJoinerBeginsInThePresentPhase) {
  const Schedule schedule = Make({{0, kElastic, 2}, {4, kDelta, 3}, {1000, kElastic, 9}});
  const auto a = Joined(schedule);
  EXPECT_TRUE(*a->segment->TrySeed(a->local(), Long()));
  ASSERT_TRUE(a->segment->Rebase(a->local()).ok());
  const auto b = Open();
  ASSERT_TRUE(b->segment->SetSchedule(schedule, 0).ok());  // before
  for (int step = 0; step < 5; ++step) a->Step();
  ASSERT_TRUE(b->segment->Join(std::nullopt).ok());
  ASSERT_TRUE(b->segment->Rebase(b->local()).ok());
  EXPECT_EQ(b->phase(), 1u);
  const auto c = Joined(schedule);  // after
  EXPECT_EQ(c->phase(), 1u);
  for (const auto* worker : {&b, &c}) {
    EXPECT_FALSE((*worker)->Step());
    EXPECT_FALSE((*worker)->Step());
    EXPECT_TRUE((*worker)->Step());
    EXPECT_EQ((*worker)->phase(), 1u);
  }
}

TEST_F(ScheduledWorkersTest, TheSeederSaysWhereItBegins) {
  const Schedule schedule = Make({{0, kElastic, 2}, {100, kRounds, 3}, {200, kElastic, 7}});
  const auto a = Open(), b = Open();
  ASSERT_TRUE(a->segment->SetSchedule(schedule, 150).ok());
  ASSERT_TRUE(b->segment->SetSchedule(schedule, 0).ok());
  ASSERT_TRUE(a->segment->Join(0).ok());
  ASSERT_TRUE(b->segment->Join(1).ok());
  EXPECT_EQ(b->phase(), 0u);
  ASSERT_TRUE(*a->segment->TrySeed(a->local(), Long()));
  EXPECT_EQ(a->segment->control()->phase(), 1u);
  for (Worker* const worker : {a.get(), b.get()}) {
    ASSERT_TRUE(worker->segment->Rebase(worker->local()).ok());
    EXPECT_EQ(worker->phase(), 1u);
    EXPECT_EQ(worker->segment->period(), 3u);
  }
  a->steps = 150;
  for (a->steps = 151; a->steps < 153; ++a->steps) EXPECT_FALSE(a->IsDue());
  EXPECT_TRUE(a->IsDue());
}

TEST_F(ScheduledWorkersTest, SetPeriodEndsWithThePhase) {
  const auto a = Joined(Make({{0, kElastic, 2}, {8, kElastic, 3}}));
  ASSERT_TRUE(a->segment->SetPeriod(5).ok());
  for (int step = 0; step < 14; ++step) a->Step();
  EXPECT_EQ(a->exchanged_at, (std::vector<uint64_t>{5, 8, 11, 14}));
  EXPECT_EQ(a->segment->period(), 3u);
  for (const uint64_t bad : {uint64_t{0}, kMaxPeriod + 1}) {
    EXPECT_EQ(a->segment->SetPeriod(bad).code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(ScheduledWorkersTest, PhasesByEpochs) {
  auto workers = Several(2, Make({{0, kRounds, 4}, {1, kElastic, 100}, {3, kElastic, 100}},
                                 ScheduleUnit::kEpochs));
  Together(&workers, [](Worker* worker, size_t) {
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      ASSERT_TRUE(worker->segment->BeginEpoch(epoch, worker->steps).ok());
      if (worker->IsDue()) {
        worker->exchanged_at.push_back(worker->steps);
        worker->Exchange();
      }
      for (int batch = 0; batch < 8; ++batch) worker->Step();
    }
  });
  for (const auto& worker : workers) {
    // 8: by the period; once more as the epoch begins, without a step in between.
    EXPECT_EQ(worker->exchanged_at, (std::vector<uint64_t>{4, 8, 8}));
    EXPECT_EQ(worker->phase(), 1u);
  }
  ASSERT_TRUE(workers[0]->segment->BeginEpoch(3, 24).ok());
  EXPECT_TRUE(workers[0]->IsDue());
  workers[0]->Exchange();
  EXPECT_EQ(workers[0]->phase(), 2u);
  const MemberInfo info = workers[0]->segment->control()->Members().at(0);
  EXPECT_EQ(info.epoch, 3u);
  EXPECT_EQ(info.batch, 0u);
}

TEST_F(ScheduledWorkersTest, ProgressCountsTheEpochsBatches) {
  const auto a = Joined(Make({{0, kElastic, 1}}));
  ASSERT_TRUE(a->segment->BeginEpoch(2, 20).ok());
  a->steps = 13;
  ASSERT_TRUE(a->segment
                  ->ExchangeScheduled(a->local(), {a->x.data()}, MoveOutput::kValue, 13, 26,
                                      Within(1))
                  .ok());
  const MemberInfo info = a->segment->control()->Members().at(0);
  EXPECT_EQ(info.steps, 13u);
  EXPECT_EQ(info.epoch, 2u);
  EXPECT_EQ(info.batch, 6u);
}

// --- Those who are not there ------------------------------------------------------------

TEST_F(ScheduledWorkersTest, WhoEndedItsTrainingIsNotWaitedFor) {
  auto workers = Several(3, Make({{0, kRounds, 1}}));
  Worker& early = *workers[2];
  early.segment->control()->Arrive(*early.segment->member());
  std::vector<std::unique_ptr<Worker>> others;
  others.push_back(std::move(workers[0]));
  others.push_back(std::move(workers[1]));
  Together(&others, [](Worker* worker, size_t) {
    for (int step = 0; step < 5; ++step) EXPECT_TRUE(worker->Step());
  });
  EXPECT_EQ(others[0]->segment->control()->rounds_closed(), 5u);
}

TEST_F(ScheduledWorkersTest, WhoComesToTheMeetingMeanwhileIsNotWaitedFor) {
  auto workers = Several(2, Make({{0, kRounds, 1}}));
  std::thread early([&] {
    usleep(50'000);
    workers[1]->segment->control()->Arrive(*workers[1]->segment->member());
  });
  EXPECT_TRUE(workers[0]->Step());
  early.join();
  EXPECT_GE(workers[0]->segment->stats().waiting_s, 0.02);
  EXPECT_GE(workers[0]->segment->stats().exchange_s, workers[0]->segment->stats().waiting_s);
}

TEST_F(ScheduledWorkersTest, TheDeadAndGoneAreNotWaitedFor) {
  auto workers = Several(3, Make({{0, kRounds, 1}}));
  std::thread leaver([&] {
    usleep(50'000);
    workers[1]->segment->Leave();
    Fence(workers[0].get());  // of a lower index: it was its turn
  });
  EXPECT_TRUE(workers[2]->Step(4.0f));
  EXPECT_EQ(workers[2]->x[0], 4.0f);
  leaver.join();
  EXPECT_EQ(workers[2]->outcomes, (std::vector<ExchangeOutcome>{ExchangeOutcome::kReplaced}));
}

TEST_F(ScheduledWorkersTest, TheFencedSkipAndComeBack) {
  auto workers = Several(2, Make({{0, kRounds, 2}}));
  Worker& a = *workers[0];
  Worker& b = *workers[1];
  const uint64_t incarnation = b.segment->member()->incarnation;
  std::thread fencer([&] {
    usleep(50'000);
    Fence(&b);
  });
  b.steps = 2;
  EXPECT_EQ(b.Exchange(), ExchangeOutcome::kSkipped);  // while it waited for its turn
  fencer.join();
  EXPECT_EQ(b.segment->stats().skipped_exchanges, 1u);
  ASSERT_TRUE(WaitUntil([&] {
    static_cast<void>(b.segment->IsDue(2, 2));
    const Result<MemberId> member = b.segment->member();
    return member.ok() && member->incarnation > incarnation;
  }));
  a.steps = 2;
  EXPECT_EQ(a.Exchange(), ExchangeOutcome::kReplaced);  // the round that b had opened
  b.steps = 6;
  a.steps = 4;
  a.Fill(8.0f);
  b.Fill(4.0f);
  Together(&workers, [](Worker* worker, size_t) {
    EXPECT_TRUE(worker->IsDue());
    EXPECT_EQ(worker->Exchange(), ExchangeOutcome::kReplaced);
  });
  EXPECT_EQ(a.x[0], 5.0f);  // the skipped steps count
}

TEST_F(ScheduledWorkersTest, TheTimeoutEndsTheWaitForTurnAndShares) {
  auto workers = Several(3, Make({{0, kRounds, 1}}));
  Worker& b = *workers[1];
  b.steps = 1;
  b.Fill(3.0f);
  const Result<ExchangeOutcome> outcome = b.TryExchange(Within(0.05));
  ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  EXPECT_EQ(*outcome, ExchangeOutcome::kReplaced);
  EXPECT_EQ(b.x[0], 3.0f);
  EXPECT_GE(b.segment->stats().waiting_s, 0.04);
  EXPECT_LT(b.segment->stats().waiting_s, 10.0);
}

TEST_F(ScheduledWorkersTest, AnInterruptIsAnErrorWhateverItsCode) {
  auto workers = Several(2, Make({{0, kRounds, 1}}));
  for (const StatusCode code : {StatusCode::kAborted, StatusCode::kFailedPrecondition,
                                StatusCode::kDeadlineExceeded, StatusCode::kInternal}) {
    WaitOptions options = Within(kLongSeconds);
    options.poll = [code] { return Status(code, "interrupted"); };
    Worker& b = *workers[1];
    ++b.steps;
    b.Fill(3.0f);
    EXPECT_EQ(b.TryExchange(options).status().message(), "interrupted");
    EXPECT_EQ(b.segment->last_error().code(), code);
    // The others do not wait for it.
    EXPECT_TRUE(workers[0]->Step());
  }
}

TEST_F(ScheduledWorkersTest, StatisticsDoNotWaitForARound) {
  auto workers = Several(2, Make({{0, kRounds, 1}}));
  std::thread waiting([&] { EXPECT_TRUE(workers[0]->Step()); });
  ASSERT_TRUE(WaitUntil([&] { return !Raw()->MissingInRound().empty(); }));
  EXPECT_EQ(workers[0]->segment->stats().rounds, 0u);
  EXPECT_TRUE(workers[0]->segment->last_error().ok());
  EXPECT_EQ(workers[0]->phase(), 0u);
  EXPECT_TRUE(workers[1]->Step());
  waiting.join();
  EXPECT_EQ(workers[0]->segment->stats().rounds, 1u);
}

// --- Bases ---------------------------------------------------------------------------------

// elastic -> delta -> rounds -> delta: delta averaging measures from what the worker had
// after the last exchange, by whichever rule, whatever form its output took.
TEST_F(ScheduledWorkersTest, BasesAfterOtherRules) {
  for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
    SetUp();
    auto workers = Several(
        2, Make({{0, kElastic, 2}, {2, kDelta, 2}, {4, kRounds, 2}, {6, kDelta, 2}}));
    Worker& a = *workers[0];
    Worker& b = *workers[1];
    const auto exchange = [&](Worker* worker, uint64_t steps, float value) {
      worker->steps = steps;
      worker->Fill(value);
      EXPECT_TRUE(worker->IsDue()) << steps;
      std::vector<float> out(3);
      const Result<ExchangeOutcome> outcome = worker->segment->ExchangeScheduled(
          worker->local(), {out.data()}, output, steps, steps, Within(kLongSeconds));
      ASSERT_TRUE(outcome.ok()) << outcome.status().message();
      const bool subtract =
          output == MoveOutput::kDelta && *outcome != ExchangeOutcome::kReplaced;
      for (size_t i = 0; i < 3; ++i) worker->x[i] = subtract ? worker->x[i] - out[i] : out[i];
    };
    exchange(&a, 2, 8.0f);  // both to 4
    EXPECT_EQ(a.x[0], 4.0f);
    EXPECT_EQ(a.phase(), 1u);
    exchange(&b, 2, 8.0f);  // both to 6
    EXPECT_EQ(b.x[0], 6.0f);
    exchange(&a, 4, 6.0f);  // 2 since 4: half of it
    EXPECT_EQ(a.x[0], 7.0f);
    EXPECT_EQ(a.phase(), 2u);
    exchange(&b, 4, 6.0f);  // nothing since 6
    EXPECT_EQ(b.x[0], 7.0f);
    EXPECT_EQ(b.phase(), 2u);
    std::thread other([&] { exchange(&b, 6, 20.0f); });
    exchange(&a, 6, 10.0f);
    other.join();
    EXPECT_EQ(a.x[0], 15.0f);
    EXPECT_EQ(b.x[0], 15.0f);
    EXPECT_EQ(a.phase(), 3u);
    exchange(&a, 8, 19.0f);  // 4 since 15
    EXPECT_EQ(a.x[0], 17.0f);
    exchange(&b, 8, 15.0f);
    EXPECT_EQ(b.x[0], 17.0f);
    EXPECT_EQ(b.Center(), 17.0f);
  }
}

// Rounds and what came before do not mix: the center is exactly the mean.
TEST_F(ScheduledWorkersTest, TheFirstRoundWaitsForTheOldRulesLastExchanges) {
  auto workers = Several(2, Make({{0, kElastic, 100}, {3, kRounds, 2}}));
  Worker& a = *workers[0];
  Worker& b = *workers[1];
  std::thread first([&] {
    for (int step = 0; step < 5; ++step) a.Step();
  });
  ASSERT_TRUE(WaitUntil([&] { return Raw()->MissingInRound().size() == 2; }));
  usleep(20'000);
  EXPECT_EQ(Raw()->MissingInRound().size(), 2u);  // its share is not in yet
  EXPECT_TRUE(b.Step());
  EXPECT_EQ(b.phase(), 1u);
  b.Step();
  b.Step();
  first.join();
  EXPECT_EQ(a.outcomes.back(), ExchangeOutcome::kReplaced);
  EXPECT_EQ(a.x, b.x);
  EXPECT_EQ(a.Center(), a.x[0]);
}

// --- Agreement and setting ---------------------------------------------------------------

TEST_F(ScheduledWorkersTest, AllHaveTheSame) {
  const auto a = Joined(Make({{0, kElastic, 2}}));
  const auto b = Open();
  ASSERT_TRUE(b->segment->SetSchedule(Make({{0, kElastic, 3}}), 0).ok());
  Status status = b->segment->Join(std::nullopt);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(WithoutAnchor(status.message()),
            "this worker's schedule is 'by steps: from 0 elastic at 0.5 every 3', but the others "
            "train by 'by steps: from 0 elastic at 0.5 every 2': give all workers the same");
  EXPECT_FALSE(b->segment->joined());
  EXPECT_EQ(a->segment->control()->CountLive(), 1u);
  b->Join(Make({{0, kElastic, 2}}));
  status = b->segment->SetSchedule(Make({{0, kDelta, 2}}), 0);
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_FALSE(b->Step());
  EXPECT_TRUE(b->Step());  // by the one before
}

TEST_F(ScheduledWorkersTest, ARuleEndsTheSchedule) {
  const auto a = Joined(Make({{0, kElastic, 2}, {3, kElastic, 2}}));
  ASSERT_TRUE(a->segment->SetRule(kDelta).ok());
  ASSERT_TRUE(a->segment->SetPeriod(4).ok());
  for (int step = 0; step < 8; ++step) a->Step();
  EXPECT_EQ(a->exchanged_at, (std::vector<uint64_t>{4, 8}));
  EXPECT_EQ(a->phase(), 0u);
  EXPECT_EQ(a->segment->control()->phase(), 0u);
  ASSERT_TRUE(a->segment->SetRule(kRounds).ok());
  EXPECT_EQ(a->Exchange(), ExchangeOutcome::kReplaced);
  const Status status =
      a->segment->Exchange(a->local(), {a->x.data()}, MoveOutput::kValue, 9).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
}

TEST_F(ScheduledWorkersTest, NotJoinedIsSaid) {
  const auto a = Open();
  ASSERT_TRUE(a->segment->SetSchedule(Make({{0, kRounds, 1}}), 0).ok());
  for (const Status& status :
       {a->segment->IsDue(1, 1).status(), a->TryExchange(Within(1)).status()}) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_NE(status.message().find("is not joined"), std::string::npos);
  }
}

// --- Statistics of models, and of exchanges --------------------------------------------------

// Variances: with delta averaging of gain 1.25, a center of 10 and two workers that both
// came down to 1 would give 10 - 2 * 0.625 * 9 < 0.
TEST_F(ScheduledWorkersTest, StatisticsStayBetween) {
  const ExchangeRule delta{MoveKind::kDelta, 1.25, true};
  for (const bool marked : {false, true}) {
    SetUp();
    auto workers = Several(2, Make({{0, delta, 1}}));
    for (const auto& worker : workers) {
      worker->Fill(10.0f);
      ASSERT_TRUE(worker->segment->SetStatistics({marked}).ok());
      ASSERT_TRUE(worker->segment->Rebase(worker->local()).ok());
    }
    ASSERT_TRUE(workers[0]->segment->Write(workers[0]->local(), Long()).ok());
    for (const auto& worker : workers) {
      worker->Fill(1.0f);
      worker->Exchange();
    }
    // Elastically at a half: 5.5, then 3.25.
    EXPECT_EQ(workers[0]->Center(), marked ? 3.25f : -1.25f);
    EXPECT_EQ(workers[0]->segment->control()->version(), 3u);
  }
}

TEST_F(ScheduledWorkersTest, ChangesAreRemembered) {
  auto workers = Several(2, Make({{0, kDelta, 2}, {4, kRounds, 2}}));
  Worker& a = *workers[0];
  Worker& b = *workers[1];
  for (int step = 0; step < 2; ++step) a.Step();
  EXPECT_FALSE(b.Step(0));
  EXPECT_TRUE(b.Step(0));
  for (int step = 0; step < 2; ++step) a.Step();
  ASSERT_TRUE(b.Step(0));
  b.segment->Leave();
  for (int step = 0; step < 4; ++step) a.Step();
  const ExchangeStats stats = a.segment->stats();
  ASSERT_EQ(stats.changes.size(), 2u);
  EXPECT_EQ(stats.changes[0].steps, 2u);
  EXPECT_EQ(stats.changes[0].rate, 0.5);
  EXPECT_EQ(stats.changes[0].period, 2u);
  EXPECT_EQ(stats.changes[0].phase, 0u);
  EXPECT_EQ(stats.changes[0].num_live, 2u);
  EXPECT_EQ(stats.changes[1].steps, 6u);
  EXPECT_EQ(stats.changes[1].phase, 1u);
  EXPECT_EQ(stats.changes[1].rate, 1.0);
  EXPECT_EQ(stats.changes[1].num_live, 1u);
  EXPECT_EQ(stats.rounds, 2u);
  EXPECT_EQ(stats.exchanges, 4u);
  EXPECT_EQ(stats.moved_bytes, 4 * 2 * 3 * sizeof(float));
  EXPECT_EQ(stats.staleness_histogram[0], 1u);  // its first
  EXPECT_EQ(stats.staleness_histogram[1], 1u);  // one of b in between
}

}  // namespace
}  // namespace tf_smb
