// Numbers for attached segments, so that a TensorFlow op can name one in a graph.
#ifndef TF_SMB_CC_CLIENT_SEGMENT_REGISTRY_H_
#define TF_SMB_CC_CLIENT_SEGMENT_REGISTRY_H_

#include <cstdint>
#include <memory>

#include "cc/client/attached_segment.h"

namespace tf_smb {

// Numbers are never used twice in a process.
int64_t RegisterSegment(std::shared_ptr<AttachedSegment> segment);
void UnregisterSegment(int64_t handle);
// Null for a handle that is not, or no longer, registered.
std::shared_ptr<AttachedSegment> FindSegment(int64_t handle);

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_SEGMENT_REGISTRY_H_
