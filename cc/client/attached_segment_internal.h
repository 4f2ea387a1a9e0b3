// What the parts of AttachedSegment (attached_segment*.cc) share among themselves.
#ifndef TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_INTERNAL_H_
#define TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_INTERNAL_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "cc/client/attached_segment.h"

namespace tf_smb {

// What the elements of a span are made of.
inline DType DTypeOf(const Layout& layout, const ConstSpan& span) {
  const DType dtype = layout.variables()[span.variable].dtype;
  return span.wide ? CenterDType(dtype) : dtype;
}

uint64_t SizeBytes(const Layout& layout, const std::vector<ConstSpan>& spans);

struct AttachedSegment::ExchangeRecord {
  uint64_t steps = 0;
  double rate = 0.0;
  uint32_t num_live = 0;
  uint64_t moved_bytes = 0;
  uint64_t chunks_skipped = 0;
  std::optional<uint64_t> staleness;  // none: a round
  double seconds = 0.0;
  double waiting_s = 0.0;
};

struct AttachedSegment::RoundWork {
  RoundWork(const std::vector<ConstSpan>& local, const std::vector<void*>& out,
            const WaitOptions& options)
      : local(local), out(out), options(options) {}

  const std::vector<ConstSpan>& local;
  const std::vector<void*>& out;
  const WaitOptions& options;
  MemberId member;
  uint32_t worker_index = 0;
  double weight = 1.0;
  Progress progress;
  bool ends_phase = false;
  // By a schedule: the phase that it is a round of.
  std::optional<uint64_t> phase;
  bool first_of_phase = false;  // for this worker

  RoundResult result;  // its round is 0 until this worker is in one
  std::optional<Deadline> deadline;  // of turn and closing together
  Status polled;       // what ended a wait from outside
  int64_t start_nanos = MonotonicNanos();
  double waiting_s = 0.0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_INTERNAL_H_
