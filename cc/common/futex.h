// Waiting on a 32-bit word that several processes share.
#ifndef TF_SMB_CC_COMMON_FUTEX_H_
#define TF_SMB_CC_COMMON_FUTEX_H_

#include <atomic>
#include <cstdint>

namespace tf_smb {

// Sleeps while *word == seen, at most `timeout_nanos`. May wake early.
void FutexWait(std::atomic<uint32_t>* word, uint32_t seen, int64_t timeout_nanos);
void FutexWakeAll(std::atomic<uint32_t>* word);

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_FUTEX_H_
