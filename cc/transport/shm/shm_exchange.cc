#include "cc/transport/shm/shm_exchange.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <optional>

#include "cc/box/exchange_kernel.h"
#include "cc/common/mutex.h"

namespace tf_smb {
namespace {

// From here on, what an exchange only writes goes past the cache: there it would push
// out what is read, and nobody finds it there later either.
constexpr uint64_t kStreamBytes = 8 << 20;

Status DamagedChunk(uint64_t index) {
  return DataLossError("the lock of chunk " + std::to_string(index) + " is damaged");
}

// Runs body(index) under each chunk's lock, in order.
Status ForEachChunk(const Segment& segment, const Deadline& deadline,
                    const std::function<void(uint64_t)>& body) {
  for (uint64_t i = 0; i < segment.num_chunks(); ++i) {
    RobustMutex& mutex = segment.chunk(i)->mutex;
    const LockOutcome outcome = mutex.LockUntil(deadline);
    if (outcome == LockOutcome::kBroken) return DamagedChunk(i);
    if (!Holds(outcome)) {
      return DeadlineExceededError("chunk " + std::to_string(i) + " of segment '" +
                                   segment.name() +
                                   "' stayed locked: the worker that holds it is stopped");
    }
    body(i);
    mutex.Unlock();
  }
  return Status::Ok();
}

// One pass of an exchange, shared by the threads that run it.
class ExchangePass {
 public:
  ExchangePass(Segment* segment, const ExchangeRequest& request)
      : segment_(segment), request_(request), move_(request.move) {
    move_.stream = segment->layout().num_elements() * sizeof(float) >= kStreamBytes;
  }

  // Takes chunks until none is left; called by every thread.
  void TakeChunks() {
    const uint64_t num_chunks = segment_->num_chunks();
    std::vector<uint64_t> put_off;
    uint64_t moved = 0;
    for (uint64_t i = next_.fetch_add(1); i < num_chunks; i = next_.fetch_add(1)) {
      const uint64_t index = (request_.first_chunk + i) % num_chunks;
      const LockOutcome outcome = segment_->chunk(index)->mutex.TryLock();
      if (Holds(outcome)) {
        if (!MoveAndUnlock(index)) return;
        ++moved;
      } else {
        put_off.push_back(index);
      }
    }
    const Deadline deadline = Deadline::After(request_.busy_chunk_timeout_s);
    for (const uint64_t index : put_off) {
      const LockOutcome outcome = segment_->chunk(index)->mutex.LockUntil(deadline);
      if (outcome == LockOutcome::kBroken) {
        MutexLock lock(&mutex_);
        status_ = DamagedChunk(index);
      } else if (Holds(outcome)) {
        if (!MoveAndUnlock(index)) return;
        ++moved;
      } else {
        Skip(index);
        skipped_.fetch_add(1);
      }
    }
    moved_.fetch_add(moved);
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
  // False if the chunk held a NaN or Inf: then no thread goes on.
  bool MoveAndUnlock(uint64_t index) {
    ChunkState* chunk = segment_->chunk(index);
    std::optional<uint32_t> non_finite;
    for (const ChunkPiece& piece : segment_->pieces(index)) {
      const bool all_finite =
          ApplyMove(move_, (*request_.local)[piece.variable] + piece.variable_offset,
                    segment_->center() + piece.center_offset,
                    request_.last == nullptr ? nullptr : request_.last + piece.center_offset,
                    Out(piece), piece.count);
      if (!all_finite) non_finite = piece.variable;
    }
    chunk->version.fetch_add(1, std::memory_order_relaxed);
    chunk->mutex.Unlock();
    if (!non_finite.has_value()) return true;
    next_.store(segment_->num_chunks());
    MutexLock lock(&mutex_);
    non_finite_variable_ = non_finite;
    return false;
  }

  // `out` as if the chunk had not been there.
  void Skip(uint64_t index) {
    if (request_.move.kind == MoveKind::kCopy) return;
    for (const ChunkPiece& piece : segment_->pieces(index)) {
      const float* local = (*request_.local)[piece.variable] + piece.variable_offset;
      float* out = Out(piece);
      if (request_.move.output == MoveOutput::kDelta) {
        std::memset(out, 0, piece.count * sizeof(float));
      } else if (out != local) {
        std::memcpy(out, local, piece.count * sizeof(float));
      }
    }
  }

  float* Out(const ChunkPiece& piece) const {
    if (request_.move.kind == MoveKind::kCopy) return nullptr;
    return (*request_.out)[piece.variable] + piece.variable_offset;
  }

  Segment* const segment_;
  const ExchangeRequest& request_;
  Move move_;  // constant after construction
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> moved_{0};
  std::atomic<uint64_t> skipped_{0};
  Mutex mutex_;
  Status status_ GUARDED_BY(mutex_);
  std::optional<uint32_t> non_finite_variable_ GUARDED_BY(mutex_);
};

}  // namespace

Status ReadCenter(const Segment& segment, const std::vector<float*>& values,
                  const Deadline& deadline) {
  return ForEachChunk(segment, deadline, [&](uint64_t index) {
    for (const ChunkPiece& piece : segment.pieces(index)) {
      std::memcpy(values[piece.variable] + piece.variable_offset,
                  segment.center() + piece.center_offset, piece.count * sizeof(float));
    }
  });
}

Status WriteCenter(Segment* segment, const std::vector<const float*>& values,
                   const Deadline& deadline) {
  const Status status = ForEachChunk(*segment, deadline, [&](uint64_t index) {
    for (const ChunkPiece& piece : segment->pieces(index)) {
      std::memcpy(segment->center() + piece.center_offset,
                  values[piece.variable] + piece.variable_offset, piece.count * sizeof(float));
    }
    segment->chunk(index)->version.fetch_add(1, std::memory_order_relaxed);
  });
  segment->AdvanceVersion();
  return status;
}

Result<ExchangeReport> ExchangeCenter(Segment* segment, const ExchangeRequest& request,
                                      ThreadPool* pool) {
  ExchangeReport report;
  report.version_before = segment->version();
  ExchangePass pass(segment, request);
  if (pool != nullptr && segment->num_chunks() > 1) {
    pool->Run([&pass] { pass.TakeChunks(); });
  } else {
    pass.TakeChunks();
  }
  TF_SMB_RETURN_IF_ERROR(pass.status());
  segment->AdvanceVersion();
  report.version_after = segment->version();
  report.chunks_moved = pass.moved();
  report.chunks_skipped = pass.skipped();
  report.non_finite_variable = pass.non_finite_variable();
  return report;
}

}  // namespace tf_smb
