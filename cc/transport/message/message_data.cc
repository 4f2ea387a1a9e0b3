#include "cc/transport/message/message_data.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cc/box/exchange_kernel.h"
#include "cc/transport/message/chunk_plan.h"
#include "cc/transport/message/pipeline.h"

namespace tf_smb {
namespace {

Deadline ReplyBy(const Deadline& deadline) {
  return Deadline::After(static_cast<double>(deadline.RemainingNanos()) / kNanosPerSecond +
                         kGraceSeconds);
}

DataRequest NewRequest(SegmentMessageType type, const Grant& grant) {
  DataRequest request;
  request.type = type;
  request.attachment = grant.attachment;
  return request;
}

void SetSpans(const ChunkParts& chunk, DataRequest* request) {
  request->spans.clear();
  for (const ChunkPart& part : chunk.parts) request->spans.push_back(part.wire);
}

Status WrongPayload(size_t got, uint64_t wanted) {
  return DataLossError("the server's answer holds " + std::to_string(got) + " bytes of values, " +
                       std::to_string(wanted) + " were asked for [SMB-E128]")
      .WithScope(FailureScope::kConnection);
}

// Where the parts of a chunk lie in a payload, in the callers' dtypes or, of a new center
// (`moved`), in the center's.
std::vector<uint64_t> PayloadOffsets(const ChunkParts& chunk, bool moved) {
  std::vector<uint64_t> offsets;
  uint64_t end = 0;
  for (const ChunkPart& part : chunk.parts) {
    offsets.push_back(AlignPayload(end));
    end = offsets.back() + (moved ? part.center_bytes() : part.value_bytes());
  }
  offsets.push_back(end);
  return offsets;
}

// Sends a plan's chunks as they are, until the server says no to one.
class PlainCall {
 public:
  PlainCall(const Grant& grant, LanePool* lanes, const Deadline& deadline)
      : grant_(grant), lanes_(lanes), deadline_(deadline) {}

  template <typename Fill, typename OnValues>
  Status Run(SegmentMessageType type, const std::vector<ChunkParts>& plan, const Fill& fill,
             const OnValues& on_values) {
    TF_SMB_ASSIGN_OR_RETURN(
        const std::unique_ptr<Pipeline> pipeline,
        Pipeline::Start(lanes_, ReplyBy(deadline_), [&](size_t tag, const DataReply& reply) {
          if (!reply.status.ok() && refused_.ok()) refused_ = reply.status;
          return refused_.ok() ? on_values(plan[tag], reply.payload) : Status::Ok();
        }));
    for (size_t i = 0; i < plan.size() && refused_.ok(); ++i) {
      DataRequest request = NewRequest(type, grant_);
      request.timeout_s = static_cast<double>(deadline_.RemainingNanos()) / kNanosPerSecond;
      request.advance_version = i + 1 == plan.size();
      SetSpans(plan[i], &request);
      fill(plan[i], &request);
      TF_SMB_RETURN_IF_ERROR(pipeline->Send(&request, i, ReplyBy(deadline_)));
    }
    TF_SMB_RETURN_IF_ERROR(pipeline->Drain());
    return refused_;
  }

 private:
  const Grant& grant_;
  LanePool* const lanes_;
  const Deadline deadline_;
  Status refused_;
};

// --- Updates -------------------------------------------------------------------

// One update; used by one thread. See UpdateRequest for the order of the chunks.
class UpdateCall {
 public:
  UpdateCall(const Grant& grant, LanePool* lanes, const UpdateRequest& request)
      : grant_(grant),
        lanes_(lanes),
        request_(request),
        delta_(!request.round.has_value() && request.move.kind == MoveKind::kDelta),
        plan_(PlanChunks(grant.layout, request.local)) {
    const auto begin = std::find_if(plan_.begin(), plan_.end(), [&](const ChunkParts& chunk) {
      return chunk.chunk >= request.first_chunk;
    });
    std::rotate(plan_.begin(), begin, plan_.end());
    // Also of nothing: the server has its say, and the version moves.
    if (plan_.empty()) plan_.emplace_back();
  }

  Result<UpdateReport> Run() {
    TF_SMB_ASSIGN_OR_RETURN(
        pipeline_, Pipeline::Start(lanes_, Deadline::After(kCallSeconds),
                                   [this](size_t tag, const DataReply& reply) {
                                     return OnReply(tag, reply);
                                   }));
    TF_SMB_RETURN_IF_ERROR(FirstPass());
    TF_SMB_RETURN_IF_ERROR(SecondPass());
    if (refused_.ok() && report_.non_finite_variable.has_value() && !advanced_) {
      TF_SMB_RETURN_IF_ERROR(Advance());
    }
    TF_SMB_RETURN_IF_ERROR(refused_);
    return report_;
  }

 private:
  bool stopped() const { return !refused_.ok() || report_.non_finite_variable.has_value(); }

  // Everything once, without waiting for anybody; the last one when all others are
  // known, so that it can carry the version.
  Status FirstPass() {
    for (size_t i = 0; i < plan_.size() && !stopped(); ++i) {
      const bool last = i + 1 == plan_.size();
      if (last) TF_SMB_RETURN_IF_ERROR(pipeline_->Drain());
      if (stopped()) break;
      final_ = last && put_off_.empty();
      TF_SMB_RETURN_IF_ERROR(Send(i, final_ ? request_.busy_chunk_timeout_s : 0.0));
    }
    return pipeline_->Drain();
  }

  // The busy ones, in their order, waiting for each.
  Status SecondPass() {
    const Deadline deadline = Deadline::After(request_.busy_chunk_timeout_s);
    const std::vector<size_t> put_off = std::move(put_off_);
    waiting_ = true;
    for (size_t i = 0; i < put_off.size() && !stopped(); ++i) {
      final_ = i + 1 == put_off.size();
      TF_SMB_RETURN_IF_ERROR(
          Send(put_off[i], static_cast<double>(deadline.RemainingNanos()) / kNanosPerSecond));
      TF_SMB_RETURN_IF_ERROR(pipeline_->Drain());
    }
    return Status::Ok();
  }

  Status Advance() {
    plan_.emplace_back();
    final_ = true;
    TF_SMB_RETURN_IF_ERROR(Send(plan_.size() - 1, 0.0));
    return pipeline_->Drain();
  }

  Status Send(size_t index, double timeout_s) {
    DataRequest request = NewRequest(SegmentMessageType::kUpdate, grant_);
    request.timeout_s = timeout_s;
    request.move = static_cast<uint8_t>(delta_ ? MoveKind::kAccumulate : request_.move.kind);
    request.output = static_cast<uint8_t>(request_.move.output);
    request.rate = request_.move.rate;
    request.wants_out = delta_ || !request_.out.empty();
    request.advance_version = final_ && request_.advance_version;
    advanced_ = advanced_ || final_;
    if (request_.round.has_value()) {
      request.share = WireShare{request_.round->round, request_.round->weight};
    }
    SetSpans(plan_[index], &request);
    FillPayload(plan_[index], &request);
    return pipeline_->Send(&request, index, Deadline::After(timeout_s + kCallSeconds));
  }

  void FillPayload(const ChunkParts& chunk, DataRequest* request) {
    const std::vector<uint64_t> offsets = PayloadOffsets(chunk, delta_);
    payload_.assign(offsets.back(), '\0');
    for (size_t p = 0; p < chunk.parts.size(); ++p) {
      const ChunkPart& part = chunk.parts[p];
      char* const to = payload_.data() + offsets[p];
      if (delta_) {
        DeltaProgress(part.dtype, Local(part), Last(part), to, part.wire.count);
        request->spans[p].wide = true;
      } else {
        std::memcpy(to, Local(part), part.value_bytes());
      }
    }
    request->payload = payload_;
  }

  Status OnReply(size_t index, const DataReply& reply) {
    if (!has_version_before_) report_.version_before = reply.version_before;
    has_version_before_ = true;
    report_.version_after = reply.version_after;
    // Without waiting, a side buffer of the server may be short as well.
    const bool busy = reply.chunks_skipped > 0 ||
                      reply.status.code() == StatusCode::kDeadlineExceeded;
    if (busy && !waiting_ && !final_) {
      put_off_.push_back(index);
      return Status::Ok();
    }
    if (!reply.status.ok()) {
      if (refused_.ok()) refused_ = reply.status;
      return Status::Ok();
    }
    report_.chunks_moved += reply.chunks_moved;
    report_.chunks_skipped += reply.chunks_skipped;
    if (reply.non_finite_variable.has_value()) {
      report_.non_finite_variable = reply.non_finite_variable;
    }
    return Settle(plan_[index], reply);
  }

  // The worker's side of what the server did with a chunk.
  Status Settle(const ChunkParts& chunk, const DataReply& reply) {
    if (request_.round.has_value()) return Status::Ok();
    const bool moved = reply.chunks_moved > 0;
    if (delta_) return moved ? FinishChunk(chunk, reply.payload) : Skip(chunk);
    switch (request_.move.kind) {
      case MoveKind::kElastic:
        // Of a chunk with a NaN, the rest has moved.
        if (!moved && !reply.non_finite_variable.has_value()) return Skip(chunk);
        return CopyOut(chunk, reply.payload, /*moved=*/false);
      case MoveKind::kAccumulate:
        if (!moved || request_.out.empty()) return Status::Ok();
        return CopyOut(chunk, reply.payload, /*moved=*/true);
      case MoveKind::kCopy:
        if (reply.chunks_skipped == 0) SetLast(chunk);
        return Status::Ok();
      default:
        return Status::Ok();
    }
  }

  Status CopyOut(const ChunkParts& chunk, std::string_view payload, bool moved) {
    const std::vector<uint64_t> offsets = PayloadOffsets(chunk, moved);
    if (payload.size() != offsets.back()) return WrongPayload(payload.size(), offsets.back());
    for (size_t p = 0; p < chunk.parts.size(); ++p) {
      const ChunkPart& part = chunk.parts[p];
      char* const out = static_cast<char*>(request_.out[part.span]) +
                        (moved ? part.moved_offset() : part.value_offset());
      std::memcpy(out, payload.data() + offsets[p],
                  moved ? part.center_bytes() : part.value_bytes());
    }
    return Status::Ok();
  }

  Status FinishChunk(const ChunkParts& chunk, std::string_view payload) {
    const std::vector<uint64_t> offsets = PayloadOffsets(chunk, /*moved=*/true);
    if (payload.size() != offsets.back()) return WrongPayload(payload.size(), offsets.back());
    for (size_t p = 0; p < chunk.parts.size(); ++p) {
      const ChunkPart& part = chunk.parts[p];
      FinishDelta(request_.move.output, part.dtype, Local(part), payload.data() + offsets[p],
                  Last(part), Out(part), part.wire.count);
    }
    return Status::Ok();
  }

  // `out` as if the chunk had not been there.
  Status Skip(const ChunkParts& chunk) {
    for (const ChunkPart& part : chunk.parts) {
      if (request_.move.output == MoveOutput::kDelta) {
        std::memset(Out(part), 0, part.value_bytes());
      } else if (Out(part) != Local(part)) {
        std::memcpy(Out(part), Local(part), part.value_bytes());
      }
    }
    return Status::Ok();
  }

  // kCopy: where the center is x now. A part with a NaN was not, or not as a whole.
  void SetLast(const ChunkParts& chunk) {
    if (request_.last == nullptr) return;
    for (const ChunkPart& part : chunk.parts) {
      if (!AllFinite(part.dtype, Local(part), part.wire.count)) continue;
      ToCenter(part.dtype, Local(part), Last(part), part.wire.count);
    }
  }

  const char* Local(const ChunkPart& part) const {
    return static_cast<const char*>(request_.local[part.span].data) + part.value_offset();
  }
  char* Last(const ChunkPart& part) const {
    return static_cast<char*>(request_.last) + part.center_offset;
  }
  char* Out(const ChunkPart& part) const {
    return static_cast<char*>(request_.out[part.span]) + part.value_offset();
  }

  const Grant& grant_;
  LanePool* const lanes_;
  const UpdateRequest& request_;
  const bool delta_;
  std::vector<ChunkParts> plan_;
  std::unique_ptr<Pipeline> pipeline_;
  std::string payload_;
  std::vector<size_t> put_off_;
  bool waiting_ = false;   // in the second pass
  bool final_ = false;     // what is sent now is the last of the update
  bool advanced_ = false;  // the last was sent
  bool has_version_before_ = false;
  Status refused_;
  UpdateReport report_;
};

Status CheckUpdate(const UpdateRequest& request) {
  if (!request.out.empty() && request.out.size() != request.local.size()) {
    return InvalidArgumentError("an update of " + std::to_string(request.local.size()) +
                                " spans has " + std::to_string(request.out.size()) +
                                " outputs: give one for each, or none [SMB-E079]");
  }
  if (request.round.has_value()) return Status::Ok();
  const MoveKind kind = request.move.kind;
  if (request.out.empty() && (kind == MoveKind::kElastic || kind == MoveKind::kDelta)) {
    return InvalidArgumentError("this move gives the worker new weights: it needs outputs"
                                " [SMB-E129]");
  }
  if (request.last == nullptr && kind == MoveKind::kDelta) {
    return InvalidArgumentError("delta averaging needs the weights after the last exchange"
                                " [SMB-E080]");
  }
  return Status::Ok();
}

}  // namespace

// --- MessageData -----------------------------------------------------------------

Status MessageData::Read(const std::vector<Span>& spans, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(CheckSpans(grant_->layout, spans));
  const auto on_values = [&](const ChunkParts& chunk, std::string_view payload) {
    const std::vector<uint64_t> offsets = PayloadOffsets(chunk, /*moved=*/false);
    if (payload.size() != offsets.back()) return WrongPayload(payload.size(), offsets.back());
    for (size_t p = 0; p < chunk.parts.size(); ++p) {
      const ChunkPart& part = chunk.parts[p];
      std::memcpy(static_cast<char*>(spans[part.span].data) + part.value_offset(),
                  payload.data() + offsets[p], part.value_bytes());
    }
    return Status::Ok();
  };
  return PlainCall(*grant_, lanes_, deadline)
      .Run(SegmentMessageType::kRead, PlanChunks(grant_->layout, spans),
           [](const ChunkParts&, DataRequest*) {}, on_values);
}

Status MessageData::Write(const std::vector<ConstSpan>& spans, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(CheckSpans(grant_->layout, spans));
  std::vector<ChunkParts> plan = PlanChunks(grant_->layout, spans);
  if (plan.empty()) plan.emplace_back();  // the version moves all the same
  std::string payload;
  const auto fill = [&](const ChunkParts& chunk, DataRequest* request) {
    const std::vector<uint64_t> offsets = PayloadOffsets(chunk, /*moved=*/false);
    payload.assign(offsets.back(), '\0');
    for (size_t p = 0; p < chunk.parts.size(); ++p) {
      const ChunkPart& part = chunk.parts[p];
      std::memcpy(payload.data() + offsets[p],
                  static_cast<const char*>(spans[part.span].data) + part.value_offset(),
                  part.value_bytes());
    }
    request->payload = payload;
  };
  return PlainCall(*grant_, lanes_, deadline)
      .Run(SegmentMessageType::kWrite, plan, fill,
           [](const ChunkParts&, std::string_view) { return Status::Ok(); });
}

Result<UpdateReport> MessageData::Update(const UpdateRequest& request) {
  TF_SMB_RETURN_IF_ERROR(CheckSpans(grant_->layout, request.local));
  TF_SMB_RETURN_IF_ERROR(CheckUpdate(request));
  return UpdateCall(*grant_, lanes_, request).Run();
}

Status MessageData::Axpy(double scale, const Grant& source, const Deadline& deadline) {
  Status refused;
  TF_SMB_ASSIGN_OR_RETURN(const std::unique_ptr<Pipeline> pipeline,
                          Pipeline::Start(lanes_, ReplyBy(deadline),
                                          [&refused](size_t, const DataReply& reply) {
                                            refused = reply.status;
                                            return Status::Ok();
                                          }));
  DataRequest request = NewRequest(SegmentMessageType::kAxpy, *grant_);
  request.timeout_s = static_cast<double>(deadline.RemainingNanos()) / kNanosPerSecond;
  request.rate = scale;
  request.source = source.attachment;
  TF_SMB_RETURN_IF_ERROR(pipeline->Send(&request, 0, ReplyBy(deadline)));
  TF_SMB_RETURN_IF_ERROR(pipeline->Drain());
  return refused;
}

}  // namespace tf_smb
