#include "cc/box/exchange_kernel_set.h"

#include <cstring>

#include "cc/box/exchange_kernel_loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

// No fused multiply-add in any set (the build says -ffp-contract=off): all give the same
// bits. 512-bit vectors were slower (docs/performance.md).
#if defined(__x86_64__)
#define TF_SMB_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace tf_smb {
namespace kernel_loops {
namespace {

// What takes more than a cast from the pointers of TypedKernels to the loops of W.
template <typename W>
struct Untyped {
  using Value = typename W::Value;
  using Center = typename W::Center;

  TF_SMB_INLINE static bool Apply(const Move& move, const void* x, void* center, void* last,
                                  void* out, size_t count) {
    const auto* const values = static_cast<const Value*>(x);
    auto* const centers = static_cast<Center*>(center);
    auto* const lasts = static_cast<Center*>(last);
    switch (move.kind) {
      case MoveKind::kCopy:
        return Loops<W>::CopyFinite(move.stream, values, centers, lasts, count);
      case MoveKind::kElastic:
        return Loops<W>::template Exchange<MoveKind::kElastic>(
            move, values, centers, nullptr, static_cast<Value*>(out), count);
      case MoveKind::kDelta:
        return Loops<W>::template Exchange<MoveKind::kDelta>(move, values, centers, lasts,
                                                             static_cast<Value*>(out), count);
      case MoveKind::kAccumulate:
        return Loops<W>::template Combine<MoveKind::kAccumulate>(
            move.rate, values, centers, static_cast<Center*>(out), count);
      case MoveKind::kBlend:
        return Loops<W>::template Combine<MoveKind::kBlend>(
            move.rate, values, centers, static_cast<Center*>(out), count);
    }
    return false;
  }

  TF_SMB_INLINE static void Narrow(const void* center, void* values, size_t count) {
    if constexpr (W::kExact) {
      if (count > 0) std::memcpy(values, center, count * sizeof(Value));
    } else {
      W::Narrow(static_cast<const Center*>(center), static_cast<Value*>(values), count);
    }
  }
};

// SET<W>::Kernels(): the loops of W, compiled for TARGET.
#define TF_SMB_DEFINE_SET(SET, TARGET)                                                          \
  template <typename W>                                                                         \
  struct SET {                                                                                  \
    using Value = typename W::Value;                                                            \
    using Center = typename W::Center;                                                          \
    TARGET static bool Apply(const Move& move, const void* x, void* center, void* last,         \
                             void* out, size_t count) {                                         \
      return Untyped<W>::Apply(move, x, center, last, out, count);                              \
    }                                                                                           \
    TARGET static void Progress(const void* x, const void* last, void* progress,                \
                                size_t count) {                                                 \
      Loops<W>::Progress(static_cast<const Value*>(x), static_cast<const Center*>(last),        \
                         static_cast<Center*>(progress), count);                                \
    }                                                                                           \
    TARGET static void Finish(MoveOutput output, const void* x, const void* moved, void* last,  \
                              void* out, size_t count) {                                        \
      Loops<W>::Finish(output, static_cast<const Value*>(x), static_cast<const Center*>(moved), \
                       static_cast<Center*>(last), static_cast<Value*>(out), count);            \
    }                                                                                           \
    TARGET static void ToCenter(const void* values, void* center, size_t count) {               \
      Loops<W>::Copy(false, static_cast<const Value*>(values), static_cast<Center*>(center),    \
                     nullptr, count);                                                           \
    }                                                                                           \
    TARGET static void FromCenter(const void* center, void* values, size_t count) {             \
      Untyped<W>::Narrow(center, values, count);                                                \
    }                                                                                           \
    TARGET static bool AllFinite(const void* values, size_t count) {                            \
      return Loops<W>::AllFinite(static_cast<const Value*>(values), count);                     \
    }                                                                                           \
    static TypedKernels Kernels() {                                                             \
      return {Apply, Progress, Finish, ToCenter, FromCenter, AllFinite};                        \
    }                                                                                           \
  };

TF_SMB_DEFINE_SET(Baseline, )

#if defined(__x86_64__)

TF_SMB_DEFINE_SET(Avx2, TF_SMB_TARGET_AVX2)

// float16 with the processor's own conversions.
struct Float16C : Float16 {
  static constexpr size_t kVector = 8;

  TF_SMB_TARGET_AVX2 static void Widen(const uint16_t* from, float* to, size_t count) {
    size_t i = 0;
    for (; i + kVector <= count; i += kVector) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
    }
    for (; i < count; ++i) to[i] = WidenOne(from[i]);
  }

  TF_SMB_TARGET_AVX2 static void Narrow(const float* from, uint16_t* to, size_t count) {
    size_t i = 0;
    for (; i + kVector <= count; i += kVector) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
    }
    for (; i < count; ++i) to[i] = NarrowOne(from[i]);
  }
};

// __builtin_cpu_supports does not know F16C in every compiler.
bool HasF16C() {
  unsigned int eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

#endif

std::vector<KernelSet> SetsOfThisMachine() {
  std::vector<KernelSet> sets;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && HasF16C()) {
    sets.push_back({"avx2", Avx2<Float32>::Kernels(), Avx2<Float64>::Kernels(),
                    Avx2<Float16C>::Kernels(), Avx2<BFloat16>::Kernels()});
  }
#endif
  sets.push_back({"baseline", Baseline<Float32>::Kernels(), Baseline<Float64>::Kernels(),
                  Baseline<Float16>::Kernels(), Baseline<BFloat16>::Kernels()});
  return sets;
}

}  // namespace
}  // namespace kernel_loops

const std::vector<KernelSet>& KernelSets() {
  static const auto* const sets = new std::vector<KernelSet>(kernel_loops::SetsOfThisMachine());
  return *sets;
}

}  // namespace tf_smb
