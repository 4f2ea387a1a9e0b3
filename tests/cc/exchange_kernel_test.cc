// Oracle: the formulas of exchange_kernel.h in plain scalar arithmetic, with conversions
// of its own by way of double. Every instruction set must give the same bits.
#include "cc/box/exchange_kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc/box/exchange_kernel_set.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace tf_smb {
namespace {

constexpr size_t kSizes[] = {0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 511, 512, 513, 1027, 65537};

// A 16-bit floating-point type in double arithmetic.
struct Format {
  int fraction_bits;
  int lowest_exponent;  // of the normal numbers

  uint16_t InfinityBits() const {
    return static_cast<uint16_t>(0x7fff >> fraction_bits << fraction_bits);
  }

  double Decode(uint16_t bits) const {
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    double value;
    if ((bits & 0x7fff) > InfinityBits()) {
      value = std::numeric_limits<double>::quiet_NaN();
    } else if ((bits & 0x7fff) == InfinityBits()) {
      value = std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
      value = std::ldexp(fraction, lowest_exponent - fraction_bits);
    } else {
      value = std::ldexp(fraction + (1 << fraction_bits),
                         exponent - 1 + lowest_exponent - fraction_bits);
    }
    return (bits & 0x8000) != 0 ? -value : value;
  }

  // To nearest, ties to even. A NaN to any NaN.
  uint16_t Encode(double value) const {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<uint16_t>(sign | InfinityBits() | 1);
    value = std::fabs(value);
    if (value == 0) return sign;
    if (std::isinf(value)) return static_cast<uint16_t>(sign | InfinityBits());
    const int exponent = std::max(std::ilogb(value), lowest_exponent);
    const double units = std::nearbyint(std::ldexp(value, fraction_bits - exponent));
    // A carry out of the fraction goes into the exponent by itself; also up to infinity.
    const double bits = units + std::ldexp(exponent - lowest_exponent, fraction_bits);
    return static_cast<uint16_t>(sign | static_cast<int>(std::min<double>(bits, InfinityBits())));
  }
};

constexpr Format kHalf = {10, -14};
constexpr Format kBrain = {7, -126};

template <DType kType, typename T>
struct Plain {
  static constexpr DType kDType = kType;
  static constexpr bool kExact = true;
  using Value = T;
  using Center = T;
  static T Wide(T value) { return value; }
  static T Narrow(T value) { return value; }
};

template <DType kType, const Format& kFormat>
struct Short {
  static constexpr DType kDType = kType;
  static constexpr bool kExact = false;
  using Value = uint16_t;
  using Center = float;
  static float Wide(uint16_t value) { return static_cast<float>(kFormat.Decode(value)); }
  static uint16_t Narrow(float value) { return kFormat.Encode(value); }
};

using Float32 = Plain<DType::kFloat32, float>;
using Float64 = Plain<DType::kFloat64, double>;
using Float16 = Short<DType::kFloat16, kHalf>;
using BFloat16 = Short<DType::kBFloat16, kBrain>;

// Each test body once per instruction set of the machine.
template <typename F>
void WithEverySet(const F& body) {
  for (const KernelSet& set : KernelSets()) {
    SCOPED_TRACE(set.name);
    UseKernelSet(set);
    body();
    if (testing::Test::HasFatalFailure()) break;
  }
  UseKernelSet(KernelSets().front());
}

template <typename T>
struct State {
  std::vector<typename T::Value> x, out;
  std::vector<typename T::Center> center, last, combined;
};

enum class Inputs { kUsual, kAnyBits };

template <typename V>
std::vector<V> AnyBits(size_t count, std::mt19937* random) {
  std::vector<V> values(count);
  auto* const bytes = reinterpret_cast<unsigned char*>(values.data());
  for (size_t i = 0; i < count * sizeof(V); ++i) bytes[i] = static_cast<unsigned char>((*random)());
  return values;
}

template <typename C>
std::vector<C> UsualCenters(size_t count, std::mt19937* random) {
  std::normal_distribution<C> normal(0, 3);
  std::vector<C> values(count);
  for (C& value : values) value = normal(*random);
  if (count > 4) {
    values[1] = 0;
    values[2] = -C{0};
    values[3] = std::numeric_limits<C>::denorm_min() * 77;
    values[4] = static_cast<C>(sizeof(C) == 4 ? 1e30 : 1e300);
  }
  return values;
}

template <typename T>
State<T> Input(size_t count, Inputs inputs = Inputs::kUsual) {
  using Center = typename T::Center;
  std::mt19937 random(static_cast<uint32_t>(count));
  State<T> s;
  if (inputs == Inputs::kAnyBits) {
    s.x = AnyBits<typename T::Value>(count, &random);
    s.center = AnyBits<Center>(count, &random);
    s.last = AnyBits<Center>(count, &random);
  } else {
    for (const Center value : UsualCenters<Center>(count, &random)) s.x.push_back(T::Narrow(value));
    s.center = UsualCenters<Center>(count, &random);
    s.last = UsualCenters<Center>(count, &random);
  }
  s.out.assign(count, T::Narrow(77));
  s.combined.assign(count, 77);
  return s;
}

// volatile: nothing is vectorised, fused or kept wider. False if the element is bad.
template <typename T>
bool OracleElement(const Move& move, State<T>* s, size_t i) {
  using Center = typename T::Center;
  const auto rate = static_cast<Center>(move.rate);
  const Center x = T::Wide(s->x[i]), g = s->center[i], l = s->last[i];
  volatile Center difference, moved, center, value, delta, after;
  switch (move.kind) {
    case MoveKind::kElastic:
      difference = x - g;
      delta = rate * difference;
      center = g + delta;
      value = x - delta;
      break;
    case MoveKind::kDelta:
      difference = x - l;
      moved = rate * difference;
      center = value = g + moved;
      delta = x - center;
      break;
    default:
      difference = move.kind == MoveKind::kBlend ? x - g : x;
      moved = rate * difference;
      center = g + moved;
      s->combined[i] = std::isfinite(center) ? center : g;
      return std::isfinite(center);
  }
  const bool by_delta = move.output == MoveOutput::kDelta;
  const auto out = T::Narrow(by_delta ? delta : value);
  Center held = center;
  if (!T::kExact) {
    after = by_delta ? x - T::Wide(out) : T::Wide(out);
    held = T::Wide(T::Narrow(after));
  }
  if (!std::isfinite(center) || !std::isfinite(held)) {
    s->out[i] = by_delta ? T::Narrow(0) : s->x[i];
    return false;
  }
  s->center[i] = center;
  if (move.kind == MoveKind::kDelta) s->last[i] = held;
  s->out[i] = out;
  return true;
}

template <typename T>
bool Oracle(const Move& move, State<T>* s) {
  bool all_finite = true;
  if (move.kind == MoveKind::kCopy) {
    const size_t block = kCopyBlockBytes / sizeof(s->x[0]);
    for (size_t first = 0; first < s->x.size(); first += block) {
      const size_t end = std::min(s->x.size(), first + block);
      for (size_t i = first; i < end; ++i) all_finite &= std::isfinite(T::Wide(s->x[i]));
      for (size_t i = first; all_finite && i < end; ++i) {
        s->center[i] = s->last[i] = T::Wide(s->x[i]);
      }
    }
    return all_finite;
  }
  for (size_t i = 0; i < s->x.size(); ++i) all_finite &= OracleElement(move, s, i);
  return all_finite;
}

bool Combines(const Move& move) {
  return move.kind == MoveKind::kAccumulate || move.kind == MoveKind::kBlend;
}

template <typename T>
bool Apply(const Move& move, State<T>* s) {
  void* const out = Combines(move) ? static_cast<void*>(s->combined.data()) : s->out.data();
  return ApplyMove(move, T::kDType, s->x.data(), s->center.data(), s->last.data(), out,
                   s->x.size());
}

template <typename V>
void ExpectSameBits(const std::vector<V>& got, const std::vector<V>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &want[i], sizeof(V)), 0)
        << what << " differs at " << i << " of " << got.size() << ": " << got[i] << ", want "
        << want[i];
  }
}

template <typename T>
void ExpectSame(const State<T>& got, const State<T>& want) {
  ExpectSameBits(got.x, want.x, "x");
  ExpectSameBits(got.center, want.center, "center");
  ExpectSameBits(got.last, want.last, "last");
  ExpectSameBits(got.out, want.out, "out");
  ExpectSameBits(got.combined, want.combined, "combined");
}

std::vector<Move> AllMoves() {
  std::vector<Move> moves = {{MoveKind::kCopy, 1.0, MoveOutput::kValue}};
  for (const double rate : {0.45, 1.0, 0.9 / 7}) {
    for (const MoveKind kind : {MoveKind::kElastic, MoveKind::kDelta}) {
      for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
        moves.push_back({kind, rate, output});
      }
    }
    moves.push_back({MoveKind::kAccumulate, rate});
    moves.push_back({MoveKind::kBlend, rate});
  }
  for (size_t i = moves.size(); i-- > 0;) {
    moves.push_back(moves[i]);
    moves.back().stream = true;
  }
  return moves;
}

std::string Describe(const Move& move, size_t count) {
  return "kind " + std::to_string(static_cast<int>(move.kind)) + " output " +
         std::to_string(static_cast<int>(move.output)) + (move.stream ? " streamed" : "") +
         " rate " + std::to_string(move.rate) + " count " + std::to_string(count);
}

template <typename T>
class ExchangeKernelTest : public testing::Test {};

struct TypeName {
  template <typename T>
  static std::string GetName(int) {
    return DTypeName(T::kDType);
  }
};

using Types = testing::Types<Float32, Float64, Float16, BFloat16>;
TYPED_TEST_SUITE(ExchangeKernelTest, Types, TypeName);

TYPED_TEST(ExchangeKernelTest, SameBitsAsScalarArithmetic) {
  for (const Inputs inputs : {Inputs::kUsual, Inputs::kAnyBits}) {
    for (const size_t count : kSizes) {
      const State<TypeParam> input = Input<TypeParam>(count, inputs);
      for (const Move& move : AllMoves()) {
        SCOPED_TRACE(Describe(move, count));
        State<TypeParam> want = input;
        const bool all_finite = Oracle(move, &want);
        WithEverySet([&] {
          State<TypeParam> got = input;
          EXPECT_EQ(Apply(move, &got), all_finite);
          ExpectSame(got, want);
        });
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(ExchangeKernelTest, InPlaceIsTheSame) {
  for (const Move& move : AllMoves()) {
    const bool combines = Combines(move);
    if (!combines && (move.kind == MoveKind::kCopy || move.output == MoveOutput::kDelta)) continue;
    for (const size_t count : kSizes) {
      SCOPED_TRACE(Describe(move, count));
      WithEverySet([&] {
        State<TypeParam> apart = Input<TypeParam>(count), in_place = apart;
        Apply(move, &apart);
        void* const out =
            combines ? static_cast<void*>(in_place.center.data()) : in_place.x.data();
        ApplyMove(move, TypeParam::kDType, in_place.x.data(), in_place.center.data(),
                  in_place.last.data(), out, count);
        ExpectSameBits(in_place.x, combines ? apart.x : apart.out, "x");
        ExpectSameBits(in_place.center, combines ? apart.combined : apart.center, "center");
        ExpectSameBits(in_place.last, apart.last, "last");
      });
    }
  }
}

// `values` behind `shift` others.
template <typename V>
std::vector<V> Shifted(const std::vector<V>& values, size_t shift) {
  std::vector<V> shifted(shift, V{5});
  shifted.insert(shifted.end(), values.begin(), values.end());
  return shifted;
}

// Weights come from TensorFlow and numpy: aligned to their elements, not more.
TYPED_TEST(ExchangeKernelTest, AnyAlignmentOfElements) {
  for (const size_t count : {size_t{67}, size_t{600}}) {
    const State<TypeParam> input = Input<TypeParam>(count);
    for (const Move& move : AllMoves()) {
      State<TypeParam> want = input;
      Oracle(move, &want);
      for (size_t shift = 1; shift < 16; ++shift) {
        SCOPED_TRACE(Describe(move, count) + " shift " + std::to_string(shift));
        WithEverySet([&] {
          State<TypeParam> got = {Shifted(input.x, shift), Shifted(input.out, shift),
                                  Shifted(input.center, shift / 2), Shifted(input.last, shift / 3),
                                  Shifted(input.combined, shift)};
          void* const out = Combines(move) ? static_cast<void*>(got.combined.data() + shift)
                                           : got.out.data() + shift;
          ApplyMove(move, TypeParam::kDType, got.x.data() + shift, got.center.data() + shift / 2,
                    got.last.data() + shift / 3, out, count);
          ExpectSame(got, {Shifted(want.x, shift), Shifted(want.out, shift),
                           Shifted(want.center, shift / 2), Shifted(want.last, shift / 3),
                           Shifted(want.combined, shift)});
        });
      }
    }
  }
}

TYPED_TEST(ExchangeKernelTest, DeltaInTwoHalvesIsTheSame) {
  using Center = typename TypeParam::Center;
  for (const size_t count : kSizes) {
    State<TypeParam> input = Input<TypeParam>(count);
    for (size_t i = 5; i < count; i += 37) {
      input.x[i] = TypeParam::Narrow(i % 2 == 0 ? std::numeric_limits<Center>::infinity()
                                                : std::numeric_limits<Center>::quiet_NaN());
    }
    if (count > 4) input.x[4] = input.x[3];  // so that float16 does not overflow
    if (count > 4) input.center[4] = 60000;
    if (count > 4) input.last[4] = 100;
    for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
      for (const double rate : {0.45, 1.0}) {
        SCOPED_TRACE(Describe({MoveKind::kDelta, rate, output}, count));
        WithEverySet([&] {
          State<TypeParam> whole = input, halves = input;
          const bool all_finite = Apply({MoveKind::kDelta, rate, output}, &whole);
          std::vector<Center> progress(count);
          DeltaProgress(TypeParam::kDType, halves.x.data(), halves.last.data(), progress.data(),
                        count);
          EXPECT_EQ(ApplyMove({MoveKind::kAccumulate, rate}, CenterDType(TypeParam::kDType),
                              progress.data(), halves.center.data(), nullptr,
                              halves.center.data(), count),
                    all_finite);
          FinishDelta(output, TypeParam::kDType, halves.x.data(), halves.center.data(),
                      halves.last.data(), halves.out.data(), count);
          ExpectSame(halves, whole);
          if (output == MoveOutput::kDelta) return;
          State<TypeParam> in_place = input;
          FinishDelta(output, TypeParam::kDType, in_place.x.data(), halves.center.data(),
                      in_place.last.data(), in_place.x.data(), count);
          ExpectSameBits(in_place.x, whole.out, "x in place");
          ExpectSameBits(in_place.last, whole.last, "last in place");
        });
      }
    }
  }
}

// A bad element stays out of the center, says that nothing moved, and costs the others
// of its move nothing.
TYPED_TEST(ExchangeKernelTest, NonFiniteElementStaysOutOfTheCenter) {
  using Center = typename TypeParam::Center;
  const Center infinity = std::numeric_limits<Center>::infinity();
  for (const Move& move : AllMoves()) {
    for (const size_t count : {1u, 3u, 4u, 17u, 100u}) {
      for (const Center bad : {std::numeric_limits<Center>::quiet_NaN(), infinity, -infinity}) {
        for (size_t position = 0; position < count; position += 5) {
          State<TypeParam> input = Input<TypeParam>(count), want = input;
          Oracle(move, &want);
          if (move.kind == MoveKind::kCopy) want = input;
          input.x[position] = want.x[position] = TypeParam::Narrow(bad);
          want.center[position] = input.center[position];
          want.last[position] = input.last[position];
          if (Combines(move)) {
            want.combined[position] = input.center[position];
          } else if (move.kind != MoveKind::kCopy) {
            want.out[position] =
                move.output == MoveOutput::kDelta ? TypeParam::Narrow(0) : input.x[position];
          }
          WithEverySet([&] {
            State<TypeParam> got = input;
            EXPECT_FALSE(Apply(move, &got));
            ExpectSame(got, want);
          });
        }
      }
    }
  }
}

TYPED_TEST(ExchangeKernelTest, CloseToTheFormulasInDouble) {
  constexpr size_t kCount = 1000;
  constexpr double kRate = 0.3;
  const double near = TypeParam::kExact ? 1e-6 : 4.0 / 256;
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(-2, 2);
  State<TypeParam> before = Input<TypeParam>(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    before.x[i] = TypeParam::Narrow(static_cast<typename TypeParam::Center>(uniform(random)));
    before.center[i] = static_cast<typename TypeParam::Center>(uniform(random));
    before.last[i] = static_cast<typename TypeParam::Center>(uniform(random));
  }
  WithEverySet([&] {
    State<TypeParam> elastic = before, delta = before, accumulate = before, blend = before;
    Apply({MoveKind::kElastic, kRate, MoveOutput::kValue}, &elastic);
    Apply({MoveKind::kDelta, kRate, MoveOutput::kDelta}, &delta);
    Apply({MoveKind::kAccumulate, kRate}, &accumulate);
    Apply({MoveKind::kBlend, kRate}, &blend);
    for (size_t i = 0; i < kCount; ++i) {
      const double x = TypeParam::Wide(before.x[i]), g = before.center[i], l = before.last[i];
      const double d = kRate * (x - g), want = g + kRate * (x - l);
      ASSERT_NEAR(TypeParam::Wide(elastic.out[i]), x - d, near);
      ASSERT_NEAR(elastic.center[i], g + d, 1e-6);
      ASSERT_NEAR(delta.center[i], want, 1e-6);
      ASSERT_NEAR(delta.last[i], want, near);
      ASSERT_NEAR(TypeParam::Wide(delta.out[i]), x - want, near);
      ASSERT_NEAR(accumulate.combined[i], g + kRate * x, 1e-6);
      ASSERT_NEAR(blend.combined[i], (1 - kRate) * g + kRate * x, 1e-6);
    }
  });
}

// What a worker has made of the delta is where its next progress starts.
TYPED_TEST(ExchangeKernelTest, RoundingIsNoProgress) {
  WithEverySet([] {
    State<TypeParam> s = Input<TypeParam>(100);
    s.center[4] = s.last[4] = 1000;
    s.x[4] = TypeParam::Narrow(1001);
    ASSERT_TRUE(Apply({MoveKind::kDelta, 0.3, MoveOutput::kDelta}, &s));
    if (TypeParam::kExact) return;
    std::vector<typename TypeParam::Center> progress(s.x.size());
    for (size_t i = 0; i < s.x.size(); ++i) {
      s.x[i] = TypeParam::Narrow(TypeParam::Wide(s.x[i]) - TypeParam::Wide(s.out[i]));
    }
    DeltaProgress(TypeParam::kDType, s.x.data(), s.last.data(), progress.data(), s.x.size());
    for (const auto value : progress) ASSERT_EQ(value, 0);
  });
}

TYPED_TEST(ExchangeKernelTest, CopyLeavesOutAndNullLastAlone) {
  WithEverySet([] {
    State<TypeParam> s = Input<TypeParam>(1000);
    std::vector<typename TypeParam::Center> want(1000);
    for (size_t i = 0; i < want.size(); ++i) want[i] = TypeParam::Wide(s.x[i]);
    if (!std::isfinite(want[4])) s.x[4] = TypeParam::Narrow(want[4] = 4);
    ASSERT_TRUE(ApplyMove({MoveKind::kCopy, 0.0, MoveOutput::kDelta}, TypeParam::kDType,
                          s.x.data(), s.center.data(), nullptr, nullptr, 1000));
    ExpectSameBits(s.center, want, "center");
  });
}

TEST(ExchangeKernelFloat32Test, ElasticConservesExactSums) {
  std::vector<float> x = {4096.0f, -512.0f, 64.0f}, g = {0.0f, 256.0f, -64.0f};
  for (int i = 0; i < 8; ++i) {
    ApplyMove({MoveKind::kElastic, 0.5, MoveOutput::kValue}, DType::kFloat32, x.data(), g.data(),
              nullptr, x.data(), x.size());
    EXPECT_EQ(x[0] + g[0], 4096.0f);
    EXPECT_EQ(x[1] + g[1], -256.0f);
    EXPECT_EQ(x[2] + g[2], 0.0f);
  }
}

TEST(ExchangeKernelFloat32Test, OverflowIsFoundToo) {
  const float most = std::numeric_limits<float>::max();
  float x = -most, center = most, out = 0.0f;
  EXPECT_FALSE(ApplyMove({MoveKind::kElastic, 0.5, MoveOutput::kDelta}, DType::kFloat32, &x,
                         &center, nullptr, &out, 1));
  EXPECT_EQ(center, most);
  EXPECT_EQ(out, 0.0f);
}

TEST(ExchangeKernelFloat16Test, WhatTheWorkerCannotHoldIsNotMoved) {
  WithEverySet([] {
    for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
      const uint16_t x = kHalf.Encode(60000), unmoved = output == MoveOutput::kValue ? x : 0;
      float center = 70000.0f, last = 60000.0f;
      uint16_t out = 1;
      EXPECT_FALSE(ApplyMove({MoveKind::kDelta, 1.0, output}, DType::kFloat16, &x, &center, &last,
                             &out, 1));
      EXPECT_EQ(center, 70000.0f);
      EXPECT_EQ(last, 60000.0f);
      EXPECT_EQ(out, unmoved);

      center = 100000.0f;
      EXPECT_FALSE(ApplyMove({MoveKind::kElastic, 0.9, output}, DType::kFloat16, &x, &center,
                             nullptr, &out, 1));
      EXPECT_EQ(center, 100000.0f);
      EXPECT_EQ(out, unmoved);

      // In halves the center has moved by now: the progress must not be sent again.
      last = 59000.0f;
      FinishDelta(output, DType::kFloat16, &x, &center, &last, &out, 1);
      EXPECT_EQ(out, unmoved);
      EXPECT_EQ(last, 60000.0f);
    }
  });
}

// 65520, halfway to the 2^16 that is no float16, rounds to infinity; less does not.
TEST(ExchangeKernelFloat16Test, OverflowStartsHalfwayToTheNextNumber) {
  WithEverySet([] {
    const uint16_t x = kHalf.Encode(65504);
    for (const float target : {65519.0f, 65520.0f, 65535.0f}) {
      const bool fits = target < 65520;
      float center = target;
      uint16_t out = 0;
      EXPECT_EQ(ApplyMove({MoveKind::kElastic, 1.0, MoveOutput::kValue}, DType::kFloat16, &x,
                          &center, nullptr, &out, 1),
                fits);
      EXPECT_EQ(center, fits ? 65504.0f : target);
      EXPECT_EQ(out, x);
    }
  });
}

// In a bfloat16 center 1 + 0.001 would stay 1.
TEST(ExchangeKernelBFloat16Test, SmallDeltasAddUp) {
  WithEverySet([] {
    constexpr int kAdditions = 10000;
    const std::vector<uint16_t> delta(3, kBrain.Encode(0.001));
    const double value = kBrain.Decode(delta[0]);
    std::vector<float> center = {1.0f, -3.0f, 0.0f};
    const std::vector<float> before = center;
    for (int i = 0; i < kAdditions; ++i) {
      ASSERT_TRUE(ApplyMove({MoveKind::kAccumulate, 1.0}, DType::kBFloat16, delta.data(),
                            center.data(), nullptr, center.data(), center.size()));
    }
    for (size_t i = 0; i < center.size(); ++i) {
      const double want = before[i] + kAdditions * value;
      EXPECT_NEAR(center[i], want, 1e-3 * want);
    }
  });
}

// Every pattern there is, and the values around the middle between it and the next.
template <typename T>
void ExpectRightConversions(const Format& format) {
  constexpr size_t kPatterns = 65536;
  std::vector<uint16_t> patterns(kPatterns), back(kPatterns);
  for (size_t i = 0; i < kPatterns; ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(kPatterns);
  ToCenter(T::kDType, patterns.data(), wide.data(), kPatterns);
  FromCenter(T::kDType, wide.data(), back.data(), kPatterns);
  std::vector<float> values;
  for (size_t i = 0; i < kPatterns; ++i) {
    const double want = format.Decode(patterns[i]);
    const auto want_float = static_cast<float>(want);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(wide[i])) << i;
      ASSERT_TRUE(std::isnan(format.Decode(back[i]))) << i;
      ASSERT_EQ(patterns[i] & 0x8000, back[i] & 0x8000) << i;
      continue;
    }
    ASSERT_EQ(std::memcmp(&wide[i], &want_float, sizeof(float)), 0) << i << ": " << wide[i];
    ASSERT_EQ(back[i], patterns[i]);
    const double next = format.Decode(static_cast<uint16_t>(i + 1));
    if (!std::isfinite(want) || std::isnan(next)) continue;
    const double step = std::isfinite(next) ? next - want : want - format.Decode(patterns[i - 1]);
    const auto middle = static_cast<float>(want + step / 2);
    values.push_back(middle);
    values.push_back(std::nextafter(middle, 0.0f));
    values.push_back(std::nextafter(middle, middle * 2));
  }
  for (const float value : {1e-45f, -1e-45f, 1e-38f, 3e38f, -3e38f,
                            std::numeric_limits<float>::max()}) {
    values.push_back(value);
  }
  std::vector<uint16_t> narrow(values.size());
  FromCenter(T::kDType, values.data(), narrow.data(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(narrow[i], format.Encode(values[i])) << values[i];
  }
}

TEST(ConversionTest, RightForAllPatterns) {
  WithEverySet([] { ExpectRightConversions<Float16>(kHalf); });
  WithEverySet([] { ExpectRightConversions<BFloat16>(kBrain); });
}

// Payloads too: no instruction set shows.
TEST(ConversionTest, SameBitsInEverySet) {
  std::mt19937 random(3);
  const std::vector<float> values = AnyBits<float>(100003, &random);
  std::vector<float> nans(65536 + 3);
  for (size_t i = 0; i < nans.size(); ++i) {
    const uint32_t bits = 0x7f800001u + static_cast<uint32_t>(i) * 127u;
    std::memcpy(&nans[i], &bits, sizeof(bits));
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::vector<float>* from : {&values, &std::as_const(nans)}) {
      std::vector<std::vector<uint16_t>> narrow;
      std::vector<std::vector<float>> wide;
      WithEverySet([&] {
        narrow.emplace_back(from->size());
        FromCenter(dtype, from->data(), narrow.back().data(), from->size());
        wide.emplace_back(from->size());
        std::vector<uint16_t> patterns(from->size());
        for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
        ToCenter(dtype, patterns.data(), wide.back().data(), patterns.size());
      });
      for (size_t i = 1; i < narrow.size(); ++i) {
        ExpectSameBits(narrow[i], narrow[0], "narrow");
        ExpectSameBits(wide[i], wide[0], "wide");
      }
      for (size_t i = 0; i < from->size(); ++i) {
        if (std::isnan((*from)[i])) {
          const uint16_t infinity = (dtype == DType::kFloat16 ? kHalf : kBrain).InfinityBits();
          ASSERT_GT(narrow[0][i] & 0x7fff, infinity);
        }
      }
    }
  }
}

#if defined(__SSE2__)
// TensorFlow's threads flush denormals to zero; those of float16 are no denormals in float32.
TEST(ConversionTest, DenormalsOfFloat16AreKeptWhereFloatsAreFlushed) {
  std::vector<uint16_t> patterns(0x8000), flushed(0x8000);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> wide(patterns.size()), wide_flushed(patterns.size());
  WithEverySet([&] {
    ToCenter(DType::kFloat16, patterns.data(), wide.data(), patterns.size());
    const unsigned int mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040u);  // FTZ, DAZ
    ToCenter(DType::kFloat16, patterns.data(), wide_flushed.data(), patterns.size());
    FromCenter(DType::kFloat16, wide.data(), flushed.data(), patterns.size());
    _mm_setcsr(mode);
    ExpectSameBits(wide_flushed, wide, "wide");
    flushed.resize(0x7c01);
    ExpectSameBits(flushed, {patterns.begin(), patterns.begin() + 0x7c01}, "narrow");
    flushed.resize(patterns.size());
  });
}
#endif

TYPED_TEST(ExchangeKernelTest, CopiesBetweenTypesAreInPlainOrder) {
  WithEverySet([] {
    for (const size_t count : kSizes) {
      const State<TypeParam> s = Input<TypeParam>(count);
      std::vector<typename TypeParam::Center> wide(count);
      std::vector<typename TypeParam::Value> narrow(count);
      ToCenter(TypeParam::kDType, s.x.data(), wide.data(), count);
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(wide[i], TypeParam::Wide(s.x[i]));
      FromCenter(TypeParam::kDType, wide.data(), narrow.data(), count);
      ExpectSameBits(narrow, s.x, "narrow");
    }
  });
}

template <typename V>
std::vector<V> BadValues() {
  using Limits = std::numeric_limits<V>;
  return {Limits::quiet_NaN(), -Limits::quiet_NaN(), Limits::signaling_NaN(), Limits::infinity(),
          -Limits::infinity()};
}

template <typename T>
std::vector<typename T::Value> BadPatterns() {
  if constexpr (T::kExact) {
    return BadValues<typename T::Value>();
  } else {
    const auto infinity = T::Narrow(std::numeric_limits<float>::infinity());
    const auto negative = static_cast<uint16_t>(infinity | 0x8000);
    return {infinity, negative, static_cast<uint16_t>(infinity + 1),
            static_cast<uint16_t>(negative + 1), 0x7fff, 0xffff};
  }
}

template <typename T>
std::vector<typename T::Value> GoodPatterns() {
  if constexpr (T::kExact) {
    using Limits = std::numeric_limits<typename T::Value>;
    return {Limits::max(), -Limits::max(), Limits::denorm_min(), 0};
  } else {
    const auto infinity = T::Narrow(std::numeric_limits<float>::infinity());
    return {static_cast<uint16_t>(infinity - 1), static_cast<uint16_t>((infinity - 1) | 0x8000), 1,
            0x8000};
  }
}

TYPED_TEST(ExchangeKernelTest, AllFiniteFindsEveryPosition) {
  const auto good = GoodPatterns<TypeParam>();
  WithEverySet([&] {
    for (const size_t count : {1u, 2u, 15u, 16u, 17u, 63u, 64u, 65u, 200u}) {
      std::vector<typename TypeParam::Value> values(count);
      for (size_t i = 0; i < count; ++i) values[i] = good[i % good.size()];
      EXPECT_TRUE(AllFinite(TypeParam::kDType, values.data(), count)) << count;
      for (size_t position = 0; position < count; ++position) {
        const auto kept = values[position];
        for (const auto bad : BadPatterns<TypeParam>()) {
          std::memcpy(&values[position], &bad, sizeof(bad));
          ASSERT_FALSE(AllFinite(TypeParam::kDType, values.data(), count))
              << count << " at " << position;
        }
        values[position] = kept;
      }
      EXPECT_TRUE(AllFinite(TypeParam::kDType, values.data(), count));
    }
    EXPECT_TRUE(AllFinite(TypeParam::kDType, nullptr, 0));
  });
}

TYPED_TEST(ExchangeKernelTest, AllFiniteFindsAnyPositionOfManyElements) {
  constexpr size_t kCount = (size_t{20} << 20) / sizeof(typename TypeParam::Value) + 13;
  const auto good = GoodPatterns<TypeParam>();
  std::vector<typename TypeParam::Value> values(kCount);
  for (size_t i = 0; i < kCount; ++i) values[i] = good[i % good.size()];
  std::mt19937 random(11);
  std::vector<size_t> positions = {0, kCount - 1};
  for (int i = 0; i < 40; ++i) positions.push_back(random() % kCount);
  const auto bad = BadPatterns<TypeParam>();
  WithEverySet([&] {
    ASSERT_TRUE(AllFinite(TypeParam::kDType, values.data(), kCount));
    for (const size_t position : positions) {
      const auto kept = values[position];
      values[position] = bad[position % bad.size()];
      ASSERT_FALSE(AllFinite(TypeParam::kDType, values.data(), kCount)) << position;
      values[position] = kept;
    }
  });
}

// What is not averaged is copied as it is, whatever its bits would mean as floats.
TEST(OtherDTypesTest, AreCopied) {
  std::mt19937 random(2);
  for (int number = 1; IsKnown(static_cast<DType>(number)); ++number) {
    const auto dtype = static_cast<DType>(number);
    if (IsAveraged(dtype)) continue;
    const size_t bytes = 100 * ElementBytes(dtype);
    const std::vector<uint64_t> x((bytes + 7) / 8, ~uint64_t{0});
    for (const bool stream : {false, true}) {
      std::vector<uint64_t> center(x.size()), to(x.size()), from(x.size());
      EXPECT_TRUE(ApplyMove({MoveKind::kCopy, 1.0, MoveOutput::kValue, stream}, dtype, x.data(),
                            center.data(), nullptr, nullptr, 100));
      ToCenter(dtype, x.data(), to.data(), 100);
      FromCenter(dtype, x.data(), from.data(), 100);
      for (const auto* copy : {&center, &to, &from}) {
        EXPECT_EQ(std::memcmp(copy->data(), x.data(), bytes), 0) << DTypeName(dtype);
      }
    }
    EXPECT_TRUE(AllFinite(dtype, x.data(), 100)) << DTypeName(dtype);
    EXPECT_TRUE(ApplyMove({MoveKind::kCopy}, dtype, nullptr, nullptr, nullptr, nullptr, 0));
  }
}

TEST(KernelSetTest, BaselineIsAlwaysThere) {
  EXPECT_STREQ(KernelSets().back().name, "baseline");
  EXPECT_STREQ(KernelInstructionSet(), KernelSets().front().name);
  const std::string name = KernelInstructionSet();
  EXPECT_TRUE(name == "avx2" || name == "baseline") << name;
}

}  // namespace
}  // namespace tf_smb
