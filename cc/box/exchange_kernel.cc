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
  void (*elastic)(float rate, bool delta, const float* x, float* center, float* out, size_t count);
  void (*delta)(float rate, bool delta, const float* x, float* center, float* last, float* out,
                size_t count);
  bool (*all_finite)(const float* values, size_t count);
};

#define TF_SMB_DEFINE_KERNELS(SUFFIX, TARGET)                                                 \
  TARGET void Elastic##SUFFIX(float rate, bool delta, const float* x, float* center,         \
                              float* out, size_t count) {                                     \
    if (delta) {                                                                              \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float moved = rate * (x[i] - center[i]);                                        \
        center[i] += moved;                                                                   \
        out[i] = moved;                                                                       \
      }                                                                                       \
    } else {                                                                                  \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float moved = rate * (x[i] - center[i]);                                        \
        center[i] += moved;                                                                   \
        out[i] = x[i] - moved;                                                                \
      }                                                                                       \
    }                                                                                         \
  }                                                                                           \
  TARGET void Delta##SUFFIX(float rate, bool delta, const float* x, float* center,           \
                            float* last, float* out, size_t count) {                          \
    if (delta) {                                                                              \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float moved = center[i] + rate * (x[i] - last[i]);                              \
        center[i] = moved;                                                                    \
        last[i] = moved;                                                                      \
        out[i] = x[i] - moved;                                                                \
      }                                                                                       \
    } else {                                                                                  \
      TF_SMB_INDEPENDENT_ITERATIONS                                                           \
      for (size_t i = 0; i < count; ++i) {                                                    \
        const float moved = center[i] + rate * (x[i] - last[i]);                              \
        center[i] = moved;                                                                    \
        last[i] = moved;                                                                      \
        out[i] = moved;                                                                       \
      }                                                                                       \
    }                                                                                         \
  }                                                                                           \
  TARGET bool AllFinite##SUFFIX(const float* values, size_t count) {                          \
    constexpr uint32_t kExponent = 0x7f800000u;                                               \
    uint32_t found = 0;                                                                       \
    for (size_t i = 0; i < count; ++i) {                                                      \
      uint32_t bits;                                                                          \
      std::memcpy(&bits, values + i, sizeof(bits));                                           \
      found |= (bits & kExponent) == kExponent ? 1u : 0u;                                     \
    }                                                                                         \
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

// Out of memory, and not out of the cache, 128 bits are as fast as more, and faster on
// arrays that begin within a cache line, as numpy's do: they never cross into the next.
const Kernels& ChosenFor(const Move& move) {
  static const Kernels baseline = {"baseline", ElasticBaseline, DeltaBaseline, AllFiniteBaseline};
  return move.stream ? baseline : Chosen();
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

void StreamElastic(float rate, const float* x, float* center, float* out, size_t count) {
  const __m128 rates = _mm_set1_ps(rate);
  for (size_t i = 0; i < count; i += kStreamElements) {
    const __m128 g = _mm_loadu_ps(center + i);
    const __m128 moved = _mm_mul_ps(rates, _mm_sub_ps(_mm_loadu_ps(x + i), g));
    _mm_storeu_ps(center + i, _mm_add_ps(g, moved));
    _mm_stream_ps(out + i, moved);
  }
}

void StreamDelta(float rate, const float* x, float* center, float* last, float* out,
                 size_t count) {
  const __m128 rates = _mm_set1_ps(rate);
  for (size_t i = 0; i < count; i += kStreamElements) {
    const __m128 local = _mm_loadu_ps(x + i);
    const __m128 progress = _mm_mul_ps(rates, _mm_sub_ps(local, _mm_loadu_ps(last + i)));
    const __m128 moved = _mm_add_ps(_mm_loadu_ps(center + i), progress);
    _mm_storeu_ps(center + i, moved);
    _mm_storeu_ps(last + i, moved);
    _mm_stream_ps(out + i, _mm_sub_ps(local, moved));
  }
}

// Does the leading elements of a move that can be streamed; returns how many.
size_t ApplyStreamed(const Move& move, const float* x, float* center, float* last, float* out,
                     size_t count) {
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
      StreamElastic(move.rate, x, center, out, streamed);
      break;
    case MoveKind::kDelta:
      StreamDelta(move.rate, x, center, last, out, streamed);
      break;
  }
  _mm_sfence();  // before the chunk's lock is given up
  return streamed;
}

#else

size_t ApplyStreamed(const Move&, const float*, float*, float*, float*, size_t) { return 0; }

#endif

}  // namespace

void ApplyMove(const Move& move, const float* x, float* center, float* last, float* out,
               size_t count) {
  const size_t done = ApplyStreamed(move, x, center, last, out, count);
  if (done == count) return;
  const bool delta = move.output == MoveOutput::kDelta;
  x += done;
  center += done;
  count -= done;
  switch (move.kind) {
    case MoveKind::kCopy:
      std::memcpy(center, x, count * sizeof(float));
      break;
    case MoveKind::kElastic:
      ChosenFor(move).elastic(move.rate, delta, x, center, out + done, count);
      break;
    case MoveKind::kDelta:
      ChosenFor(move).delta(move.rate, delta, x, center, last + done, out + done, count);
      break;
  }
}

bool AllFinite(const float* values, size_t count) { return Chosen().all_finite(values, count); }

const char* KernelInstructionSet() { return Chosen().name; }

}  // namespace tf_smb
