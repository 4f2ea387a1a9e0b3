#include "cc/transport/message/message_session.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "cc/common/clock.h"
#include "cc/transport/message/chunk_plan.h"

namespace tf_smb {
namespace {

// How long a client may take to take its reply.
constexpr double kReplySeconds = 10.0;
constexpr double kIdleSeconds = 3600.0;
// Waits look up so often whether the service stops.
constexpr double kSliceSeconds = 0.05;
constexpr double kLongestWaitSeconds = 3600.0;
// A client needs one of each a channel.
constexpr size_t kMaxGrants = 16;
constexpr size_t kMaxMembersHere = 16;
static_assert(kMaxControlTextBytes == kMaxTextBytes);

uint64_t RandomNumber() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

Reply Refuse(Status status) {
  Reply reply;
  reply.status = std::move(status);
  return reply;
}

ListedMember Listed(const MemberInfo& info) {
  ListedMember member;
  member.worker_index = info.worker_index;
  member.state = static_cast<uint32_t>(info.state);
  member.process_id = info.process_id;
  member.incarnation = info.incarnation;
  member.steps = info.steps;
  member.exchanges = info.exchanges;
  member.arrived = info.arrived;
  member.finished = info.finished;
  member.training = info.training;
  member.epoch = info.epoch;
  member.batch = info.batch;
  member.phase = info.phase;
  return member;
}

// The spans of a request, and where their values lie in a payload: laid out there in the
// dtypes that the client has, or, for a new center, that the center has.
struct WireSpans {
  std::vector<ConstSpan> spans;  // without data
  std::vector<uint64_t> offsets;
  std::vector<uint64_t> moved_offsets;
  uint64_t value_bytes = 0;
  uint64_t moved_bytes = 0;
};

void Place(uint64_t size_bytes, std::vector<uint64_t>* offsets, uint64_t* end) {
  offsets->push_back(AlignPayload(*end));
  *end = offsets->back() + size_bytes;
}

// INVALID_ARGUMENT unless they lie within the segment, and all in one chunk: so what a
// request can make the server hold is bounded.
Status ReadSpans(const Layout& layout, const std::vector<WireSpan>& wire, WireSpans* result) {
  for (const WireSpan& span : wire) {
    result->spans.push_back({span.variable, span.first, span.count, nullptr, span.wide});
  }
  TF_SMB_RETURN_IF_ERROR(CheckSpans(layout, result->spans));
  uint64_t first_chunk = UINT64_MAX;
  for (const WireSpan& span : wire) {
    const Variable& variable = layout.variables()[span.variable];
    const uint64_t begin = variable.offset_bytes + span.first * variable.element_bytes();
    const uint64_t end = begin + span.count * variable.element_bytes();
    if (span.count > 0 && first_chunk == UINT64_MAX) first_chunk = begin / kChunkBytes;
    if (span.count > 0 &&
        (begin / kChunkBytes != first_chunk || (end - 1) / kChunkBytes != first_chunk)) {
      return InvalidArgumentError("the spans of one message lie in one chunk, those up to " +
                                  variable.ToString() + " do not [SMB-E130]");
    }
    const DType center_dtype = CenterDType(variable.dtype);
    Place(span.count * ElementBytes(span.wide ? center_dtype : variable.dtype), &result->offsets,
          &result->value_bytes);
    Place(span.count * ElementBytes(center_dtype), &result->moved_offsets, &result->moved_bytes);
  }
  return Status::Ok();
}

// Points the spans at the request's values.
Status TakeValues(const DataRequest& request, WireSpans* spans) {
  if (request.payload.size() != spans->value_bytes) {
    return InvalidArgumentError("a request brings " + std::to_string(request.payload.size()) +
                                " bytes of values, its spans have " +
                                std::to_string(spans->value_bytes) + " [SMB-E131]");
  }
  for (size_t i = 0; i < spans->spans.size(); ++i) {
    spans->spans[i].data = request.payload.data() + spans->offsets[i];
  }
  return Status::Ok();
}

Status CheckMove(const DataRequest& request) {
  if (request.share.has_value()) {
    const double weight = request.share->weight;
    if (weight > 0.0 && std::isfinite(weight)) return Status::Ok();
    return InvalidArgumentError("the weight of a share must be above 0 and finite, got " +
                                std::to_string(weight) + " [SMB-E077]");
  }
  const auto kind = static_cast<MoveKind>(request.move);
  const auto output = static_cast<MoveOutput>(request.output);
  const bool known_output = output == MoveOutput::kValue || output == MoveOutput::kDelta;
  if (kind == MoveKind::kCopy || kind == MoveKind::kAccumulate) return Status::Ok();
  if (kind == MoveKind::kElastic && request.wants_out && known_output) return Status::Ok();
  return InvalidArgumentError("move " + std::to_string(request.move) + " with output " +
                              std::to_string(request.output) +
                              " cannot be made by message: only kCopy, kAccumulate and kElastic "
                              "with an output can [SMB-E132]");
}

bool NeedsMember(ControlCall call) {
  switch (call) {
    case ControlCall::kRenew:
    case ControlCall::kLeave:
    case ControlCall::kLeaveUnlessLast:
    case ControlCall::kCheckMember:
    case ControlCall::kPublishProgress:
    case ControlCall::kSetTraining:
    case ControlCall::kBeginSeeding:
    case ControlCall::kFinishSeeding:
    case ControlCall::kArrive:
    case ControlCall::kFinishMeeting:
    case ControlCall::kArriveAtBarrier:
    case ControlCall::kMissingAtBarrier:
    case ControlCall::kWithdrawFromBarrier:
    case ControlCall::kTryLock:
    case ControlCall::kUnlock:
    case ControlCall::kEnterRound:
    case ControlCall::kFinishShare:
    case ControlCall::kFinishRound:
    case ControlCall::kPublishSteps:
    case ControlCall::kIsTurn:
    case ControlCall::kSetFirstPhase:
    case ControlCall::kEnterPhase:
    case ControlCall::kTryEndPhase:
    case ControlCall::kAgreeOnSchedule:
    case ControlCall::kPostNotice:
    case ControlCall::kRequestStop:
      return true;
    default:
      return false;
  }
}

}  // namespace

// --- Attachments -----------------------------------------------------------------

Attachments::Attachments() : service_(RandomNumber()), next_(RandomNumber()) {}

uint64_t Attachments::Add(std::shared_ptr<Segment> segment) {
  MutexLock lock(&mutex_);
  const uint64_t attachment = next_++;
  segments_[attachment] = std::move(segment);
  return attachment;
}

void Attachments::Remove(uint64_t attachment) {
  MutexLock lock(&mutex_);
  segments_.erase(attachment);
}

Result<std::shared_ptr<Segment>> Attachments::Find(uint64_t attachment) {
  MutexLock lock(&mutex_);
  const auto found = segments_.find(attachment);
  if (found != segments_.end()) return found->second;
  return UnavailableError("the server knows no attachment " + std::to_string(attachment) +
                          ": the channel that it was granted on is closed, or the server is a "
                          "new one [SMB-E133]");
}

// --- The session -----------------------------------------------------------------

MessageSession::~MessageSession() {
  for (const auto& [key, member] : members_) granted_.at(key.first)->Abandon(member);
  for (const auto& [attachment, segment] : granted_) attachments_->Remove(attachment);
}

void MessageSession::Run(Channel* channel) {
  while (!stopping_->load()) {
    const Result<std::string> message = channel->Receive(Deadline::After(kIdleSeconds));
    if (message.status().code() == StatusCode::kDeadlineExceeded) continue;
    if (!message.ok()) return;
    if (!channel->Send(Answer(*message), Deadline::After(kReplySeconds), nullptr).ok()) return;
  }
}

std::string MessageSession::Answer(std::string_view message) {
  const Result<uint8_t> type = MessageTypeOf(message);
  if (!type.ok()) return EncodeReply(Refuse(type.status()));
  switch (static_cast<SegmentMessageType>(*type)) {
    case SegmentMessageType::kControl:
      return AnswerControl(message);
    case SegmentMessageType::kRead:
    case SegmentMessageType::kWrite:
    case SegmentMessageType::kUpdate:
    case SegmentMessageType::kAxpy:
      return AnswerData(message);
    default:
      return AnswerWhole(message);
  }
}

std::string MessageSession::AnswerWhole(std::string_view message) {
  const Result<Request> request = DecodeRequest(message);
  if (!request.ok()) return EncodeReply(Refuse(request.status()));
  HandledRequest handled = handler_->Handle(*request);
  if (!handled.reply.status.ok() || handled.segment == nullptr) return EncodeReply(handled.reply);
  Result<std::string> grant = GrantSegment(std::move(handled.segment), handled.reply.created);
  return grant.ok() ? std::move(grant).value() : EncodeReply(Refuse(grant.status()));
}

Result<std::string> MessageSession::GrantSegment(std::shared_ptr<Segment> segment, bool created) {
  if (granted_.size() >= kMaxGrants) {
    return ResourceExhaustedError("a channel has " + std::to_string(kMaxGrants) +
                                  " segments attached, the most it can [SMB-E134]");
  }
  Grant grant;
  grant.service = attachments_->service();
  grant.attachment = attachments_->Add(segment);
  grant.created = created;
  grant.segment_name = segment->name();
  grant.job_id = segment->job_id();
  grant.num_workers = segment->num_workers();
  grant.lease_s = segment->lease_s();
  grant.layout = segment->layout();
  granted_[grant.attachment] = std::move(segment);
  return EncodeGrant(grant);
}

// --- Control -----------------------------------------------------------------------

std::string MessageSession::AnswerControl(std::string_view message) {
  const Result<ControlRequest> request = DecodeControlRequest(message);
  if (!request.ok()) return EncodeReply(Refuse(request.status()));
  ControlReply reply;
  reply.minor = std::min(request->minor, kProtocolMinor);
  const Result<std::shared_ptr<Segment>> segment = attachments_->Find(request->attachment);
  reply.status = segment.ok() ? Control(*request, segment->get(), &reply) : segment.status();
  reply.sequence = request->sequence;
  return EncodeControlReply(reply);
}

Result<MemberId> MessageSession::FindMember(const ControlRequest& request) const {
  const auto found = members_.find({request.attachment, request.member});
  if (found != members_.end()) return found->second;
  return AbortedError("no member of incarnation " + std::to_string(request.member) +
                      " joined on this channel, or it has left: join again [SMB-E135]");
}

Status MessageSession::Join(const ControlRequest& request, Segment* segment,
                            ControlReply* reply) {
  // Only what lives as long as the session: the member's mutex is held on its thread.
  if (granted_.count(request.attachment) == 0) {
    return FailedPreconditionError("attachment " + std::to_string(request.attachment) +
                                   " was granted on another channel: join on that one [SMB-E136]");
  }
  if (members_.size() >= kMaxMembersHere) {
    return ResourceExhaustedError(std::to_string(kMaxMembersHere) +
                                  " members have joined on this channel and did not leave, the "
                                  "most that can [SMB-E142]");
  }
  TF_SMB_ASSIGN_OR_RETURN(const MemberId member, segment->Join(request.worker_index));
  members_[{request.attachment, member.incarnation}] = member;
  reply->number = member.incarnation;
  reply->slot = member.slot;
  return Status::Ok();
}

template <typename Attempt>
void MessageSession::Retry(double timeout_s, const Attempt& attempt) const {
  const Deadline deadline = Deadline::After(std::min(timeout_s, kLongestWaitSeconds));
  for (;;) {
    const double left = static_cast<double>(deadline.RemainingNanos()) / kNanosPerSecond;
    if (attempt(std::min(left, kSliceSeconds))) return;
    if (deadline.Expired() || stopping_->load()) return;
  }
}

void MessageSession::Wait(const ControlRequest& request, Segment* segment,
                          ControlReply* reply) const {
  const bool for_version = request.call == ControlCall::kWaitForVersion;
  const auto seen = static_cast<uint32_t>(request.number);
  Retry(request.seconds, [&](double seconds) {
    const auto nanos = static_cast<int64_t>(seconds * kNanosPerSecond);
    if (for_version) return segment->WaitForVersion(request.number, nanos) >= request.number;
    if (segment->changes() == seen) segment->WaitForChange(seen, nanos);
    return segment->changes() != seen;
  });
  reply->number = for_version ? segment->version() : segment->changes();
}

Status MessageSession::Control(const ControlRequest& request, Segment* segment,
                               ControlReply* reply) {
  if (NeedsMember(request.call)) {
    TF_SMB_ASSIGN_OR_RETURN(const MemberId member, FindMember(request));
    return MemberCall(request, segment, member, reply);
  }
  switch (request.call) {
    case ControlCall::kVersion:
      reply->number = segment->version();
      break;
    case ControlCall::kWaitForVersion:
    case ControlCall::kWaitForChange:
      Wait(request, segment, reply);
      break;
    case ControlCall::kJoin:
      return Join(request, segment, reply);
    case ControlCall::kMembers:
      for (const MemberInfo& info : segment->Members()) reply->members.push_back(Listed(info));
      break;
    case ControlCall::kCountLive:
      reply->number = segment->CountLive();
      break;
    case ControlCall::kMarkAbsent:
      segment->MarkAbsent(request.worker_index.value_or(UINT32_MAX));
      break;
    case ControlCall::kIsAbsent:
      reply->number = segment->IsAbsent(request.worker_index.value_or(UINT32_MAX)) ? 1 : 0;
      break;
    case ControlCall::kSeeded:
      reply->number = segment->seeded() ? 1 : 0;
      break;
    case ControlCall::kTryCloseMeeting:
      reply->number = segment->TryCloseMeeting(request.number) ? 1 : 0;
      break;
    case ControlCall::kFewestSteps:
      reply->number = segment->FewestSteps();
      break;
    case ControlCall::kMeetingFinished:
      reply->number = segment->MeetingFinished(request.number) ? 1 : 0;
      break;
    case ControlCall::kLockHolder: {
      const std::optional<uint32_t> holder = segment->LockHolder();
      if (holder.has_value()) reply->workers.push_back(*holder);
      break;
    }
    case ControlCall::kTryCloseRound:
      reply->number = segment->TryCloseRound(request.number, request.flag) ? 1 : 0;
      break;
    case ControlCall::kMissingInRound:
      reply->workers = segment->MissingInRound();
      break;
    case ControlCall::kRoundsClosed:
      reply->number = segment->rounds_closed();
      break;
    case ControlCall::kChanges:
      reply->number = segment->changes();
      break;
    case ControlCall::kPhase:
      reply->number = segment->phase();
      break;
    case ControlCall::kLastNotice: {
      Notice notice = segment->LastNotice();
      reply->number = notice.number;
      reply->text = std::move(notice.text);
      break;
    }
    case ControlCall::kStopRequested:
      reply->number = segment->stop_requested() ? 1 : 0;
      break;
    default:
      return InternalError("control call " + std::to_string(static_cast<int>(request.call)) +
                           " has no answer [SMB-E137]");
  }
  return Status::Ok();
}

Status MessageSession::MemberCall(const ControlRequest& request, Segment* segment,
                                  const MemberId& member, ControlReply* reply) {
  switch (request.call) {
    case ControlCall::kRenew:
      return segment->Renew(member);
    case ControlCall::kLeave:
      segment->Leave(member);
      members_.erase({request.attachment, request.member});
      break;
    case ControlCall::kLeaveUnlessLast:
      reply->number = segment->LeaveUnlessLast(member) ? 1 : 0;
      break;
    case ControlCall::kCheckMember:
      return segment->CheckMember(member);
    case ControlCall::kPublishProgress:
      segment->PublishProgress(member, {request.number, request.epoch, request.batch});
      break;
    case ControlCall::kPublishSteps:
      segment->PublishSteps(member, request.number);
      break;
    case ControlCall::kSetTraining:
      segment->SetTraining(member, request.flag);
      break;
    case ControlCall::kBeginSeeding:
      reply->number = segment->BeginSeeding(member) ? 1 : 0;
      break;
    case ControlCall::kFinishSeeding:
      segment->FinishSeeding(member);
      break;
    case ControlCall::kArrive:
      reply->number = segment->Arrive(member);
      break;
    case ControlCall::kFinishMeeting:
      segment->FinishMeeting(member, request.number);
      break;
    case ControlCall::kArriveAtBarrier: {
      TF_SMB_ASSIGN_OR_RETURN(reply->number, segment->ArriveAtBarrier(member, request.workers));
      break;
    }
    case ControlCall::kMissingAtBarrier: {
      TF_SMB_ASSIGN_OR_RETURN(reply->workers, segment->MissingAtBarrier(member, request.number));
      break;
    }
    case ControlCall::kWithdrawFromBarrier:
      reply->number = segment->WithdrawFromBarrier(member, request.number) ? 1 : 0;
      break;
    case ControlCall::kTryLock: {
      TF_SMB_ASSIGN_OR_RETURN(reply->number, segment->TryLock(member, request.seconds));
      break;
    }
    case ControlCall::kUnlock:
      return segment->Unlock(member, request.number);
    case ControlCall::kEnterRound: {
      TF_SMB_ASSIGN_OR_RETURN(reply->number, segment->EnterRound(member));
      break;
    }
    case ControlCall::kIsTurn:
      reply->number = segment->IsTurn(member, request.number) ? 1 : 0;
      break;
    case ControlCall::kFinishShare:
      segment->FinishShare(member, request.number, request.flag);
      break;
    case ControlCall::kFinishRound:
      segment->FinishRound(member, request.number);
      break;
    case ControlCall::kSetFirstPhase:
      segment->SetFirstPhase(member, request.number);
      break;
    case ControlCall::kEnterPhase:
      segment->EnterPhase(member, request.number);
      break;
    case ControlCall::kTryEndPhase:
      reply->number = segment->TryEndPhase(member, request.number) ? 1 : 0;
      break;
    case ControlCall::kAgreeOnSchedule: {
      TF_SMB_ASSIGN_OR_RETURN(reply->text, segment->AgreeOnSchedule(member, request.text));
      break;
    }
    case ControlCall::kPostNotice: {
      TF_SMB_ASSIGN_OR_RETURN(reply->number, segment->PostNotice(member, request.text));
      break;
    }
    case ControlCall::kRequestStop:
      segment->RequestStop(member);
      break;
    default:
      return InternalError("control call " + std::to_string(static_cast<int>(request.call)) +
                           " is of no member [SMB-E138]");
  }
  return Status::Ok();
}

// --- Data --------------------------------------------------------------------------

std::string MessageSession::AnswerData(std::string_view message) {
  const Result<DataRequest> request = DecodeDataRequest(message);
  if (!request.ok()) return EncodeReply(Refuse(request.status()));
  DataReply reply;
  values_.clear();
  const Result<std::shared_ptr<Segment>> segment = attachments_->Find(request->attachment);
  reply.status = segment.ok() ? Data(*request, segment->get(), &reply) : segment.status();
  reply.sequence = request->sequence;
  if (reply.status.ok()) reply.payload = values_;
  return EncodeDataReply(reply);
}

Status MessageSession::Data(const DataRequest& request, Segment* segment, DataReply* reply) {
  reply->version_before = segment->version();
  Status status;
  switch (request.type) {
    case SegmentMessageType::kRead:
      status = Read(request, segment);
      break;
    case SegmentMessageType::kWrite:
      status = Write(request, segment);
      break;
    case SegmentMessageType::kUpdate:
      status = Update(request, segment, reply);
      break;
    default:
      status = Axpy(request, segment);
  }
  reply->version_after = segment->version();
  return status;
}

Status MessageSession::Read(const DataRequest& request, Segment* segment) {
  WireSpans wire;
  TF_SMB_RETURN_IF_ERROR(ReadSpans(segment->layout(), request.spans, &wire));
  values_.assign(wire.value_bytes, '\0');
  std::vector<Span> spans;
  for (size_t i = 0; i < wire.spans.size(); ++i) {
    const ConstSpan& span = wire.spans[i];
    spans.push_back(
        {span.variable, span.first, span.count, values_.data() + wire.offsets[i], span.wide});
  }
  Status status;
  Retry(request.timeout_s, [&](double seconds) {
    status = ReadCenter(segment, spans, Deadline::After(seconds), nullptr);
    return status.code() != StatusCode::kDeadlineExceeded;
  });
  return status;
}

Status MessageSession::Write(const DataRequest& request, Segment* segment) {
  WireSpans wire;
  TF_SMB_RETURN_IF_ERROR(ReadSpans(segment->layout(), request.spans, &wire));
  TF_SMB_RETURN_IF_ERROR(TakeValues(request, &wire));
  Status status;
  Retry(request.timeout_s, [&](double seconds) {
    status = WriteCenter(segment, wire.spans, Deadline::After(seconds), nullptr,
                         /*advance_version=*/false);
    return status.code() != StatusCode::kDeadlineExceeded;
  });
  if (status.ok() && request.advance_version) segment->AdvanceVersion();
  return status;
}

Status MessageSession::Update(const DataRequest& request, Segment* segment, DataReply* reply) {
  TF_SMB_RETURN_IF_ERROR(CheckMove(request));
  WireSpans wire;
  TF_SMB_RETURN_IF_ERROR(ReadSpans(segment->layout(), request.spans, &wire));
  TF_SMB_RETURN_IF_ERROR(TakeValues(request, &wire));
  UpdateRequest update;
  update.move.kind = static_cast<MoveKind>(request.move);
  update.move.rate = request.rate;
  update.move.output = static_cast<MoveOutput>(request.output);
  update.local = std::move(wire.spans);
  update.advance_version = false;
  const bool elastic = !request.share.has_value() && update.move.kind == MoveKind::kElastic;
  const bool accumulate = !request.share.has_value() && update.move.kind == MoveKind::kAccumulate;
  if (request.share.has_value()) {
    update.round = RoundShare{request.share->round, request.share->weight};
  }
  if (elastic || (accumulate && request.wants_out)) {
    values_.assign(elastic ? wire.value_bytes : wire.moved_bytes, '\0');
    for (const uint64_t offset : elastic ? wire.offsets : wire.moved_offsets) {
      update.out.push_back(values_.data() + offset);
    }
  }
  Result<UpdateReport> report = UpdateReport();
  Retry(request.timeout_s, [&](double seconds) {
    update.busy_chunk_timeout_s = seconds;
    report = UpdateCenter(segment, update, nullptr);
    return report.ok() ? report->chunks_skipped == 0
                       : report.status().code() != StatusCode::kDeadlineExceeded;
  });
  TF_SMB_RETURN_IF_ERROR(report.status());
  if (request.advance_version) segment->AdvanceVersion();
  reply->chunks_moved = report->chunks_moved;
  reply->chunks_skipped = report->chunks_skipped;
  reply->non_finite_variable = report->non_finite_variable;
  // What did not move the client knows; of a chunk with a NaN an elastic move moves the rest.
  if (report->chunks_moved == 0 && !(elastic && report->non_finite_variable.has_value())) {
    values_.clear();
  }
  return Status::Ok();
}

Status MessageSession::Axpy(const DataRequest& request, Segment* segment) {
  TF_SMB_ASSIGN_OR_RETURN(const std::shared_ptr<Segment> source,
                          attachments_->Find(request.source));
  return tf_smb::Axpy(segment, request.rate, source.get(),
                      Deadline::After(std::min(request.timeout_s, kLongestWaitSeconds)));
}

}  // namespace tf_smb
