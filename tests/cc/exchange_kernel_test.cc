// Oracle: the formulas of exchange_kernel.h in plain scalar float arithmetic, of which
// every instruction set must give the same bits, and in double, to float rounding.
#include "cc/box/exchange_kernel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace tf_smb {
namespace {

constexpr size_t kSizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 65537};

std::vector<float> RandomValues(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  if (count > 4) {
    values[1] = 0.0f;
    values[2] = -0.0f;
    values[3] = 1e-40f;  // denormal
    values[4] = 1e30f;
  }
  return values;
}

struct State {
  std::vector<float> x, center, last, out;
};

// volatile: nothing is vectorised, fused or kept wider than float.
State Oracle(const Move& move, State s) {
  for (size_t i = 0; i < s.x.size(); ++i) {
    volatile float difference, moved;
    const float x = s.x[i];
    if (move.kind == MoveKind::kCopy) {
      s.center[i] = s.last[i] = x;
      continue;
    }
    if (move.kind == MoveKind::kElastic) {
      difference = x - s.center[i];
      moved = move.rate * difference;
      s.center[i] = s.center[i] + moved;
      s.out[i] = move.output == MoveOutput::kDelta ? moved : x - moved;
    } else {
      difference = x - s.last[i];
      moved = move.rate * difference;
      s.center[i] = s.last[i] = s.center[i] + moved;
      s.out[i] = move.output == MoveOutput::kDelta ? x - s.center[i] : s.center[i];
    }
  }
  return s;
}

State Input(size_t count) {
  return {RandomValues(count, 1), RandomValues(count, 2), RandomValues(count, 3),
          std::vector<float>(count, 77.0f)};
}

void ExpectSameBits(const std::vector<float>& got, const std::vector<float>& want,
                    const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(float)), 0)
        << what << " differs at " << i << " of " << got.size() << ": " << got[i] << ", want "
        << want[i];
  }
}

std::vector<Move> AllMoves() {
  std::vector<Move> moves = {{MoveKind::kCopy, 1.0f, MoveOutput::kValue}};
  for (const MoveKind kind : {MoveKind::kElastic, MoveKind::kDelta}) {
    for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
      for (const float rate : {0.45f, 1.0f, 0.9f / 7.0f}) moves.push_back({kind, rate, output});
    }
  }
  for (size_t i = moves.size(); i-- > 0;) {
    moves.push_back(moves[i]);
    moves.back().stream = true;
  }
  return moves;
}

TEST(ExchangeKernelTest, SameBitsAsScalarArithmetic) {
  for (const Move& move : AllMoves()) {
    for (const size_t count : kSizes) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(move.kind)) + " output " +
                   std::to_string(static_cast<int>(move.output)) +
                   (move.stream ? " streamed" : "") + " count " + std::to_string(count) + " " +
                   KernelInstructionSet());
      State got = Input(count);
      const State want = Oracle(move, got);
      ApplyMove(move, got.x.data(), got.center.data(), got.last.data(), got.out.data(), count);
      ExpectSameBits(got.x, want.x, "x");
      ExpectSameBits(got.center, want.center, "center");
      ExpectSameBits(got.last, want.last, "last");
      ExpectSameBits(got.out, want.out, "out");
    }
  }
}

TEST(ExchangeKernelTest, InPlaceIsTheSame) {
  for (Move move : AllMoves()) {
    if (move.kind == MoveKind::kCopy || move.output == MoveOutput::kDelta) continue;
    for (const size_t count : kSizes) {
      State apart = Input(count), in_place = apart;
      ApplyMove(move, apart.x.data(), apart.center.data(), apart.last.data(), apart.out.data(),
                count);
      ApplyMove(move, in_place.x.data(), in_place.center.data(), in_place.last.data(),
                in_place.x.data(), count);
      ExpectSameBits(in_place.x, apart.out, "x");
      ExpectSameBits(in_place.center, apart.center, "center");
      ExpectSameBits(in_place.last, apart.last, "last");
    }
  }
}

// Weights come from TensorFlow and numpy: aligned to 4 bytes, not more.
TEST(ExchangeKernelTest, AnyFloatAlignment) {
  constexpr size_t kCount = 67;
  for (size_t shift = 1; shift < 16; ++shift) {
    for (const Move& move : AllMoves()) {
      const State want = Oracle(move, Input(kCount));
      const State input = Input(kCount);
      std::vector<float> x(shift, 5.0f), out(shift + kCount, 5.0f);
      x.insert(x.end(), input.x.begin(), input.x.end());
      std::vector<float> center = input.center, last = input.last;
      ApplyMove(move, x.data() + shift, center.data(), last.data(), out.data() + shift, kCount);
      ExpectSameBits(center, want.center, "center");
      if (move.kind == MoveKind::kCopy) continue;
      ExpectSameBits({out.begin() + static_cast<ptrdiff_t>(shift), out.end()}, want.out, "out");
      EXPECT_EQ(out[shift - 1], 5.0f);
    }
  }
}

TEST(ExchangeKernelTest, CloseToTheFormulasInDouble) {
  constexpr size_t kCount = 1000;
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(-2.0f, 2.0f);
  State s = Input(kCount);
  for (auto* values : {&s.x, &s.center, &s.last}) {
    for (float& value : *values) value = uniform(random);
  }
  const State before = s;
  const float rate = 0.3f;
  ApplyMove({MoveKind::kElastic, rate, MoveOutput::kValue}, s.x.data(), s.center.data(), nullptr,
            s.out.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const double x = before.x[i], g = before.center[i], d = static_cast<double>(rate) * (x - g);
    ASSERT_NEAR(s.out[i], x - d, 1e-6);
    ASSERT_NEAR(s.center[i], g + d, 1e-6);
  }
  s = before;
  ApplyMove({MoveKind::kDelta, rate, MoveOutput::kDelta}, s.x.data(), s.center.data(),
            s.last.data(), s.out.data(), kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const double x = before.x[i], g = before.center[i], l = before.last[i];
    const double want = g + static_cast<double>(rate) * (x - l);
    ASSERT_NEAR(s.center[i], want, 1e-6);
    ASSERT_NEAR(s.last[i], want, 1e-6);
    ASSERT_NEAR(s.out[i], x - want, 1e-6);
  }
}

TEST(ExchangeKernelTest, ElasticConservesExactSums) {
  std::vector<float> x = {4096.0f, -512.0f, 64.0f}, g = {0.0f, 256.0f, -64.0f};
  for (int i = 0; i < 8; ++i) {
    ApplyMove({MoveKind::kElastic, 0.5f, MoveOutput::kValue}, x.data(), g.data(), nullptr,
              x.data(), x.size());
    EXPECT_EQ(x[0] + g[0], 4096.0f);
    EXPECT_EQ(x[1] + g[1], -256.0f);
    EXPECT_EQ(x[2] + g[2], 0.0f);
  }
}

TEST(ExchangeKernelTest, CopyLeavesOutAlone) {
  State s = Input(100);
  ApplyMove({MoveKind::kCopy, 0.0f, MoveOutput::kDelta}, s.x.data(), s.center.data(), nullptr,
            nullptr, 100);
  ExpectSameBits(s.center, s.x, "center");
}

// A bad element stays out of the center, says that nothing moved, and costs the others
// of its move nothing.
TEST(ExchangeKernelTest, NonFiniteElementStaysOutOfTheCenter) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Move& move : AllMoves()) {
    for (const size_t count : {1u, 3u, 4u, 17u, 100u}) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
        for (size_t position = 0; position < count; position += 5) {
          State got = Input(count);
          const State before = got;
          State want = Oracle(move, got);
          got.x[position] = bad;
          EXPECT_FALSE(ApplyMove(move, got.x.data(), got.center.data(), got.last.data(),
                                 got.out.data(), count));
          if (move.kind == MoveKind::kCopy) want = before;
          want.center[position] = before.center[position];
          want.last[position] = before.last[position];
          ExpectSameBits(got.center, want.center, "center");
          ExpectSameBits(got.last, want.last, "last");
          if (move.kind == MoveKind::kCopy) continue;
          want.out[position] = move.output == MoveOutput::kDelta ? 0.0f : bad;
          ExpectSameBits(got.out, want.out, "out");
        }
      }
    }
  }
}

TEST(ExchangeKernelTest, OverflowIsFoundToo) {
  const float most = std::numeric_limits<float>::max();
  float x = -most, center = most, out = 0.0f;
  EXPECT_FALSE(ApplyMove({MoveKind::kElastic, 0.5f, MoveOutput::kDelta}, &x, &center, nullptr,
                         &out, 1));
  EXPECT_EQ(center, most);
  EXPECT_EQ(out, 0.0f);
}

TEST(AllFiniteTest, FindsEveryPosition) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       -std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::signaling_NaN(),
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (const size_t count : {1u, 15u, 16u, 17u, 63u, 64u, 65u, 200u}) {
    std::vector<float> values = RandomValues(count, 9);
    values[0] = std::numeric_limits<float>::max();
    values[count / 2] = -std::numeric_limits<float>::max();
    values[count - 1] = std::numeric_limits<float>::denorm_min();
    EXPECT_TRUE(AllFinite(values.data(), count)) << count;
    for (size_t position = 0; position < count; ++position) {
      const float kept = values[position];
      for (const float value : bad) {
        values[position] = value;
        EXPECT_FALSE(AllFinite(values.data(), count)) << count << " at " << position;
      }
      values[position] = kept;
    }
    EXPECT_TRUE(AllFinite(values.data(), count));
  }
  EXPECT_TRUE(AllFinite(nullptr, 0));
}

TEST(ExchangeKernelTest, InstructionSetHasAName) {
  const std::string name = KernelInstructionSet();
  EXPECT_TRUE(name == "avx2" || name == "baseline") << name;
}

}  // namespace
}  // namespace tf_smb
