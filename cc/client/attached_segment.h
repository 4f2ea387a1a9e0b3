// AttachedSegment: a segment as a worker uses it: joined under a lease that a
// thread of its own renews, exchanged with by rule.
#ifndef TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_H_
#define TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cc/client/exchange_rule.h"
#include "cc/client/schedule.h"
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
  kSkipped = 2,    // nothing happened (fenced, joining again, left out of a round); `out` was
                   // not written
  kReplaced = 3,   // a round: `out` holds the mean, whatever MoveOutput was asked for
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

// Staleness by powers of two: 0, 1, 2-3, 4-7, ... and all beyond.
constexpr size_t kStalenessBuckets = 16;
// Changes that are remembered; later ones are counted only.
constexpr size_t kMaxRememberedChanges = 10000;

// What was different from the exchange before.
struct ExchangeChange {
  uint64_t steps = 0;
  uint64_t phase = 0;
  uint64_t period = 0;
  double rate = 0.0;
  uint32_t num_live = 0;
};

struct ExchangeStats {
  uint64_t exchanges = 0;  // rounds among them
  uint64_t skipped_exchanges = 0;
  uint64_t skipped_chunks = 0;
  uint64_t times_fenced = 0;
  uint64_t rounds = 0;
  uint64_t moved_bytes = 0;        // of this worker's weights, both ways together
  double exchange_s = 0.0;         // total time in exchanges, with waiting_s
  double waiting_s = 0.0;          // of it, for other workers
  uint64_t last_staleness = 0;     // exchanges of others since this worker's last one
  double last_rate = 0.0;
  uint32_t last_num_live = 0;
  std::array<uint64_t, kStalenessBuckets> staleness_histogram{};
  std::vector<ExchangeChange> changes;
  uint64_t changes_forgotten = 0;
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

  // What exchanges do from now on, of this worker alone: ends a schedule. The period stays.
  Status SetRule(const ExchangeRule& rule) EXCLUDES(exchange_mutex_, lease_mutex_);
  // What ExchangeScheduled does from now on: begins with the segment's present phase, and,
  // until this member has seeded or another has, with the phase at `first_position`.
  // FAILED_PRECONDITION if the workers of the segment have agreed on another schedule
  // (checked here if this is a member, else when it joins).
  Status SetSchedule(const Schedule& schedule, uint64_t first_position)
      EXCLUDES(exchange_mutex_, lease_mutex_);
  // Overrides the period of the present phase, until the next one begins; without a
  // schedule, until it is set again.
  Status SetPeriod(uint64_t period) EXCLUDES(exchange_mutex_);
  // Variables that are statistics (by layout index): delta averaging could take a variance
  // below zero, so they are averaged elastically, in one atomic move at rate 1 / live
  // workers, whatever the rule; rounds average them as all others. All false at first.
  Status SetStatistics(std::vector<bool> statistics) EXCLUDES(exchange_mutex_);
  Status SetFiniteCheck(FiniteCheck check) EXCLUDES(exchange_mutex_);
  // How long rounds of the TensorFlow op, which has no options, wait.
  void SetRoundTimeout(double seconds) { round_timeout_s_.store(seconds); }
  double round_timeout_s() const { return round_timeout_s_.load(); }

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
  // progress from. After a Read or TrySeed whose values the worker goes on with, in the
  // phase that the others are in.
  Status Rebase(const std::vector<ConstSpan>& values) EXCLUDES(exchange_mutex_);

  // One exchange by the rule. `out`: for each of `local`, see MoveOutput.
  // INVALID_ARGUMENT naming the variable if `local` holds a NaN or Inf: see FiniteCheck.
  // `steps`: this worker's step count, for the others to see.
  Result<ExchangeOutcome> Exchange(const std::vector<ConstSpan>& local,
                                   const std::vector<void*>& out, MoveOutput output,
                                   uint64_t steps) EXCLUDES(exchange_mutex_);

  // --- By the schedule ---------------------------------------------------------
  // Once in every step: whether an exchange is due, by the period, since the phase ends
  // here, or since the others have ended it. Cheap. `batches`: that this worker trained
  // on so far, in all.
  Result<bool> IsDue(uint64_t steps, uint64_t batches) EXCLUDES(exchange_mutex_);
  // This worker begins an epoch; `batches` as above. For the others to see, and for
  // schedules by epochs, whose phases end here: see IsDue.
  Status BeginEpoch(uint64_t epoch, uint64_t batches) EXCLUDES(exchange_mutex_);
  // One exchange of the present phase: as Exchange, or, in a phase of rounds, as Average,
  // weighted by this worker's steps since its last exchange, with kReplaced as outcome;
  // `output` is for the former. A round that this worker is left out of, or whose phase
  // others have ended, is kSkipped. Takes the worker on to the next phase where one begins.
  // Without a schedule: by the rule.
  Result<ExchangeOutcome> ExchangeScheduled(const std::vector<ConstSpan>& local,
                                            const std::vector<void*>& out, MoveOutput output,
                                            uint64_t steps, uint64_t batches,
                                            const WaitOptions& options)
      EXCLUDES(exchange_mutex_);
  // The phase this worker acts by; 0 without a schedule.
  uint64_t phase() const { return phase_.load(); }
  uint64_t period() const { return period_.load(); }

  // One round of all live members: the center becomes the mean of their `local`, weighted
  // by `weight` (above 0), and `out` (for each of `local`) the center. Shares are added in
  // the order of the worker indexes. Waits for the others' shares until the options'
  // time-out, then adds its own out of turn, and goes on without theirs.
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

  // All zero in a forked child. Does not wait for an exchange.
  ExchangeStats stats() const EXCLUDES(stats_mutex_);
  // Why the last Exchange failed; OK if it did not. For callers behind TensorFlow,
  // which loses the code of an error.
  Status last_error() const EXCLUDES(stats_mutex_);

 private:
  // What statistics record of an exchange.
  struct ExchangeRecord;
  // A round, as far as this worker has come in it.
  struct RoundWork;

  void LeaseLoop(std::optional<uint32_t> worker_index) EXCLUDES(lease_mutex_);
  Status NotJoinedError() const;
  void StopLeaseThread() REQUIRES(membership_mutex_) EXCLUDES(lease_mutex_);
  void EndMembership() REQUIRES(membership_mutex_) EXCLUDES(lease_mutex_);
  // FAILED_PRECONDITION if the workers' schedule is another one than this worker's.
  Status AgreeOnSchedule(const MemberId& member) EXCLUDES(lease_mutex_);
  // The member, if it still is one; none if it is joining again.
  Result<std::optional<MemberId>> CurrentMember() EXCLUDES(lease_mutex_);
  uint64_t FirstChunk(uint32_t worker_index) const;

  // Exchanges: attached_segment_exchange.cc.
  Status CheckFinite(const std::vector<ConstSpan>& local) REQUIRES(exchange_mutex_);
  Status NonFiniteError(uint32_t variable, const char* consequence) const;
  // Whether some rule to come measures progress from the last exchange.
  bool KeepsBase() const REQUIRES(exchange_mutex_);
  Status SetBaseLocked(const std::vector<ConstSpan>& values) REQUIRES(exchange_mutex_);
  // Gives variables that have no base yet their local values as one.
  Status EnsureBaseLocked(const std::vector<ConstSpan>& local) REQUIRES(exchange_mutex_);
  // The base is what an exchange left the worker with, or will have once it applied `out`.
  Status SetBaseAfterLocked(const std::vector<ConstSpan>& local, const std::vector<void*>& out,
                            MoveOutput output, ExchangeOutcome outcome)
      REQUIRES(exchange_mutex_);
  Result<ExchangeOutcome> ExchangeLocked(const std::vector<ConstSpan>& local,
                                         const std::vector<void*>& out, MoveOutput output,
                                         const Progress& progress) REQUIRES(exchange_mutex_);
  // As one update; statistics by their own move.
  Result<UpdateReport> MoveLocked(const UpdateRequest& request, uint32_t num_live)
      REQUIRES(exchange_mutex_);
  Result<UpdateReport> MoveWeightsLocked(const UpdateRequest& request)
      REQUIRES(exchange_mutex_);
  Result<UpdateReport> ReadThenAccumulateLocked(const UpdateRequest& request)
      REQUIRES(exchange_mutex_);
  ExchangeOutcome Skip(double waiting_s) EXCLUDES(stats_mutex_);
  void Record(const ExchangeRecord& record) EXCLUDES(stats_mutex_);
  Result<ExchangeOutcome> KeepError(Result<ExchangeOutcome> outcome) EXCLUDES(stats_mutex_);

  // Rounds: attached_segment_rounds.cc.
  Status WaitInRound(RoundWork* work, double timeout_s, const Pending& pending);
  Status EnterRound(RoundWork* work);
  Status AwaitTurn(RoundWork* work);
  Status AddShareLocked(RoundWork* work) REQUIRES(exchange_mutex_);
  Status CloseRound(RoundWork* work);
  Status ReadMeanLocked(RoundWork* work) REQUIRES(exchange_mutex_);
  Status FinishRoundLocked(RoundWork* work) REQUIRES(exchange_mutex_);
  void AwaitReaders(RoundWork* work);
  void RecordRound(const RoundWork& work) EXCLUDES(stats_mutex_);

  // The schedule: attached_segment_schedule.cc.
  void SetPhaseLocked(uint64_t phase) REQUIRES(exchange_mutex_);
  // Into the phase that the others are in: this worker has just taken the center.
  Status FollowScheduleLocked() REQUIRES(exchange_mutex_);
  void BeginScheduleLocked(const MemberId& member) REQUIRES(exchange_mutex_);
  // Follows the others to the phase that they are in. True if it is a new one.
  bool EnterReachedPhaseLocked(const MemberId& member) REQUIRES(exchange_mutex_);
  Progress ProgressLocked(uint64_t steps, uint64_t batches) const REQUIRES(exchange_mutex_);
  uint64_t SinceLocked(uint64_t steps) REQUIRES(exchange_mutex_);
  bool EndsPhaseLocked(uint64_t steps) const REQUIRES(exchange_mutex_);
  bool PhaseIsDueLocked(const MemberId& member, uint64_t steps) REQUIRES(exchange_mutex_);
  Status LeavePhaseLocked(const std::vector<ConstSpan>& local, const std::vector<void*>& out,
                          MoveOutput output, ExchangeOutcome outcome, uint64_t steps)
      REQUIRES(exchange_mutex_);
  Result<ExchangeOutcome> RoundScheduledLocked(RoundWork* work) REQUIRES(exchange_mutex_);
  // Up to the round's closing. False if this worker is left out of it.
  Result<bool> TakePartLocked(RoundWork* work) REQUIRES(exchange_mutex_);
  // The round may be of a phase that began while this worker waited. False if it has none.
  bool PrepareShareLocked(RoundWork* work) REQUIRES(exchange_mutex_);

  const std::unique_ptr<SegmentLink> link_;
  const bool created_;
  const ForkGuard fork_guard_;

  // Held through an exchange, also while it waits for other workers.
  mutable Mutex exchange_mutex_;
  std::unique_ptr<ThreadPool> pool_ GUARDED_BY(exchange_mutex_);
  ExchangeRule rule_ GUARDED_BY(exchange_mutex_);
  MoveChooser chooser_ GUARDED_BY(exchange_mutex_);
  FiniteCheck finite_check_ GUARDED_BY(exchange_mutex_) = FiniteCheck::kBefore;
  std::vector<bool> statistics_ GUARDED_BY(exchange_mutex_);  // by variable; empty: none
  // kDelta: this worker's weights as its last exchange left them, packed like the center.
  MemoryMapping last_ GUARDED_BY(exchange_mutex_);
  std::vector<bool> has_base_ GUARDED_BY(exchange_mutex_);  // by variable: it is in last_
  uint64_t last_version_ GUARDED_BY(exchange_mutex_) = 0;
  bool stuck_ GUARDED_BY(exchange_mutex_) = false;  // the last exchange skipped chunks

  std::optional<Schedule> schedule_ GUARDED_BY(exchange_mutex_);
  bool begun_ GUARDED_BY(exchange_mutex_) = false;  // phase_ is one of a seeded segment
  bool closing_made_ GUARDED_BY(exchange_mutex_) = false;  // this phase's last exchange was
  bool phase_is_new_ GUARDED_BY(exchange_mutex_) = false;  // without a round of its own yet
  uint64_t entered_incarnation_ GUARDED_BY(exchange_mutex_) = 0;  // that others know phase_ of
  // At the last exchange; none: where counting starts is not known yet.
  std::optional<uint64_t> steps_at_exchange_ GUARDED_BY(exchange_mutex_) = 0;
  uint64_t seen_steps_ GUARDED_BY(exchange_mutex_) = 0;
  uint64_t epoch_ GUARDED_BY(exchange_mutex_) = 0;
  uint64_t batches_at_epoch_ GUARDED_BY(exchange_mutex_) = 0;
  // Written with exchange_mutex_ held.
  std::atomic<uint64_t> phase_{0};
  std::atomic<uint64_t> period_{1};
  std::atomic<double> round_timeout_s_{600.0};

  mutable Mutex stats_mutex_;  // after exchange_mutex_
  ExchangeStats stats_ GUARDED_BY(stats_mutex_);
  std::optional<ExchangeChange> last_exchange_ GUARDED_BY(stats_mutex_);
  Status last_error_ GUARDED_BY(stats_mutex_);
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
  std::string schedule_words_ GUARDED_BY(lease_mutex_);  // empty: no schedule
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_ATTACHED_SEGMENT_H_
