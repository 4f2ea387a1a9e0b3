// Ctrl-C while an op waits for other workers: Python's own handler only takes a note then,
// and looks at it when the op has come back.
#ifndef TF_SMB_CC_KERNELS_INTERRUPT_H_
#define TF_SMB_CC_KERNELS_INTERRUPT_H_

#include <cstdint>

#include "cc/common/status.h"

namespace tf_smb {

// One wait. While there are any, SIGINT is noted here, and then given to the handler that
// was there before. Where there is none (SIGINT ends the process, or is ignored), nothing is
// changed. Other signals are left alone.
//
// An interrupted op must not fail: TensorFlow makes its exception by running Python, which
// raises KeyboardInterrupt right there, and gets lost between the two. It comes back as if
// nothing had happened, and Python raises it then. One graph may have more ops that would
// wait before it returns: waits soon after an interrupted one are interrupted too.
class InterruptWatch {
 public:
  InterruptWatch() = default;
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

  // Several times a second, while waiting. ABORTED once SIGINT came; the first call begins
  // to watch for it.
  Status Poll();
  bool interrupted() const { return interrupted_; }

 private:
  bool watching_ = false;
  bool interrupted_ = false;
  uint64_t seen_ = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_KERNELS_INTERRUPT_H_
