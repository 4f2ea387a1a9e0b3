#include "cc/python/py_segment.h"

#include <utility>

#include "cc/client/segment_registry.h"
#include "cc/python/exceptions.h"

namespace tf_smb {

PySegment::PySegment(std::shared_ptr<AttachedSegment> segment)
    : name_(segment->control()->name()),
      segment_(std::move(segment)),
      handle_(RegisterSegment(segment_)) {}

PySegment::~PySegment() { Detach(); }

std::shared_ptr<AttachedSegment> PySegment::GetInAnyProcess() const {
  if (segment_ == nullptr) {
    ThrowIfError(FailedPreconditionError("segment '" + name_ + "' is detached [SMB-E259]"));
  }
  return segment_;
}

std::shared_ptr<AttachedSegment> PySegment::Get() const {
  std::shared_ptr<AttachedSegment> segment = GetInAnyProcess();
  ThrowIfError(segment->CheckProcess());
  return segment;
}

int64_t PySegment::handle() const {
  static_cast<void>(GetInAnyProcess());
  return handle_;
}

void PySegment::Detach() {
  std::shared_ptr<AttachedSegment> segment = std::move(segment_);
  segment_.reset();
  if (segment == nullptr) return;
  WithoutGil([&] {
    UnregisterSegment(handle_);
    segment->Leave();
    segment.reset();
  });
}

}  // namespace tf_smb
