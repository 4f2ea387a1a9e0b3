#include "cc/box/segment_data.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "cc/box/stream_copy.h"
#include "cc/common/mutex.h"

namespace tf_smb {
namespace {

Status DamagedChunk(uint64_t index) {
  return DataLossError("the lock of chunk " + std::to_string(index) + " is damaged [SMB-E070]")
      .WithScope(FailureScope::kServer);
}

Status DamagedWeight(uint64_t index) {
  return DataLossError("the weight of the mean in chunk " + std::to_string(index) + " is damaged"
                       " [SMB-E071]")
      .WithScope(FailureScope::kServer);
}

Status LockedChunk(const Segment& segment, uint64_t index) {
  return DeadlineExceededError("chunk " + std::to_string(index) + " of segment '" +
                               segment.name() +
                               "' stayed locked: the worker that holds it is stopped [SMB-E072]");
}

template <typename SpanType>
Status CheckSpansOf(const Layout& layout, const std::vector<SpanType>& spans) {
  const std::vector<Variable>& variables = layout.variables();
  for (size_t i = 0; i < spans.size(); ++i) {
    const SpanType& span = spans[i];
    if (span.variable >= variables.size()) {
      return InvalidArgumentError("the segment has " + std::to_string(variables.size()) +
                                  " variables, there is no variable " +
                                  std::to_string(span.variable) + " [SMB-E073]");
    }
    if (i > 0 && span.variable <= spans[i - 1].variable) {
      return InvalidArgumentError("variable " + variables[span.variable].ToString() +
                                  " comes after a later one, or twice [SMB-E074]");
    }
    const uint64_t size = variables[span.variable].num_elements;
    if (span.first > size || span.count > size - span.first) {
      return InvalidArgumentError("elements " + std::to_string(span.first) + " and " +
                                  std::to_string(span.count) + " from there are not within " +
                                  variables[span.variable].ToString() + " [SMB-E075]");
    }
  }
  return Status::Ok();
}

Status CheckAveraged(const Layout& layout, const std::vector<ConstSpan>& spans) {
  for (const ConstSpan& span : spans) {
    const Variable& variable = layout.variables()[span.variable];
    if (IsAveraged(variable.dtype)) continue;
    return InvalidArgumentError("variable " + variable.ToString() +
                                " can be read and written, but not averaged or added to: only "
                                "float32, float64, float16 and bfloat16 can [SMB-E076]");
  }
  return Status::Ok();
}

Status CheckUpdate(const UpdateRequest& request) {
  const MoveKind kind = request.move.kind;
  if (request.round.has_value()) {
    const double weight = request.round->weight;
    if (!std::isfinite(weight) || weight <= 0) {
      return InvalidArgumentError("the weight of a share must be a finite number above 0, got " +
                                  std::to_string(weight) + " [SMB-E077]");
    }
  } else if (kind != MoveKind::kCopy && kind != MoveKind::kElastic && kind != MoveKind::kDelta &&
             kind != MoveKind::kAccumulate) {
    return InvalidArgumentError("an update cannot make move number " +
                                std::to_string(static_cast<int>(kind)) + " [SMB-E078]");
  }
  const bool both_sides =
      !request.round.has_value() && (kind == MoveKind::kElastic || kind == MoveKind::kDelta);
  if (both_sides || !request.out.empty()) {
    if (request.out.size() != request.local.size()) {
      return InvalidArgumentError("an update needs as many outputs as values: " +
                                  std::to_string(request.local.size()) + ", got " +
                                  std::to_string(request.out.size()) + " [SMB-E079]");
    }
  }
  if (both_sides && kind == MoveKind::kDelta && request.last == nullptr) {
    return InvalidArgumentError("delta averaging needs the weights of the last exchange"
                                " [SMB-E080]");
  }
  return Status::Ok();
}

// The part of a span that lies in one chunk.
struct Part {
  size_t span;             // its number
  DType dtype;             // of the caller's memory
  uint64_t data_offset;    // bytes, in the caller's memory
  uint64_t center_offset;  // bytes
  uint64_t count;          // elements
  uint64_t center_bytes;
};

// Which chunks the spans touch, and where in them.
template <typename SpanType>
class Selection {
 public:
  Selection(const Segment& segment, const std::vector<SpanType>& spans)
      : segment_(segment), spans_(spans) {
    const std::vector<Variable>& variables = segment.layout().variables();
    spans_of_.assign(variables.size(), kNone);
    for (size_t i = 0; i < spans.size(); ++i) {
      if (spans[i].count == 0) continue;
      const Variable& variable = variables[spans[i].variable];
      spans_of_[spans[i].variable] = i;
      const uint64_t begin = variable.offset_bytes + spans[i].first * variable.element_bytes();
      const uint64_t end = begin + spans[i].count * variable.element_bytes();
      size_bytes_ += end - begin;
      uint64_t chunk = begin / kChunkBytes;
      if (!chunks_.empty()) chunk = std::max(chunk, chunks_.back() + 1);
      for (; chunk * kChunkBytes < end; ++chunk) chunks_.push_back(chunk);
    }
  }

  const std::vector<uint64_t>& chunks() const { return chunks_; }
  // In the center.
  uint64_t size_bytes() const { return size_bytes_; }

  template <typename Body>
  void ForEachPart(uint64_t chunk, Body body) const {
    for (const ChunkPiece& piece : segment_.pieces(chunk)) {
      const size_t number = spans_of_[piece.variable];
      if (number == kNone) continue;
      const SpanType& span = spans_[number];
      const uint64_t first = std::max(piece.first, span.first);
      const uint64_t end = std::min(piece.first + piece.count, span.first + span.count);
      if (first >= end) continue;
      const Variable& variable = segment_.layout().variables()[piece.variable];
      const DType dtype = span.wide ? CenterDType(variable.dtype) : variable.dtype;
      body(Part{number, dtype, (first - span.first) * ElementBytes(dtype),
                piece.center_offset + (first - piece.first) * variable.element_bytes(),
                end - first, (end - first) * variable.element_bytes()});
    }
  }

 private:
  static constexpr size_t kNone = SIZE_MAX;
  const Segment& segment_;
  const std::vector<SpanType>& spans_;
  std::vector<size_t> spans_of_;  // by variable
  std::vector<uint64_t> chunks_;  // ascending
  uint64_t size_bytes_ = 0;
};

void RunOn(ThreadPool* pool, size_t num_chunks, const std::function<void()>& body) {
  if (pool != nullptr && num_chunks > 1) {
    pool->Run(body);
  } else {
    body();
  }
}

// Locks chunks one after the other, each once; shared by the threads that do it. A busy one
// is put off, then waited for: nobody sleeps while there are others to be had.
class ChunkWalk {
 public:
  // Begins at chunk `first`, or the next one that is among them.
  ChunkWalk(Segment* segment, const std::vector<uint64_t>& chunks, uint64_t first)
      : segment_(segment), chunks_(chunks) {
    const auto begin = std::lower_bound(chunks.begin(), chunks.end(), first);
    if (begin != chunks.end()) first_ = static_cast<size_t>(begin - chunks.begin());
  }

  // Calls visit(chunk, outcome) until none is left, or it returns false; kBusy: locked until
  // wait_until(), which is called once all others are done.
  template <typename WaitUntil, typename Visit>
  void Take(const WaitUntil& wait_until, const Visit& visit) {
    std::vector<uint64_t> put_off;
    for (size_t i = next_.fetch_add(1); i < chunks_.size(); i = next_.fetch_add(1)) {
      const uint64_t index = chunks_[(first_ + i) % chunks_.size()];
      const LockOutcome outcome = segment_->TryLockChunk(index);
      if (outcome == LockOutcome::kBusy) {
        put_off.push_back(index);
      } else if (!visit(index, outcome)) {
        return;
      }
    }
    if (put_off.empty()) return;
    const Deadline deadline = wait_until();
    for (const uint64_t index : put_off) {
      if (!visit(index, segment_->LockChunk(index, deadline))) return;
    }
  }
  // No thread takes another one that is not put off.
  void Stop() { next_.store(chunks_.size()); }

 private:
  Segment* const segment_;
  const std::vector<uint64_t>& chunks_;
  size_t first_ = 0;
  std::atomic<size_t> next_{0};
};

// Where a thread's walk begins: others begin elsewhere, spread evenly.
uint64_t FirstChunkOfThread(const Segment& segment) {
  static thread_local const uint32_t golden = static_cast<uint32_t>(gettid()) * 2654435769u;
  return golden * segment.num_chunks() >> 32;
}

// Runs body(chunk) under each chunk's lock.
template <typename Body>
Status ForEachChunk(Segment* segment, const std::vector<uint64_t>& chunks,
                    const Deadline& deadline, ThreadPool* pool, const Body& body) {
  ChunkWalk walk(segment, chunks, FirstChunkOfThread(*segment));
  Mutex mutex;
  Status status;
  const auto visit = [&](uint64_t index, LockOutcome outcome) {
    if (Holds(outcome)) {
      body(index);
      segment->UnlockChunk(index);
      return true;
    }
    walk.Stop();
    MutexLock lock(&mutex);
    status = outcome == LockOutcome::kBroken ? DamagedChunk(index) : LockedChunk(*segment, index);
    return false;
  };
  RunOn(pool, chunks.size(), [&] { walk.Take([&] { return deadline; }, visit); });
  return status;
}

char* DataOf(const Span& span) { return static_cast<char*>(span.data); }
const char* DataOf(const ConstSpan& span) { return static_cast<const char*>(span.data); }

// One pass of an update, shared by the threads that run it.
class UpdatePass {
 public:
  UpdatePass(Segment* segment, const UpdateRequest& request)
      : segment_(segment),
        request_(request),
        move_(request.move),
        selection_(*segment, request.local),
        walk_(segment, selection_.chunks(), request.first_chunk) {
    move_.stream = selection_.size_bytes() >= kStreamBytes;
  }

  size_t num_chunks() const { return selection_.chunks().size(); }

  // Takes chunks until none is left; called by every thread.
  void TakeChunks() {
    walk_.Take([this] { return Deadline::After(request_.busy_chunk_timeout_s); },
               [this](uint64_t index, LockOutcome outcome) {
                 if (outcome != LockOutcome::kBusy) return MoveAndUnlock(index, outcome);
                 Skip(index);
                 skipped_.fetch_add(1);
                 return true;
               });
  }

  Status status() {
    MutexLock lock(&mutex_);
    return status_;
  }
  uint64_t moved() const { return moved_; }
  uint64_t skipped() const { return skipped_; }
  std::optional<uint32_t> non_finite_variable() {
    MutexLock lock(&mutex_);
    return non_finite_variable_;
  }

 private:
  // False if no thread may go on: a damaged lock, a NaN or Inf, a closed round.
  bool MoveAndUnlock(uint64_t index, LockOutcome outcome) {
    if (outcome == LockOutcome::kBroken) return Stop(DamagedChunk(index), std::nullopt);
    std::optional<uint32_t> non_finite;
    Status status;
    if (request_.round.has_value() || move_.kind == MoveKind::kAccumulate) {
      status = MoveWhole(index, &non_finite);
    } else {
      MoveInPlace(index, &non_finite);
    }
    segment_->UnlockChunk(index);
    if (!status.ok() || non_finite.has_value()) return Stop(std::move(status), non_finite);
    moved_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  bool Stop(Status status, std::optional<uint32_t> non_finite) {
    walk_.Stop();
    MutexLock lock(&mutex_);
    if (!status.ok()) status_ = std::move(status);
    if (non_finite.has_value()) non_finite_variable_ = non_finite;
    return false;
  }

  void MoveInPlace(uint64_t index, std::optional<uint32_t>* non_finite) {
    selection_.ForEachPart(index, [&](const Part& part) {
      char* const last = static_cast<char*>(request_.last);
      if (!ApplyMove(move_, part.dtype, Local(part), segment_->center() + part.center_offset,
                     last == nullptr ? nullptr : last + part.center_offset, Out(part),
                     part.count)) {
        *non_finite = request_.local[part.span].variable;
      }
    });
    segment_->chunk(index)->version.fetch_add(1, std::memory_order_relaxed);
  }

  // By way of a side buffer: all of the chunk, or nothing if this process dies.
  Status MoveWhole(uint64_t index, std::optional<uint32_t>* non_finite) {
    ChunkState* const chunk = segment_->chunk(index);
    Move move = move_;
    move.stream = false;
    uint64_t round = chunk->round.load();
    double weight = chunk->weight.load();
    if (request_.round.has_value()) {
      if (!segment_->IsOpenRound(request_.round->round) || round > request_.round->round) {
        return ClosedRound();
      }
      const bool first = round < request_.round->round;
      if (!first && !(weight > 0 && std::isfinite(weight))) return DamagedWeight(index);
      round = request_.round->round;
      weight = (first ? 0.0 : weight) + request_.round->weight;
      move.kind = first ? MoveKind::kCopy : MoveKind::kBlend;
      move.rate = request_.round->weight / weight;
    }
    TF_SMB_ASSIGN_OR_RETURN(const Segment::SideLease side,
                            segment_->LeaseSide(Deadline::After(request_.busy_chunk_timeout_s)));
    FillSide(index, side.data());
    const uint64_t chunk_offset = index * kChunkBytes;
    selection_.ForEachPart(index, [&](const Part& part) {
      char* const next = side.data() + (part.center_offset - chunk_offset);
      char* const center = segment_->center() + part.center_offset;
      const bool copy = move.kind == MoveKind::kCopy;
      if (!ApplyMove(move, part.dtype, Local(part), copy ? next : center, nullptr,
                     copy ? nullptr : next, part.count)) {
        *non_finite = request_.local[part.span].variable;
      }
    });
    if (non_finite->has_value()) return Status::Ok();
    segment_->Publish(index, side, round, weight);
    selection_.ForEachPart(index, [&](const Part& part) {
      if (!request_.out.empty()) {
        std::memcpy(OutOfCenter(part), side.data() + (part.center_offset - chunk_offset),
                    part.center_bytes);
      }
    });
    return Status::Ok();
  }

  // What the parts do not cover: padding, other variables.
  void FillSide(uint64_t index, char* side) {
    uint64_t covered_bytes = 0;
    selection_.ForEachPart(index,
                           [&](const Part& part) { covered_bytes += part.center_bytes; });
    const uint64_t chunk_bytes = segment_->chunk_bytes(index);
    if (covered_bytes == chunk_bytes) return;
    std::memcpy(side, segment_->center() + index * kChunkBytes, chunk_bytes);
  }

  Status ClosedRound() const {
    return FailedPreconditionError("round " + std::to_string(request_.round->round) +
                                   " of segment '" + segment_->name() +
                                   "' was closed before this worker's share was in [SMB-E081]");
  }

  // `out` as if the chunk had not been there.
  void Skip(uint64_t index) {
    const bool whole = request_.round.has_value() || move_.kind == MoveKind::kAccumulate;
    if (request_.out.empty() || whole) return;
    selection_.ForEachPart(index, [&](const Part& part) {
      const char* const local = Local(part);
      void* const out = Out(part);
      const size_t size_bytes = part.count * ElementBytes(part.dtype);
      if (move_.output == MoveOutput::kDelta) {
        std::memset(out, 0, size_bytes);
      } else if (out != local) {
        std::memcpy(out, local, size_bytes);
      }
    });
  }

  const char* Local(const Part& part) const {
    return DataOf(request_.local[part.span]) + part.data_offset;
  }
  void* Out(const Part& part) const {
    if (request_.out.empty()) return nullptr;
    return static_cast<char*>(request_.out[part.span]) + part.data_offset;
  }
  // kAccumulate's is of the center's dtype.
  void* OutOfCenter(const Part& part) const {
    const uint64_t first = part.data_offset / ElementBytes(part.dtype);
    return static_cast<char*>(request_.out[part.span]) +
           first * ElementBytes(CenterDType(part.dtype));
  }

  Segment* const segment_;
  const UpdateRequest& request_;
  Move move_;  // constant after construction
  const Selection<ConstSpan> selection_;
  ChunkWalk walk_;
  std::atomic<uint64_t> moved_{0};
  std::atomic<uint64_t> skipped_{0};
  Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
  std::optional<uint32_t> non_finite_variable_ GUARDED_BY(mutex_);
};

}  // namespace

Status CheckSpans(const Layout& layout, const std::vector<Span>& spans) {
  return CheckSpansOf(layout, spans);
}

Status CheckSpans(const Layout& layout, const std::vector<ConstSpan>& spans) {
  return CheckSpansOf(layout, spans);
}

Status ReadCenter(Segment* segment, const std::vector<Span>& spans, const Deadline& deadline,
                  ThreadPool* pool) {
  TF_SMB_RETURN_IF_ERROR(CheckSpans(segment->layout(), spans));
  const Selection<Span> selection(*segment, spans);
  const bool stream = selection.size_bytes() >= kStreamBytes;
  return ForEachChunk(segment, selection.chunks(), deadline, pool, [&](uint64_t index) {
    selection.ForEachPart(index, [&](const Part& part) {
      const char* const center = segment->center() + part.center_offset;
      char* const data = DataOf(spans[part.span]) + part.data_offset;
      if (stream && part.dtype == CenterDType(part.dtype)) {
        StreamCopy(data, center, part.center_bytes);
      } else {
        FromCenter(part.dtype, center, data, part.count);
      }
    });
  });
}

Status WriteCenter(Segment* segment, const std::vector<ConstSpan>& spans,
                   const Deadline& deadline, ThreadPool* pool, bool advance_version) {
  TF_SMB_RETURN_IF_ERROR(CheckSpans(segment->layout(), spans));
  const Selection<ConstSpan> selection(*segment, spans);
  const bool stream = selection.size_bytes() >= kStreamBytes;
  const Status status =
      ForEachChunk(segment, selection.chunks(), deadline, pool, [&](uint64_t index) {
        selection.ForEachPart(index, [&](const Part& part) {
          char* const center = segment->center() + part.center_offset;
          const char* const data = DataOf(spans[part.span]) + part.data_offset;
          if (stream && part.dtype == CenterDType(part.dtype)) {
            StreamCopy(center, data, part.center_bytes);
          } else {
            ToCenter(part.dtype, data, center, part.count);
          }
        });
        segment->chunk(index)->version.fetch_add(1, std::memory_order_relaxed);
      });
  if (advance_version) segment->AdvanceVersion();
  return status;
}

Result<UpdateReport> UpdateCenter(Segment* segment, const UpdateRequest& request,
                                  ThreadPool* pool) {
  TF_SMB_RETURN_IF_ERROR(CheckSpans(segment->layout(), request.local));
  TF_SMB_RETURN_IF_ERROR(CheckAveraged(segment->layout(), request.local));
  TF_SMB_RETURN_IF_ERROR(CheckUpdate(request));
  UpdateReport report;
  report.version_before = segment->version();
  UpdatePass pass(segment, request);
  RunOn(pool, pass.num_chunks(), [&pass] { pass.TakeChunks(); });
  TF_SMB_RETURN_IF_ERROR(pass.status());
  if (request.advance_version) segment->AdvanceVersion();
  report.version_after = segment->version();
  report.chunks_moved = pass.moved();
  report.chunks_skipped = pass.skipped();
  report.non_finite_variable = pass.non_finite_variable();
  return report;
}

Status Axpy(Segment* target, double scale, Segment* source, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(target->layout().CheckSame(
      source->layout(), "segment '" + source->name() + "'"));
  std::vector<char> copy(source->layout().size_bytes() == 0 ? 0 : kChunkBytes);
  const std::vector<Variable>& variables = target->layout().variables();
  for (uint64_t index = 0; index < target->num_chunks(); ++index) {
    // Never two chunks at once: another may go the other way.
    TF_SMB_RETURN_IF_ERROR(ForEachChunk(source, {index}, deadline, nullptr, [&](uint64_t chunk) {
      std::memcpy(copy.data(), source->center() + chunk * kChunkBytes,
                  source->chunk_bytes(chunk));
    }));
    UpdateRequest request;
    request.move.kind = MoveKind::kAccumulate;
    request.move.rate = scale;
    request.advance_version = false;
    request.busy_chunk_timeout_s =
        static_cast<double>(deadline.RemainingNanos()) / kNanosPerSecond;
    for (const ChunkPiece& piece : target->pieces(index)) {
      if (!IsAveraged(variables[piece.variable].dtype)) continue;
      request.local.push_back({piece.variable, piece.first, piece.count,
                               copy.data() + (piece.center_offset - index * kChunkBytes), true});
    }
    TF_SMB_ASSIGN_OR_RETURN(const UpdateReport report, UpdateCenter(target, request, nullptr));
    if (report.chunks_skipped > 0) return LockedChunk(*target, index);
    if (report.non_finite_variable.has_value()) {
      return InvalidArgumentError("adding segment '" + source->name() + "' to '" +
                                  target->name() + "' would give NaN or Inf in variable " +
                                  variables[*report.non_finite_variable].ToString() +
                                  " [SMB-E082]");
    }
  }
  target->AdvanceVersion();
  return Status::Ok();
}

}  // namespace tf_smb
