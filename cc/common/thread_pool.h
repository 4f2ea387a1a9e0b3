// A few threads that help the calling thread with a loop.
#ifndef TF_SMB_CC_COMMON_THREAD_POOL_H_
#define TF_SMB_CC_COMMON_THREAD_POOL_H_

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "cc/common/mutex.h"

namespace tf_smb {

// Cores that this process may run on (its affinity mask), at least 1.
int AvailableCores();

class ThreadPool {
 public:
  // `num_threads` in total, the caller included: 1 starts none.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs body() on every thread, the caller's included, and returns when all are
  // done. The body takes its own share of the work, for example from an atomic
  // counter. One Run at a time.
  void Run(const std::function<void()>& body) EXCLUDES(mutex_);

 private:
  void HelperLoop() EXCLUDES(mutex_);

  Mutex mutex_;
  CondVar changed_;
  const std::function<void()>* body_ GUARDED_BY(mutex_) = nullptr;
  uint64_t round_ GUARDED_BY(mutex_) = 0;
  int helpers_left_ GUARDED_BY(mutex_) = 0;
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // constant after construction
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_THREAD_POOL_H_
