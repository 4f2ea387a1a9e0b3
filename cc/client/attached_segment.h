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
#include "cc/client/waiting.h"
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

// When an exchange looks for NaN and Inf in a worker's weights. None ever reaches the
// center in either case.
enum class FiniteCheck {
  // All of them before the first chunk of the center is touched: a pass of its own.
  kBefore,
  // Element by element, as they are moved: costs nothing, but what was moved before the
  // first bad one stays moved.
  kDuring,
};

// What a round came to.
struct RoundResult {
  uint64_t round = 0;
  // Whose shares did not come in time: the mean is of the others.
  std::vector<uint32_t> missing;
};

// Spans of all variables of a layout, `pointers` in its order.
std::vector<ConstSpan> WholeSpans(const Layout& layout, const std::vector<const void*>& pointers);
std::vector<Span> WholeSpans(const Layout& layout, const std::vector<void*>& pointers);

struct ExchangeStats {
  uint64_t exchanges = 0;
  uint64_t skipped_exchanges = 0;
  uint64_t skipped_chunks = 0;
  uint64_t times_fenced = 0;
  double exchange_s = 0.0;         // total time in exchanges
  uint64_t last_staleness = 0;     // exchanges of others since this worker's last one
  double last_rate = 0.0;
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
  Status SetFiniteCheck(FiniteCheck check) EXCLUDES(exchange_mutex_);

  // --- Weights ---------------------------------------------------------------
  // The first center: this worker's `values` if it may seed (true), else false.
  // Only a member may; one whose lease lapsed meanwhile has not.
  Result<bool> TrySeed(const std::vector<ConstSpan>& values, const Deadline& deadline)
      EXCLUDES(exchange_mutex_);
  Status Read(const std::vector<Span>& values, const Deadline& deadline)
      EXCLUDES(exchange_mutex_);
  Status Write(const std::vector<ConstSpan>& values, const Deadline& deadline)
      EXCLUDES(exchange_mutex_);
  // center += scale * values. Each chunk all or nothing, whatever happens to this process;
  // DEADLINE_EXCEEDED with the number of chunks that were left out, INVALID_ARGUMENT as
  // for Exchange.
  Status Accumulate(const std::vector<ConstSpan>& values, double scale, const Deadline& deadline)
      EXCLUDES(exchange_mutex_);
  // center += scale * the source's center, of the same server and layout.
  Status Axpy(double scale, AttachedSegment* source, const Deadline& deadline);
  // Says that the local weights are now `values`: what delta averaging measures its
  // progress from. After a Read or TrySeed whose values the worker goes on with.
  Status Rebase(const std::vector<ConstSpan>& values) EXCLUDES(exchange_mutex_);

  // One exchange by the rule. `out`: for each of `local`, see MoveOutput.
  // INVALID_ARGUMENT naming the variable if `local` holds a NaN or Inf: see FiniteCheck.
  // `steps`: this worker's step count, for the others to see.
  Result<ExchangeOutcome> Exchange(const std::vector<ConstSpan>& local,
                                   const std::vector<void*>& out, MoveOutput output,
                                   uint64_t steps) EXCLUDES(exchange_mutex_);

  // One round of all live members: the center becomes the mean of their `local`, weighted
  // by `weight` (above 0), and `out` (for each of `local`) the center. Waits for the
  // others' shares until the options' time-out, then goes on without.
  Result<RoundResult> Average(const std::vector<ConstSpan>& local, const std::vector<void*>& out,
                              double weight, uint64_t steps, const WaitOptions& options)
      EXCLUDES(exchange_mutex_);

  // --- Each other ------------------------------------------------------------
  // Until all `workers`, this one among them, have come here; those that left or died
  // are not waited for. DEADLINE_EXCEEDED naming the missing.
  Status Barrier(const std::vector<uint32_t>& workers, const WaitOptions& options);
  // The segment's lock, for `lease_s` at most: a token for Unlock. DEADLINE_EXCEEDED
  // naming the holder.
  Result<uint64_t> Lock(double lease_s, const WaitOptions& options);
  // ABORTED if it had lapsed.
  Status Unlock(uint64_t token);
  // Until the center's version is at least `version`: the version then.
  Result<uint64_t> WaitForVersion(uint64_t version, const WaitOptions& options);

  // All zero in a forked child.
  ExchangeStats stats() const EXCLUDES(exchange_mutex_);
  // Why the last Exchange failed; OK if it did not. For callers behind TensorFlow,
  // which loses the code of an error.
  Status last_error() const EXCLUDES(exchange_mutex_);

 private:
  void LeaseLoop(std::optional<uint32_t> worker_index) EXCLUDES(lease_mutex_);
  Status NotJoinedError() const;
  Status CheckFinite(const std::vector<ConstSpan>& local) REQUIRES(exchange_mutex_);
  Status RebaseLocked(const std::vector<ConstSpan>& values) REQUIRES(exchange_mutex_);
  // Gives variables that have no base yet their local values as one.
  Status EnsureBaseLocked(const std::vector<ConstSpan>& local) REQUIRES(exchange_mutex_);
  // The member, if it still is one; none if it is joining again.
  Result<std::optional<MemberId>> CurrentMember() EXCLUDES(lease_mutex_);
  Result<ExchangeOutcome> ExchangeLocked(const std::vector<ConstSpan>& local,
                                         const std::vector<void*>& out, MoveOutput output,
                                         uint64_t steps) REQUIRES(exchange_mutex_);
  Result<UpdateReport> ReadThenAccumulateLocked(const UpdateRequest& request)
      REQUIRES(exchange_mutex_);
  Status ShareLocked(const std::vector<ConstSpan>& local, double weight, uint64_t round,
                     uint32_t worker_index) REQUIRES(exchange_mutex_);
  Status NonFiniteError(uint32_t variable, const char* consequence) const;
  uint64_t FirstChunk(uint32_t worker_index) const;
  void StopLeaseThread() REQUIRES(membership_mutex_) EXCLUDES(lease_mutex_);

  const std::unique_ptr<SegmentLink> link_;
  const bool created_;
  const ForkGuard fork_guard_;

  mutable Mutex exchange_mutex_;
  std::unique_ptr<ThreadPool> pool_ GUARDED_BY(exchange_mutex_);
  ExchangeRule rule_ GUARDED_BY(exchange_mutex_);
  MoveChooser chooser_ GUARDED_BY(exchange_mutex_);
  FiniteCheck finite_check_ GUARDED_BY(exchange_mutex_) = FiniteCheck::kBefore;
  MemoryMapping last_ GUARDED_BY(exchange_mutex_);  // kDelta: packed like the center
  std::vector<bool> has_base_ GUARDED_BY(exchange_mutex_);  // by variable: it is in last_
  uint64_t last_version_ GUARDED_BY(exchange_mutex_) = 0;
  bool stuck_ GUARDED_BY(exchange_mutex_) = false;  // the last exchange skipped chunks
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
