#include "cc/client/attached_segment.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "cc/box/exchange_kernel.h"

namespace tf_smb {
namespace {

// More than four do not make memory faster, and the others have work of their own.
constexpr int kMaxThreads = 4;
// A lease survives four lost renewals.
constexpr int kRenewalsPerLease = 5;
// Up to here all weights are looked at for NaN and Inf before the first is moved: they
// are still in the cache then. Of larger models the beginning of each variable is,
// since a NaN in training spreads over whole variables, and the rest as it is moved.
constexpr uint64_t kSmallModelBytes = 16 << 20;
constexpr uint64_t kSampleElements = 4096;

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

uint64_t NumChunks(const Layout& layout) {
  return (layout.num_elements() + kChunkElements - 1) / kChunkElements;
}

bool IsSmall(const Layout& layout) {
  return layout.num_elements() * sizeof(float) <= kSmallModelBytes;
}

Status NonFiniteError(const Variable& variable, const char* consequence) {
  return InvalidArgumentError("variable " + variable.ToString() +
                              " of this worker holds NaN or Inf, so " + consequence +
                              ": the training diverged (try a smaller learning rate)");
}

}  // namespace

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
  if (joined()) return FailedPreconditionError("this segment is joined already");
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
                                 "' is not joined: join it first");
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
  if (rule.kind != rule_.kind) last_ = MemoryMapping();
  rule_ = rule;
  return Status::Ok();
}

Result<bool> AttachedSegment::TrySeed(const std::vector<const float*>& values,
                                      const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, this->member());
  if (!control()->BeginSeeding(member)) return false;
  TF_SMB_RETURN_IF_ERROR(Write(values, deadline));
  control()->FinishSeeding(member);
  // A seeder that was fenced meanwhile has not seeded: somebody else may.
  return control()->CheckMember(member).ok();
}

Status AttachedSegment::Read(const std::vector<float*>& values, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  return link_->Read(values, deadline);
}

Status AttachedSegment::Write(const std::vector<const float*>& values, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(link_->Write(values, deadline));
  MutexLock lock(&exchange_mutex_);
  last_version_ = control()->version();
  return Status::Ok();
}

Status AttachedSegment::Rebase(const std::vector<const float*>& values) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  return RebaseLocked(values);
}

Status AttachedSegment::RebaseLocked(const std::vector<const float*>& values) {
  last_version_ = control()->version();
  if (rule_.kind != MoveKind::kDelta) return Status::Ok();
  if (last_.data() == nullptr) {
    TF_SMB_ASSIGN_OR_RETURN(
        last_, MemoryMapping::MapPrivate(layout().num_elements() * sizeof(float)));
  }
  float* const last = reinterpret_cast<float*>(last_.data());
  for (size_t v = 0; v < values.size(); ++v) {
    const Variable& variable = layout().variables()[v];
    if (variable.num_elements == 0) continue;  // its pointer may be null
    std::memcpy(last + variable.offset_elements, values[v],
                variable.num_elements * sizeof(float));
  }
  return Status::Ok();
}

Result<ExchangeOutcome> AttachedSegment::Exchange(const std::vector<const float*>& local,
                                                  const std::vector<float*>& out,
                                                  MoveOutput output, uint64_t steps) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  Result<ExchangeOutcome> outcome = ExchangeLocked(local, out, output, steps);
  last_error_ = outcome.status();
  return outcome;
}

Result<ExchangeOutcome> AttachedSegment::ExchangeLocked(const std::vector<const float*>& local,
                                                        const std::vector<float*>& out,
                                                        MoveOutput output, uint64_t steps) {
  const int64_t start_nanos = MonotonicNanos();
  const Result<MemberId> member = this->member();
  if (!member.ok() || !control()->CheckMember(*member).ok()) {
    {
      MutexLock lock(&lease_mutex_);
      const bool renewing = join_status_.has_value() && join_status_->ok();
      if (!renewing) return NotJoinedError();
      renew_now_ = true;
    }
    ++stats_.skipped_exchanges;
    lease_changed_->NotifyAll();
    return ExchangeOutcome::kSkipped;
  }
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t worker_index, this->worker_index());
  TF_SMB_RETURN_IF_ERROR(CheckFinite(local));
  if (rule_.kind == MoveKind::kDelta && last_.data() == nullptr) {
    TF_SMB_RETURN_IF_ERROR(RebaseLocked(local));
  }
  const uint32_t num_live = std::max(1u, control()->CountLive());

  ExchangeRequest request;
  const bool others_moved = control()->version() != last_version_;
  request.move = chooser_.Next(rule_, num_live, others_moved, output);
  request.local = &local;
  request.out = &out;
  request.last = rule_.kind == MoveKind::kDelta ? reinterpret_cast<float*>(last_.data()) : nullptr;
  request.first_chunk = FirstChunk(worker_index);
  TF_SMB_ASSIGN_OR_RETURN(const ExchangeReport report, link_->Exchange(request, pool_.get()));
  if (report.non_finite_variable.has_value()) {
    return NonFiniteError(layout().variables()[*report.non_finite_variable],
                          "its exchange was broken off; none of it reached the center");
  }

  control()->PublishProgress(*member, steps);
  stats_.last_staleness =
      report.version_before - std::min(report.version_before, last_version_);
  last_version_ = report.version_after;
  stats_.exchanges += 1;
  stats_.skipped_chunks += report.chunks_skipped;
  stats_.last_rate = request.move.rate;
  stats_.last_num_live = num_live;
  stats_.exchange_s +=
      static_cast<double>(MonotonicNanos() - start_nanos) / kNanosPerSecond;
  return request.move.kind == MoveKind::kCopy ? ExchangeOutcome::kUnchanged
                                              : ExchangeOutcome::kMoved;
}

Status AttachedSegment::CheckFinite(const std::vector<const float*>& local) const {
  const uint64_t limit = IsSmall(layout()) ? layout().num_elements() : kSampleElements;
  for (size_t v = 0; v < local.size(); ++v) {
    const Variable& variable = layout().variables()[v];
    if (!AllFinite(local[v], std::min(variable.num_elements, limit))) {
      return NonFiniteError(variable, "nothing was exchanged");
    }
  }
  return Status::Ok();
}

uint64_t AttachedSegment::FirstChunk(uint32_t worker_index) const {
  const uint64_t num_chunks = NumChunks(layout());
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
