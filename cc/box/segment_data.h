// Reading, writing and updating the center of a segment that is mapped in this process:
// what a worker does itself over shared memory, and a server for those who send messages.
//
// Chunk by chunk, each under its own lock: a chunk is always read, written and updated as
// a whole, a segment is not.
#ifndef TF_SMB_CC_BOX_SEGMENT_DATA_H_
#define TF_SMB_CC_BOX_SEGMENT_DATA_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "cc/box/exchange_kernel.h"
#include "cc/box/segment.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/common/thread_pool.h"

namespace tf_smb {

// Elements `first` to `first + count` of one variable, and the caller's memory for them,
// in the variable's own dtype, or, if `wide`, in the center's.
template <typename Pointer>
struct BasicSpan {
  uint32_t variable = 0;
  uint64_t first = 0;
  uint64_t count = 0;
  Pointer data = nullptr;  // may be null if count is 0
  bool wide = false;
};
using Span = BasicSpan<void*>;
using ConstSpan = BasicSpan<const void*>;

// INVALID_ARGUMENT unless the spans lie within their variables, at most one of a
// variable, in the layout's order.
Status CheckSpans(const Layout& layout, const std::vector<Span>& spans);
Status CheckSpans(const Layout& layout, const std::vector<ConstSpan>& spans);

// A worker's part in a round: chunks of an earlier round take its values, those that
// others came to first the weighted mean.
struct RoundShare {
  uint64_t round = 0;
  double weight = 1.0;  // above 0
};

struct UpdateRequest {
  // kElastic, kDelta and kCopy act in place. kAccumulate and a round are all or nothing
  // for each chunk, also if the process dies in the middle.
  Move move;
  std::vector<ConstSpan> local;
  // For each of `local`: see MoveOutput; of kAccumulate and rounds the new center, in its
  // dtype, and nothing of a chunk that was skipped. Empty where nothing is wanted (kCopy,
  // kAccumulate, rounds).
  std::vector<void*> out;
  void* last = nullptr;             // kDelta: packed like the center; see ApplyMove
  std::optional<RoundShare> round;  // instead of `move`
  uint64_t first_chunk = 0;         // where to start: differs between workers
  // A busy chunk is put off to the end of the pass, then waited for so long, then skipped.
  double busy_chunk_timeout_s = 5.0;
  bool advance_version = true;  // false for all parts of one update but the last
};

struct UpdateReport {
  uint64_t chunks_moved = 0;
  // Locked by somebody else until the deadline. Their part of `out` says that
  // nothing moved, and nothing of the worker's progress in them is lost.
  uint64_t chunks_skipped = 0;
  uint64_t version_before = 0;
  uint64_t version_after = 0;
  // A NaN or Inf in this variable: it did not reach the center, and the update was
  // broken off soon after.
  std::optional<uint32_t> non_finite_variable;
};

// The center into the spans. DEADLINE_EXCEEDED naming the chunk that stayed locked.
Status ReadCenter(Segment* segment, const std::vector<Span>& spans, const Deadline& deadline,
                  ThreadPool* pool);
// The spans into the center. `advance_version`: see UpdateRequest.
Status WriteCenter(Segment* segment, const std::vector<ConstSpan>& spans,
                   const Deadline& deadline, ThreadPool* pool, bool advance_version = true);
// `pool` may be null: then one thread. INVALID_ARGUMENT for a variable that is not
// averaged, or a request that is none; FAILED_PRECONDITION for a round that is closed.
Result<UpdateReport> UpdateCenter(Segment* segment, const UpdateRequest& request,
                                  ThreadPool* pool);
// target += scale * source, element by element, of two segments of one layout, which may
// be the same. Each chunk of the source is taken as of one moment.
Status Axpy(Segment* target, double scale, Segment* source, const Deadline& deadline);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_DATA_H_
