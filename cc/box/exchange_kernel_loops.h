// The loops of exchange_kernel.h, once for every dtype: templates that each instruction
// set of exchange_kernel_set.cc compiles for itself. For that file only.
//
// Everything is inlined into the function that has the instruction set, and masks take
// the place of branches: so every compiler vectorises every loop.
#ifndef TF_SMB_CC_BOX_EXCHANGE_KERNEL_LOOPS_H_
#define TF_SMB_CC_BOX_EXCHANGE_KERNEL_LOOPS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cc/box/exchange_kernel.h"
#include "cc/box/exchange_kernel_values.h"
#include "cc/box/stream_copy.h"

// `out` may be `x` or the center, element for element, which a compiler cannot know:
// tell it that no iteration depends on another.
#if defined(__clang__)
#define TF_SMB_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define TF_SMB_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace tf_smb::kernel_loops {

// The new values of one element.
template <typename C>
struct Step {
  C center, value, delta;
};

template <MoveKind kKind, typename C>
TF_SMB_INLINE Step<C> StepOf(const C& rate, const C& x, const C& g, const C& l) {
  if constexpr (kKind == MoveKind::kElastic) {
    const C moved = rate * (x - g);
    return {g + moved, x - moved, moved};
  } else {
    const C moved = g + rate * (x - l);
    return {moved, moved, x - moved};
  }
}

// The loops of the worker's type W (exchange_kernel_values.h).
template <typename W>
class Loops {
 public:
  using Value = typename W::Value;
  using Center = typename W::Center;
  using Mask = typename W::Mask;

  // kElastic and kDelta.
  template <MoveKind kKind>
  TF_SMB_INLINE static bool Exchange(const Move& move, const Value* x, Center* center,
                                     Center* last, Value* out, size_t count) {
    const auto rate = static_cast<Center>(move.rate);
    if (move.output == MoveOutput::kValue) {
      return Blocks<kKind, MoveOutput::kValue>(rate, x, center, last, out, count);
    }
    if constexpr (W::kExact) {  // the others compute more than they write: no gain
      if (move.stream && CanStream(out)) {
        return Streamed<kKind>(rate, x, center, last, out, count);
      }
    }
    return Blocks<kKind, MoveOutput::kDelta>(rate, x, center, last, out, count);
  }

  template <MoveKind kKind>
  TF_SMB_INLINE static bool Combine(double rate, const Value* x, const Center* center, Center* out,
                                    size_t count) {
    const auto center_rate = static_cast<Center>(rate);
    if constexpr (W::kExact) {
      return CombineBlock<kKind>(center_rate, x, center, out, count);
    } else {
      bool all_finite = true;
      Center wide[kBlock];
      for (size_t i = 0, n = 0; i < count; i += n) {
        n = std::min(kBlock, count - i);
        W::Widen(x + i, wide, n);
        all_finite &= CombineBlock<kKind>(center_rate, wide, center + i, out + i, n);
      }
      return all_finite;
    }
  }

  TF_SMB_INLINE static void Progress(const Value* x, const Center* last, Center* progress,
                                     size_t count) {
    Center buffer[kBlock];
    for (size_t i = 0, n = 0; i < count; i += n) {
      n = std::min(kBlock, count - i);
      const Center* const wide = Wide(x + i, buffer, n);
      TF_SMB_INDEPENDENT_ITERATIONS
      for (size_t k = 0; k < n; ++k) progress[i + k] = wide[k] - last[i + k];
    }
  }

  TF_SMB_INLINE static void Finish(MoveOutput output, const Value* x, const Center* moved,
                                   Center* last, Value* out, size_t count) {
    for (size_t i = 0, n = 0; i < count; i += n) {
      n = std::min(kBlock, count - i);
      if (output == MoveOutput::kValue) {
        FinishBlock<MoveOutput::kValue>(x + i, moved + i, last + i, out + i, n);
      } else {
        FinishBlock<MoveOutput::kDelta>(x + i, moved + i, last + i, out + i, n);
      }
    }
  }

  // Also to `last` unless it is null. Looks for NaN and Inf block by block, while those are
  // in the L1 cache, and ends at the first one that has some: false.
  TF_SMB_INLINE static bool CopyFinite(bool stream, const Value* x, Center* center, Center* last,
                                       size_t count) {
    const bool streamed = stream && CanStream(center);
    for (size_t i = 0, n = 0; i < count; i += n) {
      n = std::min(kCopyBlock, count - i);
      if (!AllFinite(x + i, n)) return false;
      Copy(streamed, x + i, center + i, last == nullptr ? nullptr : last + i, n);
    }
    if (streamed) StreamFence();
    return true;
  }

  TF_SMB_INLINE static void Copy(bool streamed, const Value* x, Center* center, Center* last,
                                 size_t count) {
    Center buffer[kBlock];
    for (size_t i = 0, n = 0; i < count; i += n) {
      n = W::kExact ? count : std::min(kBlock, count - i);  // nothing to convert: in one piece
      const Center* const wide = Wide(x + i, buffer, n);
      if (streamed) {
        StreamBytes(wide, center + i, n * sizeof(Center));
      } else {
        std::memcpy(center + i, wide, n * sizeof(Center));
      }
      if (last != nullptr) std::memcpy(last + i, wide, n * sizeof(Center));
    }
  }

  // Four places at once in what is larger than the cache: more reads are under way where
  // the pages are small, and no fewer elsewhere. Prefetching was slower.
  TF_SMB_INLINE static bool AllFinite(const Value* values, size_t count) {
    constexpr size_t kPart = (size_t{2} << 20) / sizeof(Value);
    for (; count >= 4 * kPart; count -= 4 * kPart, values += 4 * kPart) {
      Bits found = 0;
      for (size_t i = 0; i < kPart; ++i) {
        found |= static_cast<Bits>(TopBit(values[i]) | TopBit(values[i + kPart]) |
                                   TopBit(values[i + 2 * kPart]) | TopBit(values[i + 3 * kPart]));
      }
      if ((found & kTopBit) != 0) return false;
    }
    Bits found = 0;
    for (size_t i = 0; i < count; ++i) found |= TopBit(values[i]);
    return (found & kTopBit) == 0;
  }

 private:
  using Bits = typename W::Bits;

  // What a loop with arrays of its own works on at a time. They stay in the L1 cache, and a
  // whole page of 4 KiB must not lie between two of them: those slow each other down.
  static constexpr size_t kBlock = W::kExact ? 2048 / sizeof(Value) : 256;

  static constexpr size_t kCopyBlock = kCopyBlockBytes / sizeof(Value);

  static constexpr Bits kTopBit = static_cast<Bits>(~(static_cast<Bits>(~Bits{0}) >> 1));

  // Its top bit is set for a NaN or an infinity, whose exponents alone carry over.
  TF_SMB_INLINE static Bits TopBit(Value value) {
    return static_cast<Bits>((BitsOf(value) & W::kExponent) + (W::kExponent & -W::kExponent));
  }

  // x in the center's type: itself, or converted into `buffer`.
  TF_SMB_INLINE static const Center* Wide(const Value* x, Center* buffer, size_t count) {
    if constexpr (W::kExact) {
      return x;
    } else {
      W::Widen(x, buffer, count);
      return buffer;
    }
  }

  template <MoveKind kKind, MoveOutput kOutput>
  TF_SMB_INLINE static bool Blocks(Center rate, const Value* x, Center* center, Center* last,
                                   Value* out, size_t count) {
    if constexpr (W::kExact) {
      return ExactBlock<kKind, kOutput>(rate, x, center, last, out, count);
    } else {
      bool all_finite = true;
      for (size_t i = 0, n = 0; i < count; i += n) {
        n = std::min(kBlock, count - i);
        Center* const block_last = kKind == MoveKind::kDelta ? last + i : nullptr;
        all_finite &=
            RoundedBlock<kKind, kOutput>(rate, x + i, center + i, block_last, out + i, n);
      }
      return all_finite;
    }
  }

  template <MoveKind kKind>
  TF_SMB_INLINE static bool Streamed(Center rate, const Value* x, Center* center, Center* last,
                                     Value* out, size_t count) {
    bool all_finite = true;
    alignas(16) Value block[kBlock];
    for (size_t i = 0, n = 0; i < count; i += n) {
      n = std::min(kBlock, count - i);
      Center* const block_last = kKind == MoveKind::kDelta ? last + i : nullptr;
      all_finite &=
          ExactBlock<kKind, MoveOutput::kDelta>(rate, x + i, center + i, block_last, block, n);
      StreamBytes(block, out + i, n * sizeof(Value));
    }
    StreamFence();
    return all_finite;
  }

  // The worker's type is the center's: one loop. An element whose new center would not be
  // finite stays as it is, on both sides: in the same pass, since a pass of its own would
  // cost a third of the exchange.
  template <MoveKind kKind, MoveOutput kOutput>
  TF_SMB_INLINE static bool ExactBlock(Center rate, const Center* x, Center* center, Center* last,
                                       Center* out, size_t count) {
    using V = Vector<Center>;
    constexpr size_t kLanes = sizeof(V) / sizeof(Center);
    const V rates = V{} + rate;
    MaskOf<V> found = {};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Center* const lane_last = kKind == MoveKind::kDelta ? last + i : nullptr;
      found |= ExactStep<kKind, kOutput>(rates, x + i, center + i, lane_last, out + i);
    }
    Mask any = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) any |= static_cast<Mask>(found[lane]);
    for (; i < count; ++i) {
      Center* const lane_last = kKind == MoveKind::kDelta ? last + i : nullptr;
      any |= ExactStep<kKind, kOutput>(rate, x + i, center + i, lane_last, out + i);
    }
    return any == 0;
  }

  // Of one element or of a vector of them: which were not moved.
  template <MoveKind kKind, MoveOutput kOutput, typename V>
  TF_SMB_INLINE static MaskOf<V> ExactStep(const V& rate, const Center* x, Center* center,
                                           Center* last, Center* out) {
    const V value = Load<V>(x), g = Load<V>(center);
    V l = {};
    if constexpr (kKind == MoveKind::kDelta) l = Load<V>(last);
    const Step<V> step = StepOf<kKind>(rate, value, g, l);
    const MaskOf<V> bad = NotFinite(step.center);
    Store(Select(bad, g, step.center), center);
    if constexpr (kKind == MoveKind::kDelta) Store(Select(bad, l, step.center), last);
    if constexpr (kOutput == MoveOutput::kDelta) {
      Store(Select(bad, V{}, step.delta), out);
    } else {
      Store(Select(bad, value, step.value), out);
    }
    return bad;
  }

  // The worker's type is narrower. An element that would overflow it stays as it is too.
  template <MoveKind kKind, MoveOutput kOutput>
  TF_SMB_INLINE static bool RoundedBlock(Center rate, const Value* x, Center* center, Center* last,
                                         Value* out, size_t count) {
    Center wide[kBlock], moved[kBlock], held[kBlock];
    Value rounded[kBlock];
    W::Widen(x, wide, count);
    TF_SMB_INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; ++i) {
      Center l = 0;
      if constexpr (kKind == MoveKind::kDelta) l = last[i];
      const Step<Center> step = StepOf<kKind>(rate, wide[i], center[i], l);
      moved[i] = step.center;
      held[i] = kOutput == MoveOutput::kDelta ? step.delta : step.value;
    }
    Round<kOutput, kKind == MoveKind::kDelta>(wide, held, rounded, count);
    Mask found = 0;
    TF_SMB_INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; ++i) {
      const Mask bad = NotFinite(moved[i]) | W::Overflows(held[i]);
      center[i] = Select(bad, center[i], moved[i]);
      if constexpr (kKind == MoveKind::kDelta) last[i] = Select(bad, last[i], held[i]);
      out[i] = Unless<kOutput>(bad, x[i], rounded[i]);
      found |= bad;
    }
    return found == 0;
  }

  // `held`, the output before it is rounded to `rounded`, becomes what the worker then has:
  // rounded only if kRoundHeld, but it overflows either way.
  template <MoveOutput kOutput, bool kRoundHeld>
  TF_SMB_INLINE static void Round(const Center* wide, Center* held, Value* rounded, size_t count) {
    W::Narrow(held, rounded, count);
    if constexpr (kOutput == MoveOutput::kValue) {
      if constexpr (kRoundHeld) W::Widen(rounded, held, count);
    } else {
      W::Widen(rounded, held, count);
      for (size_t i = 0; i < count; ++i) held[i] = wide[i] - held[i];
      if constexpr (kRoundHeld) {
        Value narrow[kBlock];
        W::Narrow(held, narrow, count);
        W::Widen(narrow, held, count);
      }
    }
  }

  // The output `rounded`; of a bad element the one that leaves the worker as it is.
  template <MoveOutput kOutput>
  TF_SMB_INLINE static Value Unless(Mask bad, Value x, Value rounded) {
    const Value unmoved = kOutput == MoveOutput::kDelta ? Value{0} : x;
    return Select(static_cast<Bits>(bad), unmoved, rounded);
  }

  template <MoveKind kKind>
  TF_SMB_INLINE static bool CombineBlock(Center rate, const Center* x, const Center* center,
                                         Center* out, size_t count) {
    Mask found = 0;
    TF_SMB_INDEPENDENT_ITERATIONS
    for (size_t i = 0; i < count; ++i) {
      const Center g = center[i];
      const Center combined = g + rate * (kKind == MoveKind::kBlend ? x[i] - g : x[i]);
      const Mask bad = NotFinite(combined);
      out[i] = Select(bad, g, combined);
      found |= bad;
    }
    return found == 0;
  }

  // An element whose progress was not finite was not added: it stays as it is. One that
  // the worker cannot hold was: its progress must not be sent again.
  template <MoveOutput kOutput>
  TF_SMB_INLINE static void FinishBlock(const Value* x, const Center* moved, Center* last,
                                        Value* out, size_t count) {
    if constexpr (W::kExact) {
      TF_SMB_INDEPENDENT_ITERATIONS
      for (size_t i = 0; i < count; ++i) {
        const Mask bad = NotFinite(x[i] - last[i]) | NotFinite(moved[i]);
        last[i] = Select(bad, last[i], moved[i]);
        out[i] = Unless<kOutput>(bad, x[i],
                                 kOutput == MoveOutput::kDelta ? x[i] - moved[i] : moved[i]);
      }
    } else {
      Center wide[kBlock], held[kBlock];
      Value rounded[kBlock];
      W::Widen(x, wide, count);
      TF_SMB_INDEPENDENT_ITERATIONS
      for (size_t i = 0; i < count; ++i) {
        held[i] = kOutput == MoveOutput::kDelta ? wide[i] - moved[i] : moved[i];
      }
      Round<kOutput, true>(wide, held, rounded, count);
      TF_SMB_INDEPENDENT_ITERATIONS
      for (size_t i = 0; i < count; ++i) {
        const Mask bad = NotFinite(wide[i] - last[i]) | NotFinite(moved[i]);
        const Mask overflow = W::Overflows(held[i]);
        last[i] = Select(bad, last[i], Select(overflow, wide[i], held[i]));
        out[i] = Unless<kOutput>(bad | overflow, x[i], rounded[i]);
      }
    }
  }
};

}  // namespace tf_smb::kernel_loops

#endif  // TF_SMB_CC_BOX_EXCHANGE_KERNEL_LOOPS_H_
