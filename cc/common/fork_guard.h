// Mappings, locks and threads do not survive fork(): a child that used them would
// hang or corrupt its parent's segment. Objects remember the process that made
// them and refuse in a child.
#ifndef TF_SMB_CC_COMMON_FORK_GUARD_H_
#define TF_SMB_CC_COMMON_FORK_GUARD_H_

#include <cstdint>

#include "cc/common/status.h"

namespace tf_smb {

class ForkGuard {
 public:
  ForkGuard();
  // FAILED_PRECONDITION in a forked child; costs one load.
  Status Check() const;
  bool InForkedChild() const;

 private:
  uint64_t generation_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_FORK_GUARD_H_
