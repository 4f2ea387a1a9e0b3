#include "cc/common/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "cc/common/mutex.h"

namespace tf_smb {
namespace {

TEST(ThreadPoolTest, EveryThreadRunsTheBodyOnce) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (int round = 0; round < 200; ++round) {
      std::atomic<int> runs{0};
      Mutex mutex;
      std::set<std::thread::id> threads;
      pool.Run([&] {
        runs.fetch_add(1);
        MutexLock lock(&mutex);
        threads.insert(std::this_thread::get_id());
      });
      EXPECT_EQ(runs.load(), num_threads);
      EXPECT_EQ(threads.size(), static_cast<size_t>(num_threads));
      EXPECT_EQ(threads.count(std::this_thread::get_id()), 1u);
    }
  }
}

TEST(ThreadPoolTest, WorkIsSharedOut) {
  ThreadPool pool(4);
  std::vector<int> done(10'000, 0);
  std::atomic<size_t> next{0};
  pool.Run([&] {
    for (size_t i = next.fetch_add(1); i < done.size(); i = next.fetch_add(1)) ++done[i];
  });
  EXPECT_EQ(done, std::vector<int>(10'000, 1));  // and visible to the caller
}

TEST(ThreadPoolTest, AtLeastOneCore) { EXPECT_GE(AvailableCores(), 1); }

TEST(ThreadPoolTest, NoThreadsForLessThanOne) {
  ThreadPool pool(0);
  EXPECT_EQ(pool.num_threads(), 1);
}

}  // namespace
}  // namespace tf_smb
