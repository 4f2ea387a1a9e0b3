// AttachedSegment: one exchange by the rule.
#include <algorithm>
#include <atomic>
#include <utility>

#include "cc/box/exchange_kernel.h"
#include "cc/client/attached_segment.h"
#include "cc/client/attached_segment_internal.h"

namespace tf_smb {
namespace {

// Elements that a thread looks at for NaN and Inf in one go.
constexpr uint64_t kCheckElements = 2 << 20;
// How long an exchange waits for chunks that others hold, at most; and after it has waited
// once in vain, so that a stopped worker costs the others no more than that.
constexpr double kBusyChunkSeconds = 5.0;
constexpr double kStuckChunkSeconds = 0.005;
constexpr uint32_t kNoVariable = UINT32_MAX;

size_t StalenessBucket(uint64_t staleness) {
  size_t bucket = 0;
  for (; staleness > 0 && bucket + 1 < kStalenessBuckets; staleness /= 2) ++bucket;
  return bucket;
}

bool SameButSteps(const ExchangeChange& a, const ExchangeChange& b) {
  return a.phase == b.phase && a.period == b.period && a.rate == b.rate &&
         a.num_live == b.num_live;
}

}  // namespace

uint64_t SizeBytes(const Layout& layout, const std::vector<ConstSpan>& spans) {
  uint64_t bytes = 0;
  for (const ConstSpan& span : spans) bytes += span.count * ElementBytes(DTypeOf(layout, span));
  return bytes;
}

// --- The base of delta averaging -----------------------------------------------

bool AttachedSegment::KeepsBase() const {
  const auto measures = [](const ExchangeRule& rule) {
    return rule.kind == MoveKind::kDelta && !rule.synchronous;
  };
  if (!schedule_.has_value()) return measures(rule_);
  const std::vector<Phase>& phases = schedule_->phases();
  return std::any_of(phases.begin(), phases.end(),
                     [&](const Phase& phase) { return measures(phase.rule); });
}

Status AttachedSegment::SetBaseLocked(const std::vector<ConstSpan>& values) {
  if (!KeepsBase()) {
    has_base_.clear();
    return Status::Ok();
  }
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
  return fresh.empty() ? Status::Ok() : SetBaseLocked(fresh);
}

Status AttachedSegment::SetBaseAfterLocked(const std::vector<ConstSpan>& local,
                                           const std::vector<void*>& out, MoveOutput output,
                                           ExchangeOutcome outcome) {
  if (outcome == ExchangeOutcome::kUnchanged) return SetBaseLocked(local);
  std::vector<char> left, wide;
  for (size_t i = 0; i < local.size(); ++i) {
    ConstSpan span = local[i];
    const DType dtype = DTypeOf(layout(), span);
    span.data = out[i];
    if (output == MoveOutput::kDelta && outcome == ExchangeOutcome::kMoved) {
      // As the caller will: local - out, rounded to what it holds.
      wide.resize(span.count * ElementBytes(CenterDType(dtype)));
      left.resize(wide.size());
      ToCenter(dtype, out[i], left.data(), span.count);
      DeltaProgress(dtype, local[i].data, left.data(), wide.data(), span.count);
      FromCenter(dtype, wide.data(), left.data(), span.count);
      span.data = left.data();
    }
    TF_SMB_RETURN_IF_ERROR(SetBaseLocked({span}));
  }
  return Status::Ok();
}

// --- The exchange ---------------------------------------------------------------

Result<ExchangeOutcome> AttachedSegment::Exchange(const std::vector<ConstSpan>& local,
                                                  const std::vector<void*>& out,
                                                  MoveOutput output, uint64_t steps) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout(), local));
  MutexLock lock(&exchange_mutex_);
  if (rule_.synchronous) {
    return KeepError(FailedPreconditionError(
        "the rule of segment '" + control()->name() +
        "' averages in rounds, which an exchange of one worker is none of [SMB-E197]"));
  }
  Result<ExchangeOutcome> outcome =
      ExchangeLocked(local, out, output, ProgressLocked(steps, steps));
  if (outcome.ok() && *outcome != ExchangeOutcome::kSkipped) steps_at_exchange_ = steps;
  return KeepError(std::move(outcome));
}

Result<ExchangeOutcome> AttachedSegment::ExchangeLocked(const std::vector<ConstSpan>& local,
                                                        const std::vector<void*>& out,
                                                        MoveOutput output,
                                                        const Progress& progress) {
  const int64_t start_nanos = MonotonicNanos();
  TF_SMB_ASSIGN_OR_RETURN(const std::optional<MemberId> member, CurrentMember());
  if (!member.has_value()) return Skip(/*waiting_s=*/0.0);
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t worker_index, this->worker_index());
  if (finite_check_ == FiniteCheck::kBefore) TF_SMB_RETURN_IF_ERROR(CheckFinite(local));
  const bool measures = rule_.kind == MoveKind::kDelta;
  if (measures) TF_SMB_RETURN_IF_ERROR(EnsureBaseLocked(local));
  ExchangeRecord record;
  record.steps = progress.steps;
  record.num_live = std::max(1u, control()->CountLive());

  UpdateRequest request;
  const bool others_moved = control()->version() != last_version_;
  request.move = chooser_.Next(rule_, record.num_live, others_moved, output);
  const bool copies = request.move.kind == MoveKind::kCopy;
  request.local = local;
  if (!copies) request.out = out;
  request.last = measures ? last_.data() : nullptr;
  request.first_chunk = FirstChunk(worker_index);
  request.busy_chunk_timeout_s =
      stuck_ ? kStuckChunkSeconds : std::min(kBusyChunkSeconds, control()->lease_s());
  TF_SMB_ASSIGN_OR_RETURN(const UpdateReport report,
                          copies ? link_->Update(request, pool_.get())
                                 : MoveLocked(request, record.num_live));
  if (report.non_finite_variable.has_value()) {
    return NonFiniteError(*report.non_finite_variable,
                          "its exchange was broken off; none of it reached the center");
  }

  control()->PublishProgress(*member, progress);
  if (!measures) has_base_.clear();  // what another rule moved is no progress
  record.staleness = report.version_before - std::min(report.version_before, last_version_);
  last_version_ = report.version_after;
  stuck_ = report.chunks_skipped > 0;
  record.chunks_skipped = report.chunks_skipped;
  record.rate = request.move.rate;
  record.moved_bytes = SizeBytes(layout(), local) * (copies ? 1 : 2);
  record.seconds = static_cast<double>(MonotonicNanos() - start_nanos) / kNanosPerSecond;
  Record(record);
  return copies ? ExchangeOutcome::kUnchanged : ExchangeOutcome::kMoved;
}

Result<UpdateReport> AttachedSegment::MoveLocked(const UpdateRequest& request,
                                                 uint32_t num_live) {
  if (statistics_.empty()) return MoveWeightsLocked(request);
  UpdateRequest weights = request, statistics = request;
  for (UpdateRequest* const part : {&weights, &statistics}) {
    part->local.clear();
    part->out.clear();
  }
  for (size_t i = 0; i < request.local.size(); ++i) {
    UpdateRequest& part = statistics_[request.local[i].variable] ? statistics : weights;
    part.local.push_back(request.local[i]);
    part.out.push_back(request.out[i]);
  }
  // The last of several meets the center half way: at rate 1 the two would change places.
  statistics.move = {MoveKind::kElastic, num_live > 1 ? 1.0 / num_live : 0.5,
                     request.move.output};
  statistics.last = nullptr;
  if (statistics.local.empty()) return MoveWeightsLocked(weights);
  if (weights.local.empty()) return link_->Update(statistics, pool_.get());
  weights.advance_version = false;
  TF_SMB_ASSIGN_OR_RETURN(const UpdateReport first, MoveWeightsLocked(weights));
  if (first.non_finite_variable.has_value()) return first;
  TF_SMB_ASSIGN_OR_RETURN(UpdateReport report, link_->Update(statistics, pool_.get()));
  report.version_before = first.version_before;
  report.chunks_moved += first.chunks_moved;
  report.chunks_skipped += first.chunks_skipped;
  return report;
}

Result<UpdateReport> AttachedSegment::MoveWeightsLocked(const UpdateRequest& request) {
  return rule_.atomic ? link_->Update(request, pool_.get()) : ReadThenAccumulateLocked(request);
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
  addition.advance_version = request.advance_version;
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

// --- Statistics -------------------------------------------------------------------

ExchangeOutcome AttachedSegment::Skip(double waiting_s) {
  MutexLock lock(&stats_mutex_);
  ++stats_.skipped_exchanges;
  stats_.exchange_s += waiting_s;
  stats_.waiting_s += waiting_s;
  return ExchangeOutcome::kSkipped;
}

Result<ExchangeOutcome> AttachedSegment::KeepError(Result<ExchangeOutcome> outcome) {
  MutexLock lock(&stats_mutex_);
  last_error_ = outcome.status();
  return outcome;
}

void AttachedSegment::Record(const ExchangeRecord& record) {
  const ExchangeChange now{record.steps, phase_.load(), period_.load(), record.rate,
                           record.num_live};
  MutexLock lock(&stats_mutex_);
  stats_.exchanges += 1;
  stats_.rounds += record.staleness.has_value() ? 0 : 1;
  stats_.skipped_chunks += record.chunks_skipped;
  stats_.moved_bytes += record.moved_bytes;
  stats_.exchange_s += record.seconds;
  stats_.waiting_s += record.waiting_s;
  stats_.last_staleness = record.staleness.value_or(0);
  if (record.staleness.has_value()) {
    stats_.staleness_histogram[StalenessBucket(*record.staleness)] += 1;
  }
  stats_.last_rate = record.rate;
  stats_.last_num_live = record.num_live;
  const bool changed = !last_exchange_.has_value() || !SameButSteps(*last_exchange_, now);
  last_exchange_ = now;
  if (!changed) return;
  if (stats_.changes.size() < kMaxRememberedChanges) {
    stats_.changes.push_back(now);
  } else {
    ++stats_.changes_forgotten;
  }
}

ExchangeStats AttachedSegment::stats() const {
  if (fork_guard_.InForkedChild()) return {};
  MutexLock lock(&stats_mutex_);
  ExchangeStats stats = stats_;
  stats.times_fenced = times_fenced_.load();
  return stats;
}

Status AttachedSegment::last_error() const {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  MutexLock lock(&stats_mutex_);
  return last_error_;
}

}  // namespace tf_smb
