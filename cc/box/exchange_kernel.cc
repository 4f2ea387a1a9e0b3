#include "cc/box/exchange_kernel.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// `out` may be `x` itself, element for element, which a compiler cannot know:
// tell it that no iteration depends on another.
#if defined(__clang__)
#define TF_SMB_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define TF_SMB_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

// Each loop once per instruction set; the best one is chosen at run time, so one
// binary serves every machine. No fused multiply-add in any of them (the build
// says -ffp-contract=off): all give the same bits. 512-bit vectors were slower
// (docs/performance.md).
#if defined(__x86_64__)
#define TF_SMB_TARGET_AVX2 __attribute__((target("avx2")))
#endif

namespace tf_smb {
namespace {

struct Kernels {
  const char* name;
  bool (*elastic)(float rate, bool delta, const float* x, float* center, float* out, size_t count);
  bool (*delta)(float rate, bool delta, const float* x, float* center, float* last, float* out,
                size_t count);
  bool (*all_finite)(const float* values, size_t count);
};

constexpr uint32_t kExponentBits = 0x7f800000u;
constexpr uint32_t kLowestExponentBit = 0x00800000u;

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// All ones for a NaN or an infinity, whose exponents alone carry over into the sign bit;
// else 0. With masks instead of branches the loops below vectorise on every compiler.
inline uint32_t NotFinite(float value) {
  return 0u - (((BitsOf(value) & kExponentBits) + kLowestExponentBit) >> 31);
}

// `where_set` under the ones of `mask`, `elsewhere` under its zeros.
inline float Select(uint32_t mask, float where_set, float elsewhere) {
  const uint32_t bits = (BitsOf(where_set) & mask) | (BitsOf(elsewhere) & ~mask);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// An element whose new center would not be finite stays as it is, on both sides: in
// the same pass, since a pass of its own would cost a third of the exchange.
#define TF_SMB_DEFINE_KERNELS(SUFFIX, TARGET)                                                 \
  TARGET bool Elastic##SUFFIX(float rate, bool delta, const float* x, float* center,          \
                              float* out, size_t count) {                                     \
    uint32_t found = 0;                                                                       \
    if (delta) {                                                                              \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float g = center[i];                                                            \
        const float moved = rate * (x[i] - g);                                                \
        const uint32_t bad = NotFinite(g + moved);                                            \
        center[i] = Select(bad, g, g + moved);                                                \
        out[i] = Select(bad, 0.0f, moved);                                                    \
        found |= bad;                                                                         \
      }                                                                                       \
    } else {                                                                                  \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float g = center[i];                                                            \
        const float moved = rate * (x[i] - g);                                                \
        const uint32_t bad = NotFinite(g + moved);                                            \
        center[i] = Select(bad, g, g + moved);                                                \
        out[i] = Select(bad, x[i], x[i] - moved);                                             \
        found |= bad;                                                                         \
      }                                                                                       \
    }                                                                                         \
    return found == 0;                                                                        \
  }                                                                                           \
  TARGET bool Delta##SUFFIX(float rate, bool delta, const float* x, float* center,            \
                            float* last, float* out, size_t count) {                          \
    uint32_t found = 0;                                                                       \
    if (delta) {                                                                              \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float g = center[i];                                                            \
        const float moved = g + rate * (x[i] - last[i]);                                      \
        const uint32_t bad = NotFinite(moved);                                                \
        center[i] = Select(bad, g, moved);                                                    \
        last[i] = Select(bad, last[i], moved);                                                \
        out[i] = Select(bad, 0.0f, x[i] - moved);                                             \
        found |= bad;                                                                         \
      }                                                                                       \
    } else {                                                                                  \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float g = center[i];                                                            \
        const float moved = g + rate * (x[i] - last[i]);                                      \
        const uint32_t bad = NotFinite(moved);                                                \
        center[i] = Select(bad, g, moved);                                                    \
        last[i] = Select(bad, last[i], moved);                                                \
        out[i] = Select(bad, x[i], moved);                                                    \
        found |= bad;                                                                         \
      }                                                                                       \
    }                                                                                         \
    return found == 0;                                                                        \
  }                                                                                           \
  TARGET bool AllFinite##SUFFIX(const float* values, size_t count) {                          \
    uint32_t found = 0;                                                                       \
    for (size_t i = 0; i < count; ++i) found |= NotFinite(values[i]);                         \
    return found == 0;                                                                        \
  }

TF_SMB_DEFINE_KERNELS(Baseline, )
#if defined(__x86_64__)
TF_SMB_DEFINE_KERNELS(Avx2, TF_SMB_TARGET_AVX2)
#endif

Kernels ChooseKernels() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return {"avx2", ElasticAvx2, DeltaAvx2, AllFiniteAvx2};
#endif
  return {"baseline", ElasticBaseline, DeltaBaseline, AllFiniteBaseline};
}

const Kernels& Chosen() {
  static const Kernels kernels = ChooseKernels();
  return kernels;
}

// The same moves with stores past the cache: the lines that are written are not read
// first, which is a quarter of the traffic. 128 bits are as fast as 256 here. Each
// takes `count` in fours, and a destination on 16 bytes.
#if defined(__SSE2__)

constexpr size_t kStreamElements = 4;

void StreamCopy(const float* x, float* center, size_t count) {
  for (size_t i = 0; i < count; i += kStreamElements) {
    _mm_stream_ps(center + i, _mm_loadu_ps(x + i));
  }
}

// All ones in the elements that are NaN or infinite.
inline __m128 NotFiniteMask(__m128 values) {
  const __m128i exponent = _mm_set1_epi32(0x7f800000);
  return _mm_castsi128_ps(
      _mm_cmpeq_epi32(_mm_and_si128(_mm_castps_si128(values), exponent), exponent));
}

inline __m128 SelectMask(__m128 mask, __m128 where_set, __m128 elsewhere) {
  return _mm_or_ps(_mm_and_ps(mask, where_set), _mm_andnot_ps(mask, elsewhere));
}

bool StreamElastic(float rate, const float* x, float* center, float* out, size_t count) {
  const __m128 rates = _mm_set1_ps(rate);
  __m128 found = _mm_setzero_ps();
  for (size_t i = 0; i < count; i += kStreamElements) {
    const __m128 g = _mm_loadu_ps(center + i);
    const __m128 moved = _mm_mul_ps(rates, _mm_sub_ps(_mm_loadu_ps(x + i), g));
    const __m128 next = _mm_add_ps(g, moved);
    const __m128 bad = NotFiniteMask(next);
    _mm_storeu_ps(center + i, SelectMask(bad, g, next));
    _mm_stream_ps(out + i, _mm_andnot_ps(bad, moved));
    found = _mm_or_ps(found, bad);
  }
  return _mm_movemask_ps(found) == 0;
}

bool StreamDelta(float rate, const float* x, float* center, float* last, float* out,
                 size_t count) {
  const __m128 rates = _mm_set1_ps(rate);
  __m128 found = _mm_setzero_ps();
  for (size_t i = 0; i < count; i += kStreamElements) {
    const __m128 local = _mm_loadu_ps(x + i), base = _mm_loadu_ps(last + i);
    const __m128 g = _mm_loadu_ps(center + i);
    const __m128 moved = _mm_add_ps(g, _mm_mul_ps(rates, _mm_sub_ps(local, base)));
    const __m128 bad = NotFiniteMask(moved);
    _mm_storeu_ps(center + i, SelectMask(bad, g, moved));
    _mm_storeu_ps(last + i, SelectMask(bad, base, moved));
    _mm_stream_ps(out + i, _mm_andnot_ps(bad, _mm_sub_ps(local, moved)));
    found = _mm_or_ps(found, bad);
  }
  return _mm_movemask_ps(found) == 0;
}

// Does the leading elements of a move that can be streamed; returns how many.
size_t ApplyStreamed(const Move& move, const float* x, float* center, float* last, float* out,
                     size_t count, bool* all_finite) {
  const bool copy = move.kind == MoveKind::kCopy;
  if (!move.stream || (!copy && move.output != MoveOutput::kDelta)) return 0;
  const auto destination = reinterpret_cast<uintptr_t>(copy ? center : out);
  if (destination % (kStreamElements * sizeof(float)) != 0) return 0;
  const size_t streamed = count / kStreamElements * kStreamElements;
  switch (move.kind) {
    case MoveKind::kCopy:
      StreamCopy(x, center, streamed);
      break;
    case MoveKind::kElastic:
      *all_finite = StreamElastic(move.rate, x, center, out, streamed);
      break;
    case MoveKind::kDelta:
      *all_finite = StreamDelta(move.rate, x, center, last, out, streamed);
      break;
  }
  _mm_sfence();  // before the chunk's lock is given up
  return streamed;
}

#else

size_t ApplyStreamed(const Move&, const float*, float*, float*, float*, size_t, bool*) {
  return 0;
}

#endif

}  // namespace

bool ApplyMove(const Move& move, const float* x, float* center, float* last, float* out,
               size_t count) {
  const bool copy = move.kind == MoveKind::kCopy;
  if (copy && !AllFinite(x, count)) return false;
  if (copy && last != nullptr && count > 0) std::memcpy(last, x, count * sizeof(float));
  bool all_finite = true;
  const size_t done = ApplyStreamed(move, x, center, last, out, count, &all_finite);
  if (done == count) return all_finite;
  const bool delta = move.output == MoveOutput::kDelta;
  x += done;
  center += done;
  count -= done;
  switch (move.kind) {
    case MoveKind::kCopy:
      std::memcpy(center, x, count * sizeof(float));
      return true;
    case MoveKind::kElastic:
      return Chosen().elastic(move.rate, delta, x, center, out + done, count) && all_finite;
    case MoveKind::kDelta:
      return Chosen().delta(move.rate, delta, x, center, last + done, out + done, count) &&
             all_finite;
  }
  return all_finite;
}

bool AllFinite(const float* values, size_t count) { return Chosen().all_finite(values, count); }

const char* KernelInstructionSet() { return Chosen().name; }

}  // namespace tf_smb
