// AttachedSegment: a segment as a worker uses it: joined under a lease that a
// thread of its own renews, exchanged with by rule.
#ifndef TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_H_
#define TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cc/client/exchange_rule.h"
#include "cc/common/clock.h"
#include "cc/common/fork_guard.h"
#include "cc/common/memory_mapping.h"
#include "cc/common/mutex.h"
#include "cc/common/status.h"
#include "cc/common/thread_pool.h"
#include "cc/transport/transport.h"

namespace tf_smb {

// Never renumber: the op returns these.
enum class ExchangeOutcome : int {
  kMoved = 0,      // both sides moved: `out` holds the result
  kUnchanged = 1,  // the center took this worker's weights; `out` was not written
  kSkipped = 2,    // nothing happened (fenced, joining again); `out` was not written
};

struct ExchangeStats {
  uint64_t exchanges = 0;
  uint64_t skipped_exchanges = 0;
  uint64_t skipped_chunks = 0;
  uint64_t times_fenced = 0;
  double exchange_s = 0.0;         // total time in exchanges
  uint64_t last_staleness = 0;     // exchanges of others since this worker's last one
  float last_rate = 0.0f;
  uint32_t last_num_live = 0;
};

// Thread-safe. One exchange, read or write at a time.
class AttachedSegment {
 public:
  // `num_threads` 0: one for each core this process may use, at most 4.
  AttachedSegment(std::unique_ptr<SegmentLink> link, bool created, int num_threads);
  ~AttachedSegment();

  bool created() const { return created_; }
  // FAILED_PRECONDITION in a forked child, which may call only what says so.
  Status CheckProcess() const { return fork_guard_.Check(); }
  SegmentControl* control() const { return link_->control(); }
  const Layout& layout() const { return link_->control()->layout(); }

  // Becomes a member and starts renewing. ALREADY_EXISTS for a live worker's index.
  Status Join(std::optional<uint32_t> worker_index) EXCLUDES(membership_mutex_, lease_mutex_);
  // Ends membership. Harmless when not joined, and in a forked child.
  void Leave() EXCLUDES(membership_mutex_, lease_mutex_);
  // False in a forked child.
  bool joined() const EXCLUDES(lease_mutex_);
  Result<MemberId> member() const EXCLUDES(lease_mutex_);
  Result<uint32_t> worker_index() const EXCLUDES(lease_mutex_);

  Status SetRule(const ExchangeRule& rule) EXCLUDES(exchange_mutex_);

  // The first center: this worker's `values` if it may seed (true), else false.
  // Only a member may; one whose lease lapsed meanwhile has not.
  Result<bool> TrySeed(const std::vector<const float*>& values, const Deadline& deadline);
  Status Read(const std::vector<float*>& values, const Deadline& deadline);
  Status Write(const std::vector<const float*>& values, const Deadline& deadline);
  // Says that the local weights are now `values`: what delta averaging measures its
  // progress from. After a Read or TrySeed whose values the worker goes on with.
  Status Rebase(const std::vector<const float*>& values) EXCLUDES(exchange_mutex_);

  // One exchange by the rule. INVALID_ARGUMENT naming the variable if `local` holds
  // a NaN or Inf: none reaches the center, and for models up to 16 MiB nothing else does
  // either. `steps`: this worker's step count,
  // for the others to see.
  Result<ExchangeOutcome> Exchange(const std::vector<const float*>& local,
                                   const std::vector<float*>& out, MoveOutput output,
                                   uint64_t steps) EXCLUDES(exchange_mutex_);

  // All zero in a forked child.
  ExchangeStats stats() const EXCLUDES(exchange_mutex_);
  // Why the last Exchange failed; OK if it did not. For callers behind TensorFlow,
  // which loses the code of an error.
  Status last_error() const EXCLUDES(exchange_mutex_);

 private:
  void LeaseLoop(std::optional<uint32_t> worker_index) EXCLUDES(lease_mutex_);
  Status NotJoinedError() const;
  Status CheckFinite(const std::vector<const float*>& local) const;
  Status RebaseLocked(const std::vector<const float*>& values) REQUIRES(exchange_mutex_);
  Result<ExchangeOutcome> ExchangeLocked(const std::vector<const float*>& local,
                                         const std::vector<float*>& out, MoveOutput output,
                                         uint64_t steps) REQUIRES(exchange_mutex_);
  uint64_t FirstChunk(uint32_t worker_index) const;
  void StopLeaseThread() REQUIRES(membership_mutex_) EXCLUDES(lease_mutex_);

  const std::unique_ptr<SegmentLink> link_;
  const bool created_;
  const ForkGuard fork_guard_;

  mutable Mutex exchange_mutex_;
  std::unique_ptr<ThreadPool> pool_ GUARDED_BY(exchange_mutex_);
  ExchangeRule rule_ GUARDED_BY(exchange_mutex_);
  MoveChooser chooser_ GUARDED_BY(exchange_mutex_);
  MemoryMapping last_ GUARDED_BY(exchange_mutex_);  // kDelta: packed like the center
  uint64_t last_version_ GUARDED_BY(exchange_mutex_) = 0;
  ExchangeStats stats_ GUARDED_BY(exchange_mutex_);
  Status last_error_ GUARDED_BY(exchange_mutex_);
  std::atomic<uint64_t> times_fenced_{0};

  // One Join or Leave at a time; before `lease_mutex_`.
  Mutex membership_mutex_;
  std::unique_ptr<std::thread> lease_thread_ GUARDED_BY(membership_mutex_);

  mutable Mutex lease_mutex_;
  // Constant after construction. On the heap, so that a forked child can forget it:
  // its destructor would wait for the parent's threads.
  std::unique_ptr<CondVar> lease_changed_;
  bool lease_stopping_ GUARDED_BY(lease_mutex_) = false;
  bool renew_now_ GUARDED_BY(lease_mutex_) = false;
  std::optional<Status> join_status_ GUARDED_BY(lease_mutex_);
  std::optional<MemberId> member_ GUARDED_BY(lease_mutex_);
  uint32_t worker_index_ GUARDED_BY(lease_mutex_) = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_H_
