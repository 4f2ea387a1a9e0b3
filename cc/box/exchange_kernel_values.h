// The dtypes of the exchange's loops: their bits and their conversions, one element at a
// time, in operations that compilers vectorise. For exchange_kernel_set.cc only.
#ifndef TF_SMB_CC_BOX_EXCHANGE_KERNEL_VALUES_H_
#define TF_SMB_CC_BOX_EXCHANGE_KERNEL_VALUES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/box/stream_copy.h"

// Vectors are passed to functions that are always inlined: there is no call to disagree on.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace tf_smb::kernel_loops {

template <typename To, typename From>
TF_SMB_INLINE To BitCast(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TF_SMB_INLINE uint32_t BitsOf(float value) { return BitCast<uint32_t>(value); }
TF_SMB_INLINE uint64_t BitsOf(double value) { return BitCast<uint64_t>(value); }
TF_SMB_INLINE uint16_t BitsOf(uint16_t value) { return value; }
TF_SMB_INLINE uint32_t BitsOf(uint32_t value) { return value; }

// All ones for a NaN or an infinity, whose exponents alone carry over into the sign bit;
// else 0.
TF_SMB_INLINE uint32_t NotFinite(float value) {
  return 0u - (((BitsOf(value) & 0x7f800000u) + 0x00800000u) >> 31);
}
TF_SMB_INLINE uint64_t NotFinite(double value) {
  return uint64_t{0} - (((BitsOf(value) & 0x7ff0000000000000u) + 0x0010000000000000u) >> 63);
}

// `where_set` under the ones of `mask`, `elsewhere` under its zeros.
template <typename Mask, typename T>
TF_SMB_INLINE T Select(Mask mask, T where_set, T elsewhere) {
  return BitCast<T>(
      static_cast<Mask>((BitsOf(where_set) & mask) | (BitsOf(elsewhere) & ~mask)));
}

// Several elements at once, by GCC's and clang's own extension: comparisons give masks, and
// ?: takes from either side, in one instruction where the processor has it. Compilers make
// twice as many of masks of single elements.
template <typename T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(32)));
};
template <typename T>
using Vector = typename VectorOf<T>::Type;

// What NotFinite gives for a T, an element or a vector.
template <typename T>
struct MaskOfType {
  using Type = decltype(T{} == T{});
};
template <>
struct MaskOfType<float> {
  using Type = uint32_t;
};
template <>
struct MaskOfType<double> {
  using Type = uint64_t;
};
template <typename T>
using MaskOf = typename MaskOfType<T>::Type;

TF_SMB_INLINE MaskOf<Vector<float>> NotFinite(const Vector<float>& value) {
  return (BitCast<MaskOf<Vector<float>>>(value) & 0x7f800000) == 0x7f800000;
}
TF_SMB_INLINE MaskOf<Vector<double>> NotFinite(const Vector<double>& value) {
  return (BitCast<MaskOf<Vector<double>>>(value) & 0x7ff0000000000000) == 0x7ff0000000000000;
}
// Of bits, not of numbers: a NaN comes through as it is.
template <typename T>
TF_SMB_INLINE Vector<T> SelectLanes(const MaskOf<Vector<T>>& mask, const Vector<T>& where_set,
                                    const Vector<T>& elsewhere) {
  using Bits = MaskOf<Vector<T>>;
  const Bits set = BitCast<Bits>(where_set), other = BitCast<Bits>(elsewhere);
#if defined(__clang__)
  // It would move ?: into the operation that made `elsewhere`, and that quiets a NaN.
  return BitCast<Vector<T>>(other ^ ((set ^ other) & mask));
#else
  return BitCast<Vector<T>>(mask ? set : other);
#endif
}
TF_SMB_INLINE Vector<float> Select(const MaskOf<Vector<float>>& mask,
                                   const Vector<float>& where_set,
                                   const Vector<float>& elsewhere) {
  return SelectLanes<float>(mask, where_set, elsewhere);
}
TF_SMB_INLINE Vector<double> Select(const MaskOf<Vector<double>>& mask,
                                    const Vector<double>& where_set,
                                    const Vector<double>& elsewhere) {
  return SelectLanes<double>(mask, where_set, elsewhere);
}

// Of elements that need not be aligned as a vector is.
template <typename V, typename T>
TF_SMB_INLINE V Load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <typename V, typename T>
TF_SMB_INLINE void Store(const V& value, T* to) {
  std::memcpy(to, &value, sizeof(value));
}

// All ones if value < limit, both below 2^31; else 0.
TF_SMB_INLINE uint32_t Below(uint32_t value, uint32_t limit) {
  return 0u - ((value - limit) >> 31);
}

constexpr uint32_t kInfinity = 0x7f800000u;
TF_SMB_INLINE uint32_t MagnitudeOf(float value) { return BitsOf(value) & 0x7fffffffu; }

// A type W for the worker's elements:
//   Value, Bits: what its arrays are made of, and its bits
//   Center, Mask: the type of the center, and the masks of that
//   kExponent: the exponent's bits
//   kExact: Value is Center; else Widen and Narrow convert arrays, and Overflows gives the
//   mask of what Narrow makes infinite or a NaN
struct Float32 {
  using Value = float;
  using Bits = uint32_t;
  using Center = float;
  using Mask = uint32_t;
  static constexpr Bits kExponent = 0x7f800000u;
  static constexpr bool kExact = true;
};

struct Float64 {
  using Value = double;
  using Bits = uint64_t;
  using Center = double;
  using Mask = uint64_t;
  static constexpr Bits kExponent = 0x7ff0000000000000u;
  static constexpr bool kExact = true;
};

struct BFloat16 {
  using Value = uint16_t;
  using Bits = uint16_t;
  using Center = float;
  using Mask = uint32_t;
  static constexpr Bits kExponent = 0x7f80u;
  static constexpr bool kExact = false;

  // Halfway from its largest number to 2^128.
  TF_SMB_INLINE static uint32_t Overflows(float value) {
    return ~Below(MagnitudeOf(value), 0x7f7f8000u);
  }

  TF_SMB_INLINE static void Widen(const uint16_t* from, float* to, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = BitCast<float>(uint32_t{from[i]} << 16);
  }

  TF_SMB_INLINE static void Narrow(const float* from, uint16_t* to, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bits = BitsOf(from[i]);
      const uint32_t to_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      const uint32_t nan = (bits >> 16) | 0x0040u;  // rounding would lose it
      const uint32_t is_nan = Below(kInfinity, MagnitudeOf(from[i]));
      to[i] = static_cast<uint16_t>(Select(is_nan, nan, to_even));
    }
  }
};

// No denormal float32 is an operand or a result where it matters: right in threads that
// flush those to zero, as TensorFlow's do.
struct Float16 {
  using Value = uint16_t;
  using Bits = uint16_t;
  using Center = float;
  using Mask = uint32_t;
  static constexpr Bits kExponent = 0x7c00u;
  static constexpr bool kExact = false;

  // 65520, halfway from its largest number to 2^16.
  TF_SMB_INLINE static uint32_t Overflows(float value) {
    return ~Below(MagnitudeOf(value), 0x477ff000u);
  }

  TF_SMB_INLINE static void Widen(const uint16_t* from, float* to, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = WidenOne(from[i]);
  }

  TF_SMB_INLINE static void Narrow(const float* from, uint16_t* to, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = NarrowOne(from[i]);
  }

  TF_SMB_INLINE static float WidenOne(uint16_t half) {
    constexpr uint32_t kInfinite = 0x7c00u << 13, kLowestNormal = 1u << 23;
    const uint32_t sign = (half & 0x8000u) << 16, magnitude = (half & 0x7fffu) << 13;
    // A denormal is the fraction of the lowest normal one.
    const uint32_t lowest = kLowestNormal + kRebias;
    const uint32_t denormal = BitsOf(BitCast<float>(magnitude + lowest) - BitCast<float>(lowest));
    const uint32_t quiet = Below(kInfinite, magnitude) & 0x00400000u;
    const uint32_t special = (magnitude + 2 * kRebias) | quiet;
    uint32_t bits = Select(Below(magnitude, kLowestNormal), denormal, magnitude + kRebias);
    bits = Select(Below(magnitude, kInfinite), bits, special);
    return BitCast<float>(bits | sign);
  }

  TF_SMB_INLINE static uint16_t NarrowOne(float value) {
    constexpr uint32_t kLowestNormal = 0x38800000u, kAboveRange = 0x47800000u;  // 2^-14, 2^16
    const uint32_t sign = (BitsOf(value) >> 16) & 0x8000u, magnitude = MagnitudeOf(value);
    // The last bit of 0.5 is worth as much as that of a denormal: the addition rounds.
    const uint32_t denormal = BitsOf(BitCast<float>(magnitude) + 0.5f) - BitsOf(0.5f);
    const uint32_t normal = (magnitude - kRebias + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
    uint32_t bits = Select(Below(magnitude, kLowestNormal), denormal, normal);
    bits = Select(Below(magnitude, kAboveRange), bits, 0x7c00u);
    bits = Select(Below(kInfinity, magnitude), nan, bits);
    return static_cast<uint16_t>(bits | sign);
  }

 private:
  static constexpr uint32_t kRebias = (127u - 15u) << 23;  // from its exponents to float's
};

}  // namespace tf_smb::kernel_loops

#endif  // TF_SMB_CC_BOX_EXCHANGE_KERNEL_VALUES_H_
