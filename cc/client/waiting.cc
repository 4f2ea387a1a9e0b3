#include "cc/client/waiting.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace tf_smb {
namespace {

constexpr double kQuietSeconds = 3.0;
constexpr double kMaxQuietSeconds = 60.0;
// Leases end, and interrupts come, without a change.
constexpr int64_t kSliceNanos = kNanosPerSecond / 5;
constexpr size_t kMaxNamed = 8;

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g s", seconds);
  return text;
}

}  // namespace

Status WaitFor(const SegmentControl& control, const WaitOptions& options, const Pending& pending) {
  const Deadline deadline = Deadline::After(options.timeout_s);
  double quiet_s = kQuietSeconds;
  Deadline next_word = Deadline::After(quiet_s);
  for (;;) {
    const uint32_t seen = control.changes();
    TF_SMB_ASSIGN_OR_RETURN(const std::optional<std::string> what, pending());
    if (!what.has_value()) return Status::Ok();
    if (options.poll) TF_SMB_RETURN_IF_ERROR(options.poll());
    if (deadline.Expired()) {
      return DeadlineExceededError("waited " + Seconds(options.timeout_s) + " in vain for " +
                                   *what + " [SMB-E192]");
    }
    if (options.announce && next_word.Expired()) {
      options.announce("tf_smb: waiting for " + *what);
      quiet_s = std::min(kMaxQuietSeconds, quiet_s * 3);
      next_word = Deadline::After(quiet_s);
    }
    control.WaitForChange(seen, std::min(kSliceNanos, deadline.RemainingNanos()));
  }
}

std::string NameWorkers(const std::vector<uint32_t>& workers) {
  std::string text = workers.size() == 1 ? "worker " : "workers ";
  for (size_t i = 0; i < workers.size() && i < kMaxNamed; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(workers[i]);
  }
  if (workers.size() > kMaxNamed) {
    text += " and " + std::to_string(workers.size() - kMaxNamed) + " more";
  }
  return text;
}

}  // namespace tf_smb
