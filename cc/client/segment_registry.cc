#include "cc/client/segment_registry.h"

#include <map>
#include <utility>

#include "cc/common/mutex.h"

namespace tf_smb {
namespace {

struct Registry {
  Mutex mutex;
  int64_t next GUARDED_BY(mutex) = 1;
  std::map<int64_t, std::shared_ptr<AttachedSegment>> segments GUARDED_BY(mutex);
};

// Never destroyed: ops may run while the process exits.
Registry& GlobalRegistry() {
  static Registry* const registry = new Registry();
  return *registry;
}

}  // namespace

int64_t RegisterSegment(std::shared_ptr<AttachedSegment> segment) {
  Registry& registry = GlobalRegistry();
  MutexLock lock(&registry.mutex);
  const int64_t handle = registry.next++;
  registry.segments[handle] = std::move(segment);
  return handle;
}

void UnregisterSegment(int64_t handle) {
  Registry& registry = GlobalRegistry();
  MutexLock lock(&registry.mutex);
  registry.segments.erase(handle);
}

std::shared_ptr<AttachedSegment> FindSegment(int64_t handle) {
  Registry& registry = GlobalRegistry();
  MutexLock lock(&registry.mutex);
  const auto found = registry.segments.find(handle);
  return found == registry.segments.end() ? nullptr : found->second;
}

}  // namespace tf_smb
