// An attached segment, as a Python object has it.
#ifndef TF_SMB_CC_PYTHON_PY_SEGMENT_H_
#define TF_SMB_CC_PYTHON_PY_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "cc/client/attached_segment.h"

namespace tf_smb {

// With the number that graphs know it by. With the GIL held.
class PySegment {
 public:
  explicit PySegment(std::shared_ptr<AttachedSegment> segment);
  ~PySegment();
  PySegment(const PySegment&) = delete;
  PySegment& operator=(const PySegment&) = delete;

  // FAILED_PRECONDITION once detached, and in a forked child. The copy keeps it alive for a
  // call, whatever other threads do meanwhile.
  std::shared_ptr<AttachedSegment> Get() const;
  int64_t handle() const;
  // Leaves, and gives the memory up, once no other thread and no running op uses it.
  // Harmless when it is detached, and in a forked child.
  void Detach();
  // As Get, but also in a forked child, which may leave: it only forgets.
  std::shared_ptr<AttachedSegment> GetInAnyProcess() const;

 private:
  const std::string name_;
  std::shared_ptr<AttachedSegment> segment_;  // null once detached
  const int64_t handle_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_PY_SEGMENT_H_
