#include "cc/client/attached_segment.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "cc/box/exchange_kernel.h"

namespace tf_smb {
namespace {

// More than four do not make memory faster, and the others have work of their own.
constexpr int kMaxThreads = 4;
// A lease survives four lost renewals.
constexpr int kRenewalsPerLease = 5;
// Elements that a thread looks at for NaN and Inf in one go.
constexpr uint64_t kCheckElements = 2 << 20;
// How long an exchange waits for chunks that others hold, at most; and after it has waited
// once in vain, so that a stopped worker costs the others no more than that.
constexpr double kBusyChunkSeconds = 5.0;
constexpr double kStuckChunkSeconds = 0.005;
constexpr uint32_t kNoVariable = UINT32_MAX;

// Gone by LeaveUnlessLast, and not fenced: its Leave follows.
bool HasLeft(SegmentControl* control, const MemberId& member) {
  for (const MemberInfo& info : control->Members()) {
    if (info.incarnation == member.incarnation) return info.state == MemberState::kLeft;
  }
  return false;
}

int ChooseThreads(int num_threads) {
  return num_threads > 0 ? num_threads : std::min(kMaxThreads, AvailableCores());
}

template <typename SpanType, typename Pointer>
std::vector<SpanType> MakeWholeSpans(const Layout& layout, const std::vector<Pointer>& pointers) {
  std::vector<SpanType> spans;
  spans.reserve(pointers.size());
  for (uint32_t v = 0; v < pointers.size(); ++v) {
    spans.push_back({v, 0, layout.variables()[v].num_elements, pointers[v]});
  }
  return spans;
}

DType DTypeOf(const Layout& layout, const ConstSpan& span) {
  const DType dtype = layout.variables()[span.variable].dtype;
  return span.wide ? CenterDType(dtype) : dtype;
}

}  // namespace

std::vector<ConstSpan> WholeSpans(const Layout& layout,
                                  const std::vector<const void*>& pointers) {
  return MakeWholeSpans<ConstSpan>(layout, pointers);
}

std::vector<Span> WholeSpans(const Layout& layout, const std::vector<void*>& pointers) {
  return MakeWholeSpans<Span>(layout, pointers);
}

AttachedSegment::AttachedSegment(std::unique_ptr<SegmentLink> link, bool created, int num_threads)
    : link_(std::move(link)),
      created_(created),
      pool_(std::make_unique<ThreadPool>(ChooseThreads(num_threads))),
      lease_changed_(std::make_unique<CondVar>()) {}

AttachedSegment::~AttachedSegment() {
  if (!fork_guard_.InForkedChild()) {
    Leave();
    return;
  }
  // The threads, and whatever they held at the fork, are the parent's: a forked child
  // can only forget them.
  static_cast<void>(lease_thread_.release());
  static_cast<void>(lease_changed_.release());
  static_cast<void>(pool_.release());
}

// --- Membership --------------------------------------------------------------

Status AttachedSegment::Join(std::optional<uint32_t> worker_index) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock membership_lock(&membership_mutex_);
  if (joined()) return FailedPreconditionError("this segment is joined already [SMB-E180]");
  StopLeaseThread();
  {
    MutexLock lock(&lease_mutex_);
    lease_stopping_ = false;
    join_status_.reset();
  }
  lease_thread_ =
      std::make_unique<std::thread>([this, worker_index] { LeaseLoop(worker_index); });
  MutexLock lock(&lease_mutex_);
  while (!join_status_.has_value()) lease_changed_->Wait(&lease_mutex_);
  return *join_status_;
}

void AttachedSegment::Leave() {
  if (fork_guard_.InForkedChild()) return;
  MutexLock membership_lock(&membership_mutex_);
  StopLeaseThread();
  MutexLock lock(&lease_mutex_);
  join_status_.reset();
}

void AttachedSegment::StopLeaseThread() {
  if (lease_thread_ == nullptr) return;
  {
    MutexLock lock(&lease_mutex_);
    lease_stopping_ = true;
  }
  lease_changed_->NotifyAll();
  lease_thread_->join();
  lease_thread_.reset();
}

void AttachedSegment::LeaseLoop(std::optional<uint32_t> worker_index) {
  SegmentControl* const control = link_->control();
  const auto interval = std::chrono::nanoseconds(
      static_cast<int64_t>(control->lease_s() * kNanosPerSecond / kRenewalsPerLease));
  Result<MemberId> member = control->Join(worker_index);
  if (member.ok() && !worker_index.has_value()) {
    for (const MemberInfo& info : control->Members()) {
      if (info.incarnation == member->incarnation) worker_index = info.worker_index;
    }
  }
  {
    MutexLock lock(&lease_mutex_);
    join_status_ = member.status();
    if (member.ok()) {
      member_ = *member;
      worker_index_ = *worker_index;
    }
  }
  lease_changed_->NotifyAll();
  if (!member.ok()) return;
  for (;;) {
    {
      MutexLock lock(&lease_mutex_);
      if (!lease_stopping_ && !renew_now_) lease_changed_->WaitFor(&lease_mutex_, interval);
      renew_now_ = false;
      if (lease_stopping_) break;
    }
    if (member.ok() && (control->Renew(*member).ok() || HasLeft(control, *member))) continue;
    if (member.ok()) {
      control->Leave(*member);
      times_fenced_.fetch_add(1);
    }
    // Fails while another process has the index; the next renewal tries again.
    member = control->Join(worker_index);
    MutexLock lock(&lease_mutex_);
    member_.reset();
    if (member.ok()) member_ = *member;
  }
  if (member.ok()) control->Leave(*member);
  MutexLock lock(&lease_mutex_);
  member_.reset();
}

bool AttachedSegment::joined() const {
  if (fork_guard_.InForkedChild()) return false;
  MutexLock lock(&lease_mutex_);
  return member_.has_value();
}

Result<MemberId> AttachedSegment::member() const {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&lease_mutex_);
  if (member_.has_value()) return *member_;
  return NotJoinedError();
}

Status AttachedSegment::NotJoinedError() const {
  return FailedPreconditionError("segment '" + link_->control()->name() +
                                 "' is not joined: join it first [SMB-E181]");
}

Result<uint32_t> AttachedSegment::worker_index() const {
  TF_SMB_RETURN_IF_ERROR(member().status());
  MutexLock lock(&lease_mutex_);
  return worker_index_;
}

// --- Weights -----------------------------------------------------------------

Status AttachedSegment::SetRule(const ExchangeRule& rule) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(rule.Check());
  MutexLock lock(&exchange_mutex_);
  // What another rule moved since is no progress of this one.
  if (rule.kind != rule_.kind) has_base_.clear();
  rule_ = rule;
  return Status::Ok();
}

Status AttachedSegment::SetFiniteCheck(FiniteCheck check) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  finite_check_ = check;
  return Status::Ok();
}

Result<bool> AttachedSegment::TrySeed(const std::vector<ConstSpan>& values,
                                      const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, this->member());
  if (!control()->BeginSeeding(member)) return false;
  TF_SMB_RETURN_IF_ERROR(Write(values, deadline));
  control()->FinishSeeding(member);
  // A seeder that was fenced meanwhile has not seeded: somebody else may.
  return control()->CheckMember(member).ok();
}

Status AttachedSegment::Read(const std::vector<Span>& values, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), values));
  MutexLock lock(&exchange_mutex_);
  return link_->Read(values, deadline, pool_.get());
}

Status AttachedSegment::Write(const std::vector<ConstSpan>& values, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), values));
  MutexLock lock(&exchange_mutex_);
  TF_SMB_RETURN_IF_ERROR(link_->Write(values, deadline, pool_.get()));
  last_version_ = control()->version();
  return Status::Ok();
}

Status AttachedSegment::Accumulate(const std::vector<ConstSpan>& values, double scale,
                                   const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), values));
  if (!std::isfinite(scale)) {
    return InvalidArgumentError("the scale of an accumulate must be a finite number, got " +
                                std::to_string(scale) + " [SMB-E182]");
  }
  MutexLock lock(&exchange_mutex_);
  TF_SMB_RETURN_IF_ERROR(CheckFinite(values));
  UpdateRequest request;
  request.move.kind = MoveKind::kAccumulate;
  request.move.rate = scale;
  request.local = values;
  request.busy_chunk_timeout_s = static_cast<double>(deadline.RemainingNanos()) / kNanosPerSecond;
  TF_SMB_ASSIGN_OR_RETURN(const UpdateReport report, link_->Update(request, pool_.get()));
  if (report.non_finite_variable.has_value()) {
    return NonFiniteError(*report.non_finite_variable,
                          "adding it was broken off at the first chunk that would not be finite");
  }
  if (report.chunks_skipped == 0) return Status::Ok();
  return DeadlineExceededError(std::to_string(report.chunks_skipped) + " of " +
                               std::to_string(report.chunks_moved + report.chunks_skipped) +
                               " chunks of segment '" + control()->name() +
                               "' stayed locked, and were not added to: the worker that holds "
                               "them is stopped [SMB-E183]");
}

Status AttachedSegment::Axpy(double scale, AttachedSegment* source, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  return link_->Axpy(scale, source->link_.get(), deadline);
}

Status AttachedSegment::Rebase(const std::vector<ConstSpan>& values) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), values));
  MutexLock lock(&exchange_mutex_);
  return RebaseLocked(values);
}

Status AttachedSegment::RebaseLocked(const std::vector<ConstSpan>& values) {
  last_version_ = control()->version();
  if (rule_.kind != MoveKind::kDelta) return Status::Ok();
  if (last_.data() == nullptr) {
    TF_SMB_ASSIGN_OR_RETURN(last_, MemoryMapping::MapPrivate(layout().size_bytes()));
  }
  has_base_.resize(layout().variables().size(), false);
  for (const ConstSpan& span : values) {
    const Variable& variable = layout().variables()[span.variable];
    if (!IsAveraged(variable.dtype)) continue;
    ToCenter(DTypeOf(layout(), span), span.data,
             last_.data() + variable.offset_bytes + span.first * variable.element_bytes(),
             span.count);
    if (span.count == variable.num_elements) has_base_[span.variable] = true;
  }
  return Status::Ok();
}

Status AttachedSegment::EnsureBaseLocked(const std::vector<ConstSpan>& local) {
  std::vector<ConstSpan> fresh;
  for (const ConstSpan& span : local) {
    const Variable& variable = layout().variables()[span.variable];
    if (span.count != variable.num_elements) {
      return InvalidArgumentError("delta averaging exchanges whole variables: of " +
                                  variable.ToString() + " it was given " +
                                  std::to_string(span.count) + " elements [SMB-E184]");
    }
    if (has_base_.empty() || !has_base_[span.variable]) fresh.push_back(span);
  }
  if (fresh.empty()) return Status::Ok();
  const uint64_t version = last_version_;
  TF_SMB_RETURN_IF_ERROR(RebaseLocked(fresh));
  last_version_ = version;
  return Status::Ok();
}

Result<ExchangeOutcome> AttachedSegment::Exchange(const std::vector<ConstSpan>& local,
                                                  const std::vector<void*>& out,
                                                  MoveOutput output, uint64_t steps) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), local));
  MutexLock lock(&exchange_mutex_);
  Result<ExchangeOutcome> outcome = ExchangeLocked(local, out, output, steps);
  last_error_ = outcome.status();
  return outcome;
}

Result<std::optional<MemberId>> AttachedSegment::CurrentMember() {
  const Result<MemberId> member = this->member();
  if (member.ok() && control()->CheckMember(*member).ok()) {
    return std::optional<MemberId>(*member);
  }
  {
    MutexLock lock(&lease_mutex_);
    const bool renewing = join_status_.has_value() && join_status_->ok();
    if (!renewing) return NotJoinedError();
    renew_now_ = true;
  }
  lease_changed_->NotifyAll();
  return std::optional<MemberId>();
}

Result<ExchangeOutcome> AttachedSegment::ExchangeLocked(const std::vector<ConstSpan>& local,
                                                        const std::vector<void*>& out,
                                                        MoveOutput output, uint64_t steps) {
  const int64_t start_nanos = MonotonicNanos();
  TF_SMB_ASSIGN_OR_RETURN(const std::optional<MemberId> member, CurrentMember());
  if (!member.has_value()) {
    ++stats_.skipped_exchanges;
    return ExchangeOutcome::kSkipped;
  }
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t worker_index, this->worker_index());
  if (finite_check_ == FiniteCheck::kBefore) TF_SMB_RETURN_IF_ERROR(CheckFinite(local));
  if (rule_.kind == MoveKind::kDelta) TF_SMB_RETURN_IF_ERROR(EnsureBaseLocked(local));
  const uint32_t num_live = std::max(1u, control()->CountLive());

  UpdateRequest request;
  const bool others_moved = control()->version() != last_version_;
  request.move = chooser_.Next(rule_, num_live, others_moved, output);
  request.local = local;
  if (request.move.kind != MoveKind::kCopy) request.out = out;
  request.last = rule_.kind == MoveKind::kDelta ? last_.data() : nullptr;
  request.first_chunk = FirstChunk(worker_index);
  request.busy_chunk_timeout_s =
      stuck_ ? kStuckChunkSeconds : std::min(kBusyChunkSeconds, control()->lease_s());
  const bool read_first = !rule_.atomic && request.move.kind != MoveKind::kCopy;
  TF_SMB_ASSIGN_OR_RETURN(const UpdateReport report,
                          read_first ? ReadThenAccumulateLocked(request)
                                     : link_->Update(request, pool_.get()));
  if (report.non_finite_variable.has_value()) {
    return NonFiniteError(*report.non_finite_variable,
                          "its exchange was broken off; none of it reached the center");
  }

  control()->PublishProgress(*member, steps);
  stats_.last_staleness =
      report.version_before - std::min(report.version_before, last_version_);
  last_version_ = report.version_after;
  stats_.exchanges += 1;
  stats_.skipped_chunks += report.chunks_skipped;
  stuck_ = report.chunks_skipped > 0;
  stats_.last_rate = request.move.rate;
  stats_.last_num_live = num_live;
  stats_.exchange_s +=
      static_cast<double>(MonotonicNanos() - start_nanos) / kNanosPerSecond;
  return request.move.kind == MoveKind::kCopy ? ExchangeOutcome::kUnchanged
                                              : ExchangeOutcome::kMoved;
}

// The papers' form: d = rate (x - g) with all of g read before, g += d afterwards.
Result<UpdateReport> AttachedSegment::ReadThenAccumulateLocked(const UpdateRequest& request) {
  const Deadline deadline = Deadline::After(request.busy_chunk_timeout_s);
  std::vector<std::vector<char>> centers, deltas;
  std::vector<Span> center_spans;
  for (const ConstSpan& span : request.local) {
    const uint64_t element_bytes = layout().variables()[span.variable].element_bytes();
    centers.emplace_back(span.count * element_bytes);
    deltas.emplace_back(span.count * element_bytes);
    center_spans.push_back({span.variable, span.first, span.count, centers.back().data(), true});
  }
  UpdateRequest addition;
  addition.move.kind = MoveKind::kAccumulate;
  addition.move.rate = 1.0;
  addition.first_chunk = request.first_chunk;
  addition.busy_chunk_timeout_s = request.busy_chunk_timeout_s;
  TF_SMB_RETURN_IF_ERROR(link_->Read(center_spans, deadline, pool_.get()));
  Move to_delta = request.move;
  to_delta.output = MoveOutput::kDelta;
  for (size_t i = 0; i < request.local.size(); ++i) {
    const ConstSpan& span = request.local[i];
    const DType dtype = DTypeOf(layout(), span);
    std::vector<char> moved_center = centers[i];
    if (!ApplyMove(to_delta, dtype, span.data, moved_center.data(), nullptr, deltas[i].data(),
                   span.count)) {
      UpdateReport report;
      report.non_finite_variable = span.variable;
      return report;
    }
    addition.local.push_back({span.variable, span.first, span.count, deltas[i].data(), span.wide});
  }
  for (size_t i = 0; i < request.local.size(); ++i) {
    const ConstSpan& span = request.local[i];
    ApplyMove(request.move, DTypeOf(layout(), span), span.data, centers[i].data(), nullptr,
              request.out[i], span.count);
  }
  return link_->Update(addition, pool_.get());
}

Status AttachedSegment::CheckFinite(const std::vector<ConstSpan>& local) {
  struct Block {
    const ConstSpan* span;
    uint64_t first;
    uint64_t count;
  };
  std::vector<Block> blocks;
  uint64_t total = 0;
  for (const ConstSpan& span : local) {
    for (uint64_t at = 0; at < span.count; at += kCheckElements) {
      blocks.push_back({&span, at, std::min(kCheckElements, span.count - at)});
    }
    total += span.count;
  }
  std::atomic<size_t> next{0};
  std::atomic<uint32_t> found{kNoVariable};
  const auto look = [&] {
    for (size_t i = next.fetch_add(1); i < blocks.size() && found.load() == kNoVariable;
         i = next.fetch_add(1)) {
      const Block& block = blocks[i];
      const DType dtype = DTypeOf(layout(), *block.span);
      const auto* const data = static_cast<const char*>(block.span->data);
      if (!AllFinite(dtype, data + block.first * ElementBytes(dtype), block.count)) {
        found.store(block.span->variable);
      }
    }
  };
  if (total > kCheckElements) {
    pool_->Run(look);
  } else {
    look();  // waking the others would take longer
  }
  if (found.load() == kNoVariable) return Status::Ok();
  return NonFiniteError(found.load(), "nothing of it reached the center");
}

Status AttachedSegment::NonFiniteError(uint32_t variable, const char* consequence) const {
  return InvalidArgumentError("variable " + layout().variables()[variable].ToString() +
                              " of this worker holds NaN or Inf, so " + consequence +
                              ": the training diverged (try a smaller learning rate) [SMB-E185]");
}

// --- Rounds ------------------------------------------------------------------

Result<RoundResult> AttachedSegment::Average(const std::vector<ConstSpan>& local,
                                             const std::vector<void*>& out, double weight,
                                             uint64_t steps, const WaitOptions& options) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), local));
  if (!std::isfinite(weight) || weight <= 0) {
    return InvalidArgumentError("the weight of a worker in a round must be a finite number above "
                                "0, got " + std::to_string(weight) + " [SMB-E186]");
  }
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, this->member());
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t worker_index, this->worker_index());
  MutexLock lock(&exchange_mutex_);
  TF_SMB_RETURN_IF_ERROR(CheckFinite(local));
  RoundResult result;
  TF_SMB_RETURN_IF_ERROR(WaitFor(*control(), options, [&]() -> Result<std::optional<std::string>> {
    TF_SMB_ASSIGN_OR_RETURN(result.round, control()->EnterRound(member));
    if (result.round != 0) return std::optional<std::string>();
    return std::optional<std::string>("the round before to end, for " +
                                      NameWorkers(control()->MissingInRound()));
  }));
  const Status shared = ShareLocked(local, weight, result.round, worker_index);
  if (shared.ok()) control()->PublishProgress(member, steps);
  // Also of a share that failed: what is in stays in, and nobody waits for the rest.
  control()->FinishShare(member, result.round);
  if (!shared.ok()) {
    control()->FinishRound(member, result.round);
    return shared;
  }
  const Status waited =
      WaitFor(*control(), options, [&]() -> Result<std::optional<std::string>> {
        if (control()->TryCloseRound(result.round, /*force=*/false)) {
          return std::optional<std::string>();
        }
        TF_SMB_RETURN_IF_ERROR(control()->CheckMember(member));
        result.missing = control()->MissingInRound();
        return std::optional<std::string>("the share of " + NameWorkers(result.missing));
      });
  if (waited.ok()) {
    result.missing.clear();
  } else if (waited.code() == StatusCode::kDeadlineExceeded) {
    control()->TryCloseRound(result.round, /*force=*/true);
  } else {
    control()->FinishRound(member, result.round);  // nobody waits for it to read the mean
    return waited;
  }
  std::vector<Span> mean;
  std::vector<ConstSpan> base;
  for (size_t i = 0; i < local.size(); ++i) {
    mean.push_back({local[i].variable, local[i].first, local[i].count, out[i], local[i].wide});
    base.push_back({local[i].variable, local[i].first, local[i].count, out[i], local[i].wide});
  }
  const Status read = link_->Read(mean, Deadline::After(options.timeout_s), pool_.get());
  control()->FinishRound(member, result.round);
  TF_SMB_RETURN_IF_ERROR(read);
  TF_SMB_RETURN_IF_ERROR(RebaseLocked(base));
  return result;
}

Status AttachedSegment::ShareLocked(const std::vector<ConstSpan>& local, double weight,
                                    uint64_t round, uint32_t worker_index) {
  UpdateRequest request;
  request.local = local;
  request.round = RoundShare{round, weight};
  request.first_chunk = FirstChunk(worker_index);
  TF_SMB_ASSIGN_OR_RETURN(const UpdateReport report, link_->Update(request, pool_.get()));
  if (report.non_finite_variable.has_value()) {
    return NonFiniteError(*report.non_finite_variable, "its share of the round was broken off");
  }
  if (report.chunks_skipped == 0) return Status::Ok();
  return DeadlineExceededError(std::to_string(report.chunks_skipped) + " chunks of segment '" +
                               control()->name() + "' stayed locked in round " +
                               std::to_string(round) +
                               ": the worker that holds them is stopped [SMB-E187]");
}

// --- Each other --------------------------------------------------------------

Status AttachedSegment::Barrier(const std::vector<uint32_t>& workers,
                                const WaitOptions& options) {
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, this->member());
  TF_SMB_ASSIGN_OR_RETURN(const uint64_t barrier, control()->ArriveAtBarrier(member, workers));
  const Status status =
      WaitFor(*control(), options, [&]() -> Result<std::optional<std::string>> {
        TF_SMB_ASSIGN_OR_RETURN(const std::vector<uint32_t> missing,
                                control()->MissingAtBarrier(member, barrier));
        if (missing.empty()) return std::optional<std::string>();
        return std::optional<std::string>(NameWorkers(missing) + " at the barrier");
      });
  // It may have been passed in the last moment: then for all.
  if (!status.ok() && !control()->WithdrawFromBarrier(member, barrier)) {
    return control()->CheckMember(member);
  }
  return status;
}

Result<uint64_t> AttachedSegment::Lock(double lease_s, const WaitOptions& options) {
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, this->member());
  uint64_t token = 0;
  TF_SMB_RETURN_IF_ERROR(WaitFor(*control(), options, [&]() -> Result<std::optional<std::string>> {
    TF_SMB_ASSIGN_OR_RETURN(token, control()->TryLock(member, lease_s));
    if (token != 0) return std::optional<std::string>();
    const std::optional<uint32_t> holder = control()->LockHolder();
    return std::optional<std::string>(
        "the lock of segment '" + control()->name() + "', which " +
        (holder.has_value() ? "worker " + std::to_string(*holder) : "another worker") + " has");
  }));
  return token;
}

Status AttachedSegment::Unlock(uint64_t token) {
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, this->member());
  return control()->Unlock(member, token);
}

Result<uint64_t> AttachedSegment::WaitForVersion(uint64_t version, const WaitOptions& options) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  constexpr int64_t kSliceNanos = kNanosPerSecond / 5;  // to poll in between
  const Deadline deadline = Deadline::After(options.timeout_s);
  for (;;) {
    const uint64_t now = control()->WaitForVersion(
        version, std::min(kSliceNanos, deadline.RemainingNanos()));
    if (now >= version) return now;
    if (options.poll) TF_SMB_RETURN_IF_ERROR(options.poll());
    if (deadline.Expired()) {
      return DeadlineExceededError("segment '" + control()->name() + "' is at version " +
                                   std::to_string(now) + ", and did not come to " +
                                   std::to_string(version) + " in time [SMB-E188]");
    }
  }
}

uint64_t AttachedSegment::FirstChunk(uint32_t worker_index) const {
  const uint64_t num_chunks = (layout().size_bytes() + kChunkBytes - 1) / kChunkBytes;
  const uint32_t num_workers = std::max(1u, link_->control()->num_workers());
  return num_chunks * (worker_index % num_workers) / num_workers;
}

ExchangeStats AttachedSegment::stats() const {
  if (fork_guard_.InForkedChild()) return {};
  MutexLock lock(&exchange_mutex_);
  ExchangeStats stats = stats_;
  stats.times_fenced = times_fenced_.load();
  return stats;
}

Status AttachedSegment::last_error() const {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  return last_error_;
}

}  // namespace tf_smb
