// The control mutex of a segment, held. Private to segment*.cc.
#ifndef TF_SMB_CC_BOX_SEGMENT_LOCK_H_
#define TF_SMB_CC_BOX_SEGMENT_LOCK_H_

#include "cc/box/segment.h"
#include "cc/common/robust_mutex.h"
#include "cc/common/status.h"

namespace tf_smb {

// Nobody holds it longer than a few instructions, unless stopped or damaged.
class Segment::ControlLock {
 public:
  explicit ControlLock(const Segment* segment);
  ~ControlLock() {
    if (held()) mutex_->Unlock();
  }
  ControlLock(const ControlLock&) = delete;
  ControlLock& operator=(const ControlLock&) = delete;

  bool held() const { return Holds(outcome_); }
  // DEADLINE_EXCEEDED if a stopped process holds it, DATA_LOSS if it is no mutex.
  Status status() const;

 private:
  RobustMutex* const mutex_;
  const double timeout_s_;
  const LockOutcome outcome_;
};

inline bool IsLive(const MemberSlot& member) {
  return member.state.load() == static_cast<uint32_t>(MemberState::kLive);
}

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_LOCK_H_
