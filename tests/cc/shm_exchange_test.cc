// Sums that must come out exactly, and what happens when a worker dies or stops in the
// middle. Children are forked before any thread is made.
#include "cc/transport/shm/shm_exchange.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tf_smb {
namespace {

constexpr double kLongSeconds = 60.0;
constexpr int64_t kChunk = static_cast<int64_t>(kChunkElements);

// Three variables over four chunks, one of them empty, none aligned with the chunks.
std::unique_ptr<Segment> Make(const std::vector<int64_t>& sizes = {kChunk + 100, 0, 7,
                                                                   2 * kChunk + 3}) {
  std::vector<Variable> variables;
  for (const int64_t size : sizes) {
    Variable variable;
    variable.name = "v" + std::to_string(variables.size());
    variable.shape = {size};
    variables.push_back(variable);
  }
  SegmentOptions options;
  options.name = "test";
  options.job_id = "job";
  options.layout = *Layout::Create(variables);
  Result<std::unique_ptr<Segment>> segment = Segment::Create(options);
  EXPECT_TRUE(segment.ok()) << segment.status().message();
  return std::move(segment).value();
}

std::unique_ptr<Segment> MapAgain(const Segment& segment) {
  return std::move(Segment::Map(UniqueFd(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)))).value();
}

// A worker's arrays, each of a variable's size.
struct Arrays {
  explicit Arrays(const Segment& segment, float value = 0.0f) {
    for (const Variable& variable : segment.layout().variables()) {
      values.emplace_back(variable.num_elements, value);
    }
    for (std::vector<float>& v : values) {
      pointers.push_back(v.data());
      const_pointers.push_back(v.data());
    }
  }
  bool AllEqual(float value) const {
    for (const std::vector<float>& v : values) {
      for (const float x : v) {
        if (x != value) return false;
      }
    }
    return true;
  }
  std::vector<std::vector<float>> values;
  std::vector<float*> pointers;
  std::vector<const float*> const_pointers;
};

ExchangeReport Exchange(Segment* segment, const Move& move, const Arrays& local, Arrays* out,
                        float* last = nullptr, ThreadPool* pool = nullptr,
                        uint64_t first_chunk = 0, double busy_chunk_timeout_s = kLongSeconds) {
  ExchangeRequest request;
  request.move = move;
  request.local = &local.const_pointers;
  request.out = &out->pointers;
  request.last = last;
  request.first_chunk = first_chunk;
  request.busy_chunk_timeout_s = busy_chunk_timeout_s;
  const Result<ExchangeReport> report = ExchangeCenter(segment, request, pool);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return report.ok() ? *report : ExchangeReport();
}

Arrays Center(const Segment& segment) {
  Arrays arrays(segment);
  EXPECT_TRUE(ReadCenter(segment, arrays.pointers, Deadline::After(kLongSeconds)).ok());
  return arrays;
}

void SetCenter(Segment* segment, float value) {
  ASSERT_TRUE(WriteCenter(segment, Arrays(*segment, value).const_pointers,
                          Deadline::After(kLongSeconds))
                  .ok());
}

pid_t Spawn(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  _exit(body());
}

int WaitExit(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// A child that takes the lock of a chunk, and then gets `signal`.
pid_t SpawnHolder(const Segment& segment, uint64_t chunk, int signal) {
  const pid_t child = Spawn([&] {
    const std::unique_ptr<Segment> own = MapAgain(segment);
    if (!Holds(own->chunk(chunk)->mutex.TryLock())) return 1;
    raise(signal);
    for (;;) pause();
  });
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status) || WIFSIGNALED(status));
  return child;
}

TEST(ShmExchangeTest, WrittenIsRead) {
  const std::unique_ptr<Segment> segment = Make();
  Arrays written(*segment);
  float next = 0.0f;
  for (std::vector<float>& v : written.values) {
    for (float& x : v) x = next++;
  }
  ASSERT_TRUE(
      WriteCenter(segment.get(), written.const_pointers, Deadline::After(kLongSeconds)).ok());
  EXPECT_EQ(Center(*MapAgain(*segment)).values, written.values);
  EXPECT_EQ(segment->version(), 1u);
}

TEST(ShmExchangeTest, EveryMoveReachesEveryElement) {
  ThreadPool pool(3);
  for (ThreadPool* const threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
    for (const uint64_t first_chunk : {0u, 1u, 3u, 1000u}) {
      const std::unique_ptr<Segment> segment = Make();
      SetCenter(segment.get(), 8.0f);
      Arrays x(*segment, 4.0f), out(*segment, -1.0f);
      const ExchangeReport report = Exchange(
          segment.get(), {MoveKind::kElastic, 0.25f, MoveOutput::kValue}, x, &out, nullptr,
          threads, first_chunk);
      EXPECT_EQ(report.chunks_moved, segment->num_chunks());
      EXPECT_EQ(report.chunks_skipped, 0u);
      EXPECT_EQ(report.version_before, 1u);
      EXPECT_EQ(report.version_after, 2u);
      EXPECT_TRUE(out.AllEqual(5.0f));
      EXPECT_TRUE(x.AllEqual(4.0f));
      EXPECT_TRUE(Center(*segment).AllEqual(7.0f));

      Exchange(segment.get(), {MoveKind::kElastic, 0.5f, MoveOutput::kDelta}, x, &out, nullptr,
               threads, first_chunk);
      EXPECT_TRUE(out.AllEqual(-1.5f));
      EXPECT_TRUE(Center(*segment).AllEqual(5.5f));

      std::vector<float> last(segment->layout().num_elements(), 2.0f);
      Exchange(segment.get(), {MoveKind::kDelta, 0.5f, MoveOutput::kValue}, x, &x, last.data(),
               threads, first_chunk);
      EXPECT_TRUE(x.AllEqual(6.5f));  // in place
      EXPECT_TRUE(Center(*segment).AllEqual(6.5f));
      for (const Variable& variable : segment->layout().variables()) {
        for (uint64_t i = 0; i < variable.num_elements; ++i) {
          ASSERT_EQ(last[variable.offset_elements + i], 6.5f);
        }
      }

      Arrays copied(*segment, 9.0f), untouched(*segment, 3.0f);
      Exchange(segment.get(), {MoveKind::kCopy, 1.0f, MoveOutput::kDelta}, copied, &untouched,
               nullptr, threads, first_chunk);
      EXPECT_TRUE(untouched.AllEqual(3.0f));
      EXPECT_TRUE(Center(*segment).AllEqual(9.0f));
    }
  }
}

// Larger than the caches: what is only written goes past them.
TEST(ShmExchangeTest, LargeSegments) {
  const std::unique_ptr<Segment> segment = Make({5 << 19, 3});
  ThreadPool pool(2);
  Arrays x(*segment, 4.0f), out(*segment, -1.0f);
  std::vector<float> last(segment->layout().num_elements(), 2.0f);
  Exchange(segment.get(), {MoveKind::kCopy, 1.0f, MoveOutput::kDelta}, x, &out, nullptr, &pool);
  EXPECT_TRUE(Center(*segment).AllEqual(4.0f));
  x = Arrays(*segment, 6.0f);
  Exchange(segment.get(), {MoveKind::kElastic, 0.5f, MoveOutput::kDelta}, x, &out, nullptr, &pool);
  EXPECT_TRUE(out.AllEqual(1.0f));
  Exchange(segment.get(), {MoveKind::kDelta, 0.5f, MoveOutput::kDelta}, x, &out, last.data(),
           &pool);
  EXPECT_TRUE(out.AllEqual(-1.0f));
  EXPECT_TRUE(Center(*segment).AllEqual(7.0f));
  EXPECT_EQ(last[0], 7.0f);
}

TEST(ShmExchangeTest, PaddingStaysZero) {
  const std::unique_ptr<Segment> segment = Make({3, 5});
  Arrays x(*segment, 4.0f);
  Exchange(segment.get(), {MoveKind::kElastic, 1.0f, MoveOutput::kValue}, x, &x);
  for (uint64_t i = 3; i < 16; ++i) EXPECT_EQ(segment->center()[i], 0.0f);
  EXPECT_EQ(segment->center()[16], 4.0f);
}

TEST(ShmExchangeTest, NothingToMoveIsFine) {
  const std::unique_ptr<Segment> segment = Make({0});
  ThreadPool pool(2);
  Arrays x(*segment);
  const ExchangeReport report = Exchange(
      segment.get(), {MoveKind::kElastic, 0.5f, MoveOutput::kValue}, x, &x, nullptr, &pool, 5);
  EXPECT_EQ(report.chunks_moved, 0u);
  EXPECT_EQ(report.version_after, 1u);
}

// g <- g + (x - l) with whole numbers is exact: not one increment may be lost.
TEST(ShmExchangeTest, DeltasOfManyProcessesAddUpExactly) {
  constexpr int kProcesses = 4, kRounds = 30;
  const std::unique_ptr<Segment> segment = Make();
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      const std::unique_ptr<Segment> own = MapAgain(*segment);
      Arrays x(*own);
      std::vector<float> last(own->layout().num_elements(), 0.0f);
      for (int i = 0; i < kRounds; ++i) {
        for (std::vector<float>& v : x.values) {
          for (float& value : v) value += static_cast<float>(p + 1);
        }
        const ExchangeReport report =
            Exchange(own.get(), {MoveKind::kDelta, 1.0f, MoveOutput::kValue}, x, &x, last.data(),
                     nullptr, static_cast<uint64_t>(p));
        if (report.chunks_skipped != 0) return 1;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_TRUE(Center(*segment).AllEqual(kRounds * (1 + 2 + 3 + 4)));
  EXPECT_EQ(segment->version(), static_cast<uint64_t>(kProcesses * kRounds));
}

// d = (x - g) / 2 with few enough halvings is exact: the sum of x and g stays.
TEST(ShmExchangeTest, ElasticMovesOfManyProcessesConserveTheSum) {
  constexpr int kProcesses = 4, kRounds = 4;  // 16 halvings of multiples of 2^12 below 2^20
  const std::unique_ptr<Segment> segment = Make(), results = Make({kProcesses});
  SetCenter(segment.get(), 7 * 4096.0f);
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      const std::unique_ptr<Segment> own = MapAgain(*segment), shared = MapAgain(*results);
      Arrays x(*own, static_cast<float>((p * 31 - 40) * 4096));
      for (int i = 0; i < kRounds; ++i) {
        Exchange(own.get(), {MoveKind::kElastic, 0.5f, MoveOutput::kValue}, x, &x);
      }
      shared->center()[p] = x.values[3][kChunk];  // one element: its chunk has one order
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  double sum = Center(*segment).values[3][kChunk];
  double expected = 7 * 4096.0;
  for (int p = 0; p < kProcesses; ++p) {
    sum += results->center()[p];
    expected += (p * 31 - 40) * 4096.0;
  }
  EXPECT_EQ(sum, expected);
}

TEST(ShmExchangeTest, DeathUnderAChunkLockStopsNobody) {
  const std::unique_ptr<Segment> segment = Make();
  SpawnHolder(*segment, 1, SIGKILL);
  Arrays x(*segment, 2.0f);
  const ExchangeReport report =
      Exchange(segment.get(), {MoveKind::kElastic, 0.5f, MoveOutput::kValue}, x, &x);
  EXPECT_EQ(report.chunks_moved, segment->num_chunks());
  EXPECT_EQ(report.chunks_skipped, 0u);
  EXPECT_TRUE(Center(*segment).AllEqual(1.0f));
}

TEST(ShmExchangeTest, ManyDeathsInTheMiddleLeaveALegalCenter) {
  const std::unique_ptr<Segment> segment = Make();
  for (int round = 0; round < 10; ++round) {
    const pid_t child = Spawn([&] {
      const std::unique_ptr<Segment> own = MapAgain(*segment);
      Arrays x(*own, 1.0f);
      for (;;) Exchange(own.get(), {MoveKind::kElastic, 0.5f, MoveOutput::kValue}, x, &x);
      return 0;
    });
    usleep(3000 + 700 * round);
    kill(child, SIGKILL);
    EXPECT_EQ(WaitExit(child), -SIGKILL);
    Arrays x(*segment, 0.0f);
    const ExchangeReport report =
        Exchange(segment.get(), {MoveKind::kElastic, 0.25f, MoveOutput::kValue}, x, &x);
    EXPECT_EQ(report.chunks_moved, segment->num_chunks());
    for (const std::vector<float>& v : Center(*segment).values) {
      for (const float g : v) ASSERT_TRUE(g >= 0.0f && g <= 1.0f) << g;  // moved, or not
    }
  }
}

// Chunk 1: elements kChunk.. of the center, that is v0 from kChunk, v2, and v3's first.
class StoppedHolderTest : public testing::Test {
 protected:
  void SetUp() override {
    SetCenter(segment_.get(), 8.0f);
    holder_ = SpawnHolder(*segment_, 1, SIGSTOP);
  }
  void TearDown() override { EndHolder(); }
  void EndHolder() {
    if (holder_ < 0) return;
    kill(holder_, SIGKILL);
    EXPECT_EQ(WaitExit(holder_), -SIGKILL);
    holder_ = -1;
  }
  bool InChunk1(size_t variable, uint64_t element) const {
    const uint64_t at = segment_->layout().variables()[variable].offset_elements + element;
    return at / kChunkElements == 1;
  }
  void Expect(const Arrays& arrays, float moved, float skipped) const {
    for (size_t v = 0; v < arrays.values.size(); ++v) {
      for (uint64_t i = 0; i < arrays.values[v].size(); ++i) {
        ASSERT_EQ(arrays.values[v][i], InChunk1(v, i) ? skipped : moved) << v << " " << i;
      }
    }
  }
  // Without the lock, which its owner will not give up.
  void ExpectCenter(float moved, float skipped) const {
    for (size_t v = 0; v < segment_->layout().variables().size(); ++v) {
      const Variable& variable = segment_->layout().variables()[v];
      for (uint64_t i = 0; i < variable.num_elements; ++i) {
        ASSERT_EQ(segment_->center()[variable.offset_elements + i],
                  InChunk1(v, i) ? skipped : moved);
      }
    }
  }
  ExchangeReport Move(const Move& move, const Arrays& x, Arrays* out, float* last = nullptr,
                      ThreadPool* pool = nullptr) {
    return Exchange(segment_.get(), move, x, out, last, pool, 0, /*busy_chunk_timeout_s=*/0.05);
  }

  const std::unique_ptr<Segment> segment_ = Make();
  pid_t holder_ = -1;
};

TEST_F(StoppedHolderTest, SkippedChunkSaysThatNothingMoved) {
  Arrays x(*segment_, 4.0f), out(*segment_, -1.0f);
  ExchangeReport report = Move({MoveKind::kElastic, 0.25f, MoveOutput::kValue}, x, &out);
  EXPECT_EQ(report.chunks_skipped, 1u);
  EXPECT_EQ(report.chunks_moved, segment_->num_chunks() - 1);
  Expect(out, 5.0f, 4.0f);
  ExpectCenter(7.0f, 8.0f);

  ThreadPool pool(3);
  report = Move({MoveKind::kElastic, 0.5f, MoveOutput::kDelta}, x, &out, nullptr, &pool);
  EXPECT_EQ(report.chunks_skipped, 1u);
  Expect(out, -1.5f, 0.0f);
  ExpectCenter(5.5f, 8.0f);

  Move({MoveKind::kElastic, 0.5f, MoveOutput::kValue}, x, &x);
  Expect(x, 4.75f, 4.0f);  // in place
}

TEST_F(StoppedHolderTest, SkippedProgressIsMadeUpLater) {
  Arrays x(*segment_, 9.0f);
  std::vector<float> last(segment_->layout().num_elements(), 8.0f);
  ASSERT_EQ(Move({MoveKind::kDelta, 1.0f, MoveOutput::kValue}, x, &x, last.data()).chunks_skipped,
            1u);
  ExpectCenter(9.0f, 8.0f);
  EndHolder();
  ASSERT_EQ(Move({MoveKind::kDelta, 1.0f, MoveOutput::kValue}, x, &x, last.data()).chunks_skipped,
            0u);
  ExpectCenter(9.0f, 9.0f);
}

TEST_F(StoppedHolderTest, ReadingNamesTheChunk) {
  Arrays x(*segment_);
  const Status read = ReadCenter(*segment_, x.pointers, Deadline::After(0.05));
  EXPECT_EQ(read.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(read.message().find("chunk 1 of segment 'test'"), std::string::npos);
  EXPECT_EQ(WriteCenter(segment_.get(), x.const_pointers, Deadline::After(0.05)).code(),
            StatusCode::kDeadlineExceeded);
}

TEST_F(StoppedHolderTest, ChunkIsWaitedForAtTheEnd) {
  const pid_t waker = Spawn([this] {
    usleep(100'000);
    kill(holder_, SIGKILL);
    return 0;
  });
  Arrays x(*segment_, 4.0f);
  const ExchangeReport report =
      Exchange(segment_.get(), {MoveKind::kElastic, 0.25f, MoveOutput::kValue}, x, &x);
  EXPECT_EQ(report.chunks_moved, segment_->num_chunks());
  EXPECT_TRUE(x.AllEqual(5.0f));
  EXPECT_EQ(WaitExit(waker), 0);
}

}  // namespace
}  // namespace tf_smb
