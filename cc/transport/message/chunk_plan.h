// ChunkPlan: spans cut into what lies in each chunk of the center, and where that is in a
// message.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_CHUNK_PLAN_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_CHUNK_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/box/segment_data.h"
#include "cc/wire/layout.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {

struct ChunkPart {
  WireSpan wire;
  size_t span = 0;             // of those that were cut: its number
  DType dtype = DType::kFloat32;  // of the caller's memory
  uint64_t span_first = 0;     // element of the span
  uint64_t center_offset = 0;  // bytes

  uint64_t value_bytes() const { return wire.count * ElementBytes(dtype); }
  uint64_t value_offset() const { return span_first * ElementBytes(dtype); }
  uint64_t center_bytes() const { return wire.count * ElementBytes(CenterDType(dtype)); }
  // Of the new center of a span, which is of the center's dtype.
  uint64_t moved_offset() const { return span_first * ElementBytes(CenterDType(dtype)); }
};

// The parts in one chunk; none of an empty plan.
struct ChunkParts {
  uint64_t chunk = 0;
  std::vector<ChunkPart> parts;
};

// In ascending order of chunks. The spans must have passed CheckSpans.
template <typename SpanType>
std::vector<ChunkParts> PlanChunks(const Layout& layout, const std::vector<SpanType>& spans) {
  std::vector<ChunkParts> plan;
  for (size_t i = 0; i < spans.size(); ++i) {
    const Variable& variable = layout.variables()[spans[i].variable];
    const uint64_t element_bytes = variable.element_bytes();
    for (uint64_t done = 0; done < spans[i].count;) {
      const uint64_t first = spans[i].first + done;
      const uint64_t offset = variable.offset_bytes + first * element_bytes;
      const uint64_t chunk = offset / kChunkBytes;
      const uint64_t room = ((chunk + 1) * kChunkBytes - offset) / element_bytes;
      const uint64_t count = room < spans[i].count - done ? room : spans[i].count - done;
      if (plan.empty() || plan.back().chunk != chunk) plan.push_back({chunk, {}});
      ChunkPart part;
      part.wire = {spans[i].variable, first, count, spans[i].wide};
      part.span = i;
      part.dtype = spans[i].wide ? CenterDType(variable.dtype) : variable.dtype;
      part.span_first = done;
      part.center_offset = offset;
      plan.back().parts.push_back(part);
      done += count;
    }
  }
  return plan;
}

// Where the next span begins in a payload.
inline uint64_t AlignPayload(uint64_t offset) {
  return (offset + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_CHUNK_PLAN_H_
