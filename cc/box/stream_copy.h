// Copying past the cache: the lines that are written are not read first. For what is
// larger than the cache and is not read again soon.
#ifndef TF_SMB_CC_BOX_STREAM_COPY_H_
#define TF_SMB_CC_BOX_STREAM_COPY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

// Into a function of any instruction set, which what is inlined is compiled for.
#define TF_SMB_INLINE inline __attribute__((always_inline))

namespace tf_smb {

// From here on, what an operation only writes goes past the cache: there it would push
// out what is read, and nobody finds it there later either.
constexpr uint64_t kStreamBytes = 24 << 20;

#if defined(__SSE2__)

TF_SMB_INLINE bool CanStream(const void* destination) {
  return reinterpret_cast<uintptr_t>(destination) % sizeof(__m128i) == 0;
}

// To a destination that CanStream. 128 bits are as fast as 256.
TF_SMB_INLINE void StreamBytes(const void* from, void* to, size_t bytes) {
  const auto* source = static_cast<const __m128i*>(from);
  auto* destination = static_cast<__m128i*>(to);
  const size_t vectors = bytes / sizeof(__m128i);
  for (size_t i = 0; i < vectors; ++i) {
    _mm_stream_si128(destination + i, _mm_loadu_si128(source + i));
  }
  std::memcpy(destination + vectors, source + vectors, bytes % sizeof(__m128i));
}

// Before the chunk's lock is given up.
TF_SMB_INLINE void StreamFence() { _mm_sfence(); }

#else

TF_SMB_INLINE bool CanStream(const void*) { return false; }
TF_SMB_INLINE void StreamBytes(const void* from, void* to, size_t bytes) {
  std::memcpy(to, from, bytes);
}
TF_SMB_INLINE void StreamFence() {}

#endif

// memcpy past the cache, to any destination.
void StreamCopy(void* to, const void* from, size_t size_bytes);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_STREAM_COPY_H_
