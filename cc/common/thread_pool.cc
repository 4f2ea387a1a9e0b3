#include "cc/common/thread_pool.h"

#include <sched.h>

#include <algorithm>

namespace tf_smb {

int AvailableCores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return std::max(1, CPU_COUNT(&allowed));
}

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) {
    threads_.emplace_back([this] { HelperLoop(); });
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Run(const std::function<void()>& body) {
  if (threads_.empty()) {
    body();
    return;
  }
  {
    MutexLock lock(&mutex_);
    body_ = &body;
    helpers_left_ = static_cast<int>(threads_.size());
    ++round_;
  }
  changed_.NotifyAll();
  body();
  MutexLock lock(&mutex_);
  while (helpers_left_ > 0) changed_.Wait(&mutex_);
  body_ = nullptr;
}

void ThreadPool::HelperLoop() {
  uint64_t done_round = 0;
  for (;;) {
    const std::function<void()>* body = nullptr;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && round_ == done_round) changed_.Wait(&mutex_);
      if (stopping_) return;
      done_round = round_;
      body = body_;
    }
    (*body)();
    {
      MutexLock lock(&mutex_);
      --helpers_left_;
    }
    changed_.NotifyAll();
  }
}

}  // namespace tf_smb
