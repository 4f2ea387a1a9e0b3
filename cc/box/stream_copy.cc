#include "cc/box/stream_copy.h"

#include <algorithm>

namespace tf_smb {

void StreamCopy(void* to, const void* from, size_t size_bytes) {
  constexpr size_t kLine = 64;
  if (size_bytes == 0) return;
  const size_t beyond = reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t head = std::min(size_bytes, beyond == 0 ? 0 : kLine - beyond);
  std::memcpy(to, from, head);
  StreamBytes(static_cast<const char*>(from) + head, static_cast<char*>(to) + head,
              size_bytes - head);
  StreamFence();
}

}  // namespace tf_smb
