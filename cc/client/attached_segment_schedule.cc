// AttachedSegment: rule and period, by the schedule.
#include <algorithm>
#include <utility>

#include "cc/client/attached_segment.h"
#include "cc/client/attached_segment_internal.h"

namespace tf_smb {

// --- What is set -------------------------------------------------------------------

Status AttachedSegment::SetRule(const ExchangeRule& rule) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(rule.Check());
  MutexLock lock(&exchange_mutex_);
  schedule_.reset();
  phase_.store(0);
  rule_ = rule;
  MutexLock lease_lock(&lease_mutex_);
  schedule_words_.clear();
  return Status::Ok();
}

Status AttachedSegment::SetSchedule(const Schedule& schedule, uint64_t first_position) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  std::string before;
  std::optional<MemberId> member;
  {
    MutexLock lease_lock(&lease_mutex_);
    before = std::exchange(schedule_words_, schedule.ToString());
    member = member_;
  }
  const Status agreed = member.has_value() ? AgreeOnSchedule(*member) : Status::Ok();
  if (!agreed.ok()) {
    MutexLock lease_lock(&lease_mutex_);
    schedule_words_ = before;
    return agreed;
  }
  schedule_ = schedule;
  begun_ = control()->seeded();
  SetPhaseLocked(begun_ ? control()->phase() : schedule.PhaseAt(first_position));
  entered_incarnation_ = 0;
  steps_at_exchange_ = first_position;
  if (schedule.unit() == ScheduleUnit::kEpochs) {
    steps_at_exchange_.reset();
    if (first_position == 0) steps_at_exchange_ = 0;
  }
  return Status::Ok();
}

Status AttachedSegment::SetPeriod(uint64_t period) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckPeriod(period));
  MutexLock lock(&exchange_mutex_);
  period_.store(period);
  return Status::Ok();
}

Status AttachedSegment::SetStatistics(std::vector<bool> statistics) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  const size_t count = layout().variables().size();
  if (statistics.size() != count) {
    return InvalidArgumentError("of each of the " + std::to_string(count) +
                                " variables it must be said whether it is a statistic, got " +
                                std::to_string(statistics.size()) + " words [SMB-E199]");
  }
  MutexLock lock(&exchange_mutex_);
  // A statistic has no base that is kept up.
  for (size_t v = 0; v < has_base_.size() && !statistics_.empty(); ++v) {
    if (statistics_[v] && !statistics[v]) has_base_[v] = false;
  }
  const bool any = std::find(statistics.begin(), statistics.end(), true) != statistics.end();
  statistics_ = any ? std::move(statistics) : std::vector<bool>();
  return Status::Ok();
}

// --- Phases --------------------------------------------------------------------------

void AttachedSegment::SetPhaseLocked(uint64_t phase) {
  const std::vector<Phase>& phases = schedule_->phases();
  const Phase& now = phases[std::min<uint64_t>(phase, phases.size() - 1)];
  rule_ = now.rule;
  period_.store(now.period);
  phase_.store(phase);
  closing_made_ = false;
  phase_is_new_ = true;
}

void AttachedSegment::BeginScheduleLocked(const MemberId& member) {
  if (!begun_ && control()->seeded()) {
    begun_ = true;
    const uint64_t present = control()->phase();
    if (present != phase_.load()) SetPhaseLocked(present);
  }
  if (entered_incarnation_ == member.incarnation) return;
  control()->EnterPhase(member, phase_.load());
  entered_incarnation_ = member.incarnation;
}

Status AttachedSegment::FollowScheduleLocked() {
  steps_at_exchange_ = std::max(steps_at_exchange_.value_or(0), seen_steps_);
  const Result<MemberId> member = this->member();
  if (!member.ok()) return Status::Ok();  // it will, when it is one
  BeginScheduleLocked(*member);
  EnterReachedPhaseLocked(*member);
  return Status::Ok();
}

bool AttachedSegment::EnterReachedPhaseLocked(const MemberId& member) {
  const uint64_t reached = control()->phase();
  if (reached <= phase_.load()) return false;
  SetPhaseLocked(reached);
  control()->EnterPhase(member, reached);
  return true;
}

Progress AttachedSegment::ProgressLocked(uint64_t steps, uint64_t batches) const {
  return {steps, epoch_, batches - std::min(batches, batches_at_epoch_)};
}

uint64_t AttachedSegment::SinceLocked(uint64_t steps) {
  seen_steps_ = steps;
  if (!steps_at_exchange_.has_value()) steps_at_exchange_ = std::max<uint64_t>(steps, 1) - 1;
  // Fewer than before: it counts anew.
  return steps >= *steps_at_exchange_ ? steps - *steps_at_exchange_ : steps;
}

bool AttachedSegment::EndsPhaseLocked(uint64_t steps) const {
  const bool by_steps = schedule_->unit() == ScheduleUnit::kSteps;
  return schedule_->EndsPhase(phase_.load(), by_steps ? steps : epoch_);
}

// --- In every step ---------------------------------------------------------------------

Status AttachedSegment::BeginEpoch(uint64_t epoch, uint64_t batches) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  epoch_ = epoch;
  batches_at_epoch_ = batches;
  return Status::Ok();
}

Result<bool> AttachedSegment::IsDue(uint64_t steps, uint64_t batches) {
  static_cast<void>(batches);  // no schedule counts them yet
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&exchange_mutex_);
  TF_SMB_ASSIGN_OR_RETURN(const std::optional<MemberId> member, CurrentMember());
  const uint64_t since = SinceLocked(steps);
  const bool scheduled = schedule_.has_value() && member.has_value();
  if (scheduled) BeginScheduleLocked(*member);
  if (since >= period_.load()) return true;
  return scheduled && PhaseIsDueLocked(*member, steps);
}

bool AttachedSegment::PhaseIsDueLocked(const MemberId& member, uint64_t steps) {
  const bool ends = EndsPhaseLocked(steps);
  const bool ahead = control()->phase() > phase_.load();
  if (!ends && !ahead) return false;
  const uint64_t since = SinceLocked(steps);
  const bool by_epochs = schedule_->unit() == ScheduleUnit::kEpochs;
  if (rule_.synchronous && !ahead) return since > 0 || by_epochs;
  // Asynchronously, a phase has one last exchange, whoever ended it.
  if (!rule_.synchronous && !closing_made_) return ahead || since > 0 || by_epochs;
  if (!ahead && !control()->TryEndPhase(member, phase_.load())) return false;
  EnterReachedPhaseLocked(member);
  return since >= period_.load();
}

Result<ExchangeOutcome> AttachedSegment::ExchangeScheduled(const std::vector<ConstSpan>& local,
                                                           const std::vector<void*>& out,
                                                           MoveOutput output, uint64_t steps,
                                                           uint64_t batches,
                                                           const WaitOptions& options) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), local));
  MutexLock lock(&exchange_mutex_);
  if (schedule_.has_value()) {
    const Result<MemberId> member = this->member();
    if (member.ok()) BeginScheduleLocked(*member);
  }
  const uint64_t since = SinceLocked(steps);
  if (rule_.synchronous) {
    RoundWork work(local, out, options);
    work.progress = ProgressLocked(steps, batches);
    work.weight = static_cast<double>(std::max<uint64_t>(1, since));
    return KeepError(RoundScheduledLocked(&work));
  }
  Result<ExchangeOutcome> outcome =
      ExchangeLocked(local, out, output, ProgressLocked(steps, batches));
  if (!outcome.ok() || *outcome == ExchangeOutcome::kSkipped) return KeepError(outcome);
  steps_at_exchange_ = steps;
  if (schedule_.has_value()) {
    const Status left = LeavePhaseLocked(local, out, output, *outcome, steps);
    if (!left.ok()) outcome = left;
  }
  return KeepError(std::move(outcome));
}

// After an exchange of an asynchronous phase, which may have been its last.
Status AttachedSegment::LeavePhaseLocked(const std::vector<ConstSpan>& local,
                                         const std::vector<void*>& out, MoveOutput output,
                                         ExchangeOutcome outcome, uint64_t steps) {
  const Result<MemberId> member = this->member();
  if (!member.ok()) return Status::Ok();
  if (EndsPhaseLocked(steps)) {
    closing_made_ = true;
    static_cast<void>(control()->TryEndPhase(*member, phase_.load()));  // or IsDue will
  }
  const bool has_base = rule_.kind == MoveKind::kDelta;
  if (!EnterReachedPhaseLocked(*member) || has_base || !KeepsBase()) return Status::Ok();
  return SetBaseAfterLocked(local, out, output, outcome);
}

// --- Rounds of a schedule ------------------------------------------------------------------

Result<ExchangeOutcome> AttachedSegment::RoundScheduledLocked(RoundWork* work) {
  TF_SMB_ASSIGN_OR_RETURN(const std::optional<MemberId> member, CurrentMember());
  if (!member.has_value()) return Skip(/*waiting_s=*/0.0);
  work->member = *member;
  TF_SMB_ASSIGN_OR_RETURN(work->worker_index, this->worker_index());
  TF_SMB_RETURN_IF_ERROR(CheckFinite(work->local));
  if (schedule_.has_value()) work->phase = phase_.load();
  TF_SMB_ASSIGN_OR_RETURN(const bool closed, TakePartLocked(work));
  if (!closed) return Skip(work->waiting_s);
  const Status read = ReadMeanLocked(work);
  // Nobody can end the next phase before this worker has finished the round.
  const bool entered = schedule_.has_value() && EnterReachedPhaseLocked(*member);
  control()->FinishRound(*member, work->result.round);
  TF_SMB_RETURN_IF_ERROR(read);
  if (!entered) phase_is_new_ = false;
  steps_at_exchange_ = work->progress.steps;
  if (entered && !rule_.synchronous) AwaitReaders(work);
  TF_SMB_RETURN_IF_ERROR(FinishRoundLocked(work));
  return ExchangeOutcome::kReplaced;
}

Result<bool> AttachedSegment::TakePartLocked(RoundWork* work) {
  const auto take = [&]() REQUIRES(exchange_mutex_) -> Result<bool> {
    TF_SMB_RETURN_IF_ERROR(EnterRound(work));
    if (!PrepareShareLocked(work)) return false;
    TF_SMB_RETURN_IF_ERROR(AddShareLocked(work));
    TF_SMB_RETURN_IF_ERROR(CloseRound(work));
    return true;
  };
  const Result<bool> taken = take();
  if (taken.ok() || !work->polled.ok()) return taken;
  switch (taken.status().code()) {
    case StatusCode::kAborted:             // fenced
    case StatusCode::kDeadlineExceeded:    // it came too late for the open round, or a stopped
                                           // worker holds a chunk
    case StatusCode::kFailedPrecondition:  // the round was closed without it
      return false;
    default:
      return taken;
  }
}

bool AttachedSegment::PrepareShareLocked(RoundWork* work) {
  if (!schedule_.has_value()) return true;
  EnterReachedPhaseLocked(work->member);
  const uint64_t round = work->result.round;
  if (round == 0) return false;
  if (!rule_.synchronous) {
    control()->FinishShare(work->member, round, /*ends_phase=*/false);
    control()->FinishRound(work->member, round);
    return false;
  }
  work->phase = phase_.load();
  work->first_of_phase = phase_is_new_;
  work->ends_phase = EndsPhaseLocked(work->progress.steps);
  return true;
}

}  // namespace tf_smb
