#include "cc/client/attached_segment.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace tf_smb {
namespace {

// More than four do not make memory faster, and the others have work of their own.
constexpr int kMaxThreads = 4;
// A lease survives four lost renewals.
constexpr int kRenewalsPerLease = 5;

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
  Status status;
  {
    MutexLock lock(&lease_mutex_);
    while (!join_status_.has_value()) lease_changed_->Wait(&lease_mutex_);
    status = *join_status_;
  }
  if (status.ok()) {
    const Result<MemberId> member = this->member();
    status = member.ok() ? AgreeOnSchedule(*member) : member.status();
  }
  if (!status.ok()) EndMembership();
  return status;
}

void AttachedSegment::Leave() {
  if (fork_guard_.InForkedChild()) return;
  MutexLock membership_lock(&membership_mutex_);
  EndMembership();
}

void AttachedSegment::EndMembership() {
  StopLeaseThread();
  MutexLock lock(&lease_mutex_);
  join_status_.reset();
}

Status AttachedSegment::AgreeOnSchedule(const MemberId& member) {
  std::string words;
  {
    MutexLock lock(&lease_mutex_);
    words = schedule_words_;
  }
  if (words.empty()) return Status::Ok();
  TF_SMB_ASSIGN_OR_RETURN(const std::string in_force, control()->AgreeOnSchedule(member, words));
  if (in_force == words) return Status::Ok();
  return FailedPreconditionError("this worker's schedule is '" + words +
                                 "', but the others train by '" + in_force +
                                 "': give all workers the same [SMB-E198]");
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
  control()->SetFirstPhase(member, phase());
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
  last_version_ = control()->version();
  if (schedule_.has_value()) TF_SMB_RETURN_IF_ERROR(FollowScheduleLocked());
  return SetBaseLocked(values);
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

}  // namespace tf_smb
