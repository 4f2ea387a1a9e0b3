// AttachedSegment: rounds, in which all workers average at once.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cc/client/attached_segment.h"
#include "cc/client/attached_segment_internal.h"

namespace tf_smb {
namespace {

using Words = std::optional<std::string>;

double Seconds(int64_t nanos) { return static_cast<double>(nanos) / kNanosPerSecond; }

// Those that train by an earlier phase, and will come to `phase`: until then they move the
// center by the rule of theirs.
std::vector<uint32_t> BehindPhase(SegmentControl* control, uint64_t phase) {
  std::vector<uint32_t> behind;
  for (const MemberInfo& info : control->Members()) {
    const bool comes = info.state == MemberState::kLive && info.training &&
                       info.arrived <= info.finished;
    if (comes && info.phase < phase) behind.push_back(info.worker_index);
  }
  return behind;
}

}  // namespace

Result<RoundResult> AttachedSegment::Average(const std::vector<ConstSpan>& local,
                                             const std::vector<void*>& out, double weight,
                                             uint64_t steps, const WaitOptions& options) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), local));
  if (!std::isfinite(weight) || weight <= 0) {
    return InvalidArgumentError("the weight of a worker in a round must be a finite number above "
                                "0, got " + std::to_string(weight) + " [SMB-E186]");
  }
  RoundWork work(local, out, options);
  TF_SMB_ASSIGN_OR_RETURN(work.member, this->member());
  TF_SMB_ASSIGN_OR_RETURN(work.worker_index, this->worker_index());
  MutexLock lock(&exchange_mutex_);
  TF_SMB_RETURN_IF_ERROR(CheckFinite(local));
  work.weight = weight;
  work.progress = ProgressLocked(steps, steps);
  TF_SMB_RETURN_IF_ERROR(EnterRound(&work));
  TF_SMB_RETURN_IF_ERROR(AddShareLocked(&work));
  TF_SMB_RETURN_IF_ERROR(CloseRound(&work));
  const Status read = ReadMeanLocked(&work);
  control()->FinishRound(work.member, work.result.round);
  TF_SMB_RETURN_IF_ERROR(read);
  TF_SMB_RETURN_IF_ERROR(FinishRoundLocked(&work));
  return work.result;
}

Status AttachedSegment::WaitInRound(RoundWork* work, double timeout_s, const Pending& pending) {
  WaitOptions options = work->options;
  options.timeout_s = timeout_s;
  if (options.poll) {
    options.poll = [work] {
      work->polled = work->options.poll();
      return work->polled;
    };
  }
  const int64_t start_nanos = MonotonicNanos();
  const Status status = WaitFor(*control(), options, pending);
  work->waiting_s += Seconds(MonotonicNanos() - start_nanos);
  return status;
}

Status AttachedSegment::EnterRound(RoundWork* work) {
  return WaitInRound(work, work->options.timeout_s, [&]() -> Result<Words> {
    if (work->phase.has_value() && control()->phase() > *work->phase) return Words();
    TF_SMB_ASSIGN_OR_RETURN(work->result.round, control()->EnterRound(work->member));
    if (work->result.round != 0) return Words();
    return Words("the round before to end, for " + NameWorkers(control()->MissingInRound()));
  });
}

// OK also when the time is over: then it adds its share out of turn.
Status AttachedSegment::AwaitTurn(RoundWork* work) {
  const uint64_t round = work->result.round;
  const auto pending = [&]() -> Result<Words> {
    if (control()->rounds_closed() >= round) return Words();  // without it, as it will be told
    TF_SMB_RETURN_IF_ERROR(control()->CheckMember(work->member));
    if (work->first_of_phase) {
      const std::vector<uint32_t> behind = BehindPhase(control(), *work->phase);
      if (!behind.empty()) return Words(NameWorkers(behind) + " to end the phase before");
    }
    if (control()->IsTurn(work->member, round)) return Words();
    std::vector<uint32_t> earlier = control()->MissingInRound();
    const auto end = std::remove_if(earlier.begin(), earlier.end(), [&](uint32_t index) {
      return index >= work->worker_index;
    });
    earlier.erase(end, earlier.end());
    return Words("the share of " + NameWorkers(earlier));
  };
  const Status waited = WaitInRound(work, Seconds(work->deadline->RemainingNanos()), pending);
  if (!work->polled.ok()) return work->polled;
  return waited.code() == StatusCode::kDeadlineExceeded ? Status::Ok() : waited;
}

Status AttachedSegment::AddShareLocked(RoundWork* work) {
  const uint64_t round = work->result.round;
  const auto add = [&]() REQUIRES(exchange_mutex_) -> Status {
    TF_SMB_RETURN_IF_ERROR(AwaitTurn(work));
    UpdateRequest request;
    request.local = work->local;
    request.round = RoundShare{round, work->weight};
    request.first_chunk = FirstChunk(work->worker_index);
    TF_SMB_ASSIGN_OR_RETURN(const UpdateReport report, link_->Update(request, pool_.get()));
    if (report.non_finite_variable.has_value()) {
      return NonFiniteError(*report.non_finite_variable, "its share of the round was broken off");
    }
    if (report.chunks_skipped == 0) return Status::Ok();
    return DeadlineExceededError(std::to_string(report.chunks_skipped) + " chunks of segment '" +
                                 control()->name() + "' stayed locked in round " +
                                 std::to_string(round) +
                                 ": the worker that holds them is stopped [SMB-E187]");
  };
  work->deadline = Deadline::After(work->options.timeout_s);
  const Status added = add();
  if (added.ok()) control()->PublishProgress(work->member, work->progress);
  // Also of a share that failed: what is in stays in, and nobody waits for the rest.
  control()->FinishShare(work->member, round, added.ok() && work->ends_phase);
  if (!added.ok()) control()->FinishRound(work->member, round);
  return added;
}

Status AttachedSegment::CloseRound(RoundWork* work) {
  RoundResult* const result = &work->result;
  const Status waited = WaitInRound(
      work, Seconds(work->deadline->RemainingNanos()), [&]() -> Result<Words> {
        if (control()->TryCloseRound(result->round, /*force=*/false)) return Words();
        TF_SMB_RETURN_IF_ERROR(control()->CheckMember(work->member));
        result->missing = control()->MissingInRound();
        return Words("the share of " + NameWorkers(result->missing));
      });
  if (waited.ok()) {
    result->missing.clear();
    return waited;
  }
  if (work->polled.ok() && waited.code() == StatusCode::kDeadlineExceeded) {
    control()->TryCloseRound(result->round, /*force=*/true);
    return Status::Ok();
  }
  control()->FinishRound(work->member, result->round);  // nobody waits for it to read the mean
  return waited;
}

Status AttachedSegment::ReadMeanLocked(RoundWork* work) {
  std::vector<Span> mean;
  for (size_t i = 0; i < work->local.size(); ++i) {
    const ConstSpan& span = work->local[i];
    mean.push_back({span.variable, span.first, span.count, work->out[i], span.wide});
  }
  TF_SMB_RETURN_IF_ERROR(
      link_->Read(mean, Deadline::After(work->options.timeout_s), pool_.get()));
  RecordRound(*work);
  return Status::Ok();
}

Status AttachedSegment::FinishRoundLocked(RoundWork* work) {
  std::vector<ConstSpan> base;
  for (size_t i = 0; i < work->local.size(); ++i) {
    const ConstSpan& span = work->local[i];
    base.push_back({span.variable, span.first, span.count, work->out[i], span.wide});
  }
  last_version_ = control()->version();
  return SetBaseLocked(base);
}

// Until the others have read the mean as well, for those who go on to move the center.
void AttachedSegment::AwaitReaders(RoundWork* work) {
  static_cast<void>(
      WaitInRound(work, work->options.timeout_s, [&]() -> Result<Words> {
        const std::vector<uint32_t> missing = control()->MissingInRound();
        const bool next_is_open =
            std::find(missing.begin(), missing.end(), work->worker_index) != missing.end();
        if (missing.empty() || next_is_open) return Words();
        return Words(NameWorkers(missing) + " to read the mean");
      }));
}

void AttachedSegment::RecordRound(const RoundWork& work) {
  ExchangeRecord record;
  record.steps = work.progress.steps;
  record.rate = 1.0;  // the whole way to the mean
  record.num_live = std::max(1u, control()->CountLive());
  record.moved_bytes = 2 * SizeBytes(layout(), work.local);
  record.seconds = Seconds(MonotonicNanos() - work.start_nanos);
  record.waiting_s = work.waiting_s;
  Record(record);
}

}  // namespace tf_smb
