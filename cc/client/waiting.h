// Waiting for other members, up to a deadline, by a condition that says whom for.
#ifndef TF_SMB_CC_CLIENT_WAITING_H_
#define TF_SMB_CC_CLIENT_WAITING_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cc/box/segment_control.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"

namespace tf_smb {

struct WaitOptions {
  double timeout_s = 60.0;
  // Called several times a second, if given; an error ends the wait with it.
  std::function<Status()> poll;
  // Given a line of text after a few seconds, and then less and less often, if given.
  std::function<void(const std::string&)> announce;
};

// What is waited for, in words; none when it has come.
using Pending = std::function<Result<std::optional<std::string>>()>;

// Asks `pending` at every change of the segment. DEADLINE_EXCEEDED with its words.
Status WaitFor(const SegmentControl& control, const WaitOptions& options, const Pending& pending);

// "worker 3", "workers 1, 2"; the first eight by number.
std::string NameWorkers(const std::vector<uint32_t>& workers);

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_WAITING_H_
