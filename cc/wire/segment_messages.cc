#include "cc/wire/segment_messages.h"

#include <cstring>
#include <utility>

#include "cc/wire/coding.h"

namespace tf_smb {
namespace {

constexpr uint32_t kMaxMessageBytes = 64 * 1024;

void PutF64(Encoder* encoder, double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  encoder->PutU64(bits);
}

double GetF64(Decoder* decoder) {
  const uint64_t bits = decoder->GetU64();
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

void PutBool(Encoder* encoder, bool value) { encoder->PutU8(value ? 1 : 0); }

bool GetBool(Decoder* decoder) { return decoder->GetU8() != 0; }

void PutOptional(Encoder* encoder, const std::optional<uint32_t>& value) {
  PutBool(encoder, value.has_value());
  encoder->PutU32(value.value_or(0));
}

std::optional<uint32_t> GetOptional(Decoder* decoder) {
  const bool has = GetBool(decoder);
  const uint32_t value = decoder->GetU32();
  return has ? std::optional<uint32_t>(value) : std::nullopt;
}

void PutType(Encoder* encoder, SegmentMessageType type, uint32_t minor = kProtocolMinor) {
  PutMessageHeader(encoder, static_cast<uint8_t>(type), minor);
}

Status CheckType(uint8_t type, SegmentMessageType wanted, const char* what) {
  if (type == static_cast<uint8_t>(wanted)) return Status::Ok();
  return DataLossError("a message of type " + std::to_string(type) + " is not " + what +
                       " [SMB-E025]");
}

void PutStatus(Encoder* encoder, const Status& status) {
  encoder->PutU32(static_cast<uint32_t>(status.code()));
  encoder->PutU8(static_cast<uint8_t>(status.scope()));
  encoder->PutString(std::string_view(status.message()).substr(0, kMaxMessageBytes));
}

Status GetStatus(Decoder* decoder, Status* status) {
  const uint32_t code = decoder->GetU32();
  const uint8_t scope = decoder->GetU8();
  std::string message = decoder->GetString(kMaxMessageBytes);
  if (code > static_cast<uint32_t>(StatusCode::kInternal)) {
    return DataLossError("a reply has status code " + std::to_string(code) + " [SMB-E026]");
  }
  if (scope > static_cast<uint8_t>(FailureScope::kServer)) {
    return DataLossError("a reply has failure scope " + std::to_string(scope) + " [SMB-E027]");
  }
  *status = Status(static_cast<StatusCode>(code), std::move(message),
                   static_cast<FailureScope>(scope));
  return Status::Ok();
}

void PutWorkers(Encoder* encoder, const std::vector<uint32_t>& workers) {
  encoder->PutU32(static_cast<uint32_t>(workers.size()));
  for (const uint32_t worker : workers) encoder->PutU32(worker);
}

// The length of a list; with more than `max` the message is none of ours.
Result<uint32_t> GetCount(Decoder* decoder, uint32_t max, const char* what) {
  const uint32_t count = decoder->GetU32();
  if (count <= max) return count;
  return DataLossError("a message lists " + std::to_string(count) + " " + what + ", at most " +
                       std::to_string(max) + " are accepted [SMB-E028]");
}

Status GetWorkers(Decoder* decoder, std::vector<uint32_t>* workers) {
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t count,
                          GetCount(decoder, kMaxListedWorkers, "workers"));
  for (uint32_t i = 0; i < count && decoder->ok(); ++i) workers->push_back(decoder->GetU32());
  return Status::Ok();
}

void PutMember(Encoder* encoder, const ListedMember& member, uint32_t minor) {
  encoder->PutU32(member.worker_index);
  encoder->PutU32(member.state);
  encoder->PutU32(member.process_id);
  encoder->PutU64(member.incarnation);
  encoder->PutU64(member.steps);
  encoder->PutU64(member.exchanges);
  encoder->PutU64(member.arrived);
  encoder->PutU64(member.finished);
  PutBool(encoder, member.training);
  if (minor < 2) return;
  encoder->PutU64(member.epoch);
  encoder->PutU64(member.batch);
  encoder->PutU64(member.phase);
}

ListedMember GetMember(Decoder* decoder, uint32_t minor) {
  ListedMember member;
  member.worker_index = decoder->GetU32();
  member.state = decoder->GetU32();
  member.process_id = decoder->GetU32();
  member.incarnation = decoder->GetU64();
  member.steps = decoder->GetU64();
  member.exchanges = decoder->GetU64();
  member.arrived = decoder->GetU64();
  member.finished = decoder->GetU64();
  member.training = GetBool(decoder);
  if (minor < 2) return member;
  member.epoch = decoder->GetU64();
  member.batch = decoder->GetU64();
  member.phase = decoder->GetU64();
  return member;
}

Status GetSpans(Decoder* decoder, std::vector<WireSpan>* spans) {
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t count, GetCount(decoder, kMaxSpans, "spans"));
  for (uint32_t i = 0; i < count && decoder->ok(); ++i) {
    WireSpan& span = spans->emplace_back();
    span.variable = decoder->GetU32();
    span.first = decoder->GetU64();
    span.count = decoder->GetU64();
    span.wide = GetBool(decoder);
  }
  return Status::Ok();
}

// Zeros in front, so that the bytes begin aligned; they are the last of their message.
std::string FinishWithPayload(Encoder encoder, std::string_view payload) {
  while ((encoder.bytes().size() + sizeof(uint32_t)) % kPayloadAlignment != 0) encoder.PutU8(0);
  encoder.PutString(payload);
  return std::move(encoder).Release();
}

Result<std::string_view> GetPayload(std::string_view message, Decoder* decoder,
                                    const char* what) {
  while (decoder->ok() && (message.size() - decoder->remaining() + sizeof(uint32_t)) %
                                  kPayloadAlignment !=
                              0) {
    decoder->GetU8();
  }
  const uint32_t size = decoder->GetU32();
  if (decoder->ok() && size == decoder->remaining()) {
    return message.substr(message.size() - size);
  }
  return DataLossError(std::string(what) + " is cut short or longer than its contents [SMB-E018]");
}

bool IsDataType(uint8_t type) {
  return type >= static_cast<uint8_t>(SegmentMessageType::kRead) &&
         type <= static_cast<uint8_t>(SegmentMessageType::kAxpy);
}

}  // namespace

std::string EncodeGrant(const Grant& grant) {
  Encoder encoder;
  PutType(&encoder, SegmentMessageType::kGrant);
  encoder.PutU64(grant.service);
  encoder.PutU64(grant.attachment);
  PutBool(&encoder, grant.created);
  encoder.PutString(grant.segment_name);
  encoder.PutString(grant.job_id);
  encoder.PutU32(grant.num_workers);
  PutF64(&encoder, grant.lease_s);
  encoder.PutString(grant.layout.Encode());
  return std::move(encoder).Release();
}

Result<Grant> DecodeGrant(std::string_view bytes) {
  Decoder decoder(bytes);
  Grant grant;
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder, &grant.minor));
  TF_SMB_RETURN_IF_ERROR(CheckType(type, SegmentMessageType::kGrant, "a grant"));
  grant.service = decoder.GetU64();
  grant.attachment = decoder.GetU64();
  grant.created = GetBool(&decoder);
  grant.segment_name = decoder.GetString(kMaxSegmentNameBytes);
  grant.job_id = decoder.GetString(kMaxJobIdBytes);
  grant.num_workers = decoder.GetU32();
  grant.lease_s = GetF64(&decoder);
  const std::string layout = decoder.GetString(kMaxFrameBytes);
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("a grant"));
  TF_SMB_ASSIGN_OR_RETURN(grant.layout, Layout::Decode(layout));
  return grant;
}

std::string EncodeControlRequest(const ControlRequest& request) {
  Encoder encoder;
  PutType(&encoder, SegmentMessageType::kControl, request.minor);
  encoder.PutU64(request.sequence);
  encoder.PutU64(request.attachment);
  encoder.PutU8(static_cast<uint8_t>(request.call));
  encoder.PutU64(request.member);
  PutOptional(&encoder, request.worker_index);
  encoder.PutU64(request.number);
  PutBool(&encoder, request.flag);
  PutF64(&encoder, request.seconds);
  PutWorkers(&encoder, request.workers);
  if (request.minor >= 2) {
    encoder.PutU64(request.epoch);
    encoder.PutU64(request.batch);
    encoder.PutString(request.text);
  }
  return std::move(encoder).Release();
}

Result<ControlRequest> DecodeControlRequest(std::string_view bytes) {
  Decoder decoder(bytes);
  ControlRequest request;
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder, &request.minor));
  TF_SMB_RETURN_IF_ERROR(CheckType(type, SegmentMessageType::kControl, "a control request"));
  request.sequence = decoder.GetU64();
  request.attachment = decoder.GetU64();
  const uint8_t call = decoder.GetU8();
  request.member = decoder.GetU64();
  request.worker_index = GetOptional(&decoder);
  request.number = decoder.GetU64();
  request.flag = GetBool(&decoder);
  request.seconds = GetF64(&decoder);
  TF_SMB_RETURN_IF_ERROR(GetWorkers(&decoder, &request.workers));
  if (request.minor >= 2) {
    request.epoch = decoder.GetU64();
    request.batch = decoder.GetU64();
    request.text = decoder.GetString(kMaxControlTextBytes);
  }
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("a control request"));
  if (call < static_cast<uint8_t>(ControlCall::kVersion) ||
      call > static_cast<uint8_t>(kLastControlCall)) {
    return DataLossError("unknown control call " + std::to_string(call) + " [SMB-E029]");
  }
  request.call = static_cast<ControlCall>(call);
  return request;
}

std::string EncodeControlReply(const ControlReply& reply) {
  Encoder encoder;
  PutType(&encoder, SegmentMessageType::kControlReply, reply.minor);
  encoder.PutU64(reply.sequence);
  PutStatus(&encoder, reply.status);
  encoder.PutU64(reply.number);
  encoder.PutU32(reply.slot);
  PutWorkers(&encoder, reply.workers);
  encoder.PutU32(static_cast<uint32_t>(reply.members.size()));
  for (const ListedMember& member : reply.members) PutMember(&encoder, member, reply.minor);
  if (reply.minor >= 2) encoder.PutString(reply.text);
  return std::move(encoder).Release();
}

Result<ControlReply> DecodeControlReply(std::string_view bytes) {
  Decoder decoder(bytes);
  ControlReply reply;
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder, &reply.minor));
  TF_SMB_RETURN_IF_ERROR(
      CheckType(type, SegmentMessageType::kControlReply, "a control reply"));
  reply.sequence = decoder.GetU64();
  TF_SMB_RETURN_IF_ERROR(GetStatus(&decoder, &reply.status));
  reply.number = decoder.GetU64();
  reply.slot = decoder.GetU32();
  TF_SMB_RETURN_IF_ERROR(GetWorkers(&decoder, &reply.workers));
  TF_SMB_ASSIGN_OR_RETURN(const uint32_t count,
                          GetCount(&decoder, kMaxListedMembers, "members"));
  for (uint32_t i = 0; i < count && decoder.ok(); ++i) {
    reply.members.push_back(GetMember(&decoder, reply.minor));
  }
  if (reply.minor >= 2) reply.text = decoder.GetString(kMaxControlTextBytes);
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("a control reply"));
  return reply;
}

std::string EncodeDataRequest(const DataRequest& request) {
  Encoder encoder;
  PutType(&encoder, request.type);
  encoder.PutU64(request.sequence);
  encoder.PutU64(request.attachment);
  PutF64(&encoder, request.timeout_s);
  encoder.PutU8(request.move);
  encoder.PutU8(request.output);
  PutF64(&encoder, request.rate);
  PutBool(&encoder, request.wants_out);
  PutBool(&encoder, request.advance_version);
  PutBool(&encoder, request.share.has_value());
  const WireShare share = request.share.value_or(WireShare());
  encoder.PutU64(share.round);
  PutF64(&encoder, share.weight);
  encoder.PutU64(request.source);
  encoder.PutU32(static_cast<uint32_t>(request.spans.size()));
  for (const WireSpan& span : request.spans) {
    encoder.PutU32(span.variable);
    encoder.PutU64(span.first);
    encoder.PutU64(span.count);
    PutBool(&encoder, span.wide);
  }
  return FinishWithPayload(std::move(encoder), request.payload);
}

Result<DataRequest> DecodeDataRequest(std::string_view bytes) {
  Decoder decoder(bytes);
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder));
  if (!IsDataType(type)) {
    return DataLossError("a message of type " + std::to_string(type) + " is not a data request"
                         " [SMB-E025]");
  }
  DataRequest request;
  request.type = static_cast<SegmentMessageType>(type);
  request.sequence = decoder.GetU64();
  request.attachment = decoder.GetU64();
  request.timeout_s = GetF64(&decoder);
  request.move = decoder.GetU8();
  request.output = decoder.GetU8();
  request.rate = GetF64(&decoder);
  request.wants_out = GetBool(&decoder);
  request.advance_version = GetBool(&decoder);
  const bool has_share = GetBool(&decoder);
  WireShare share;
  share.round = decoder.GetU64();
  share.weight = GetF64(&decoder);
  if (has_share) request.share = share;
  request.source = decoder.GetU64();
  TF_SMB_RETURN_IF_ERROR(GetSpans(&decoder, &request.spans));
  TF_SMB_ASSIGN_OR_RETURN(request.payload, GetPayload(bytes, &decoder, "a data request"));
  return request;
}

std::string EncodeDataReply(const DataReply& reply) {
  Encoder encoder;
  PutType(&encoder, SegmentMessageType::kDataReply);
  encoder.PutU64(reply.sequence);
  PutStatus(&encoder, reply.status);
  encoder.PutU64(reply.chunks_moved);
  encoder.PutU64(reply.chunks_skipped);
  encoder.PutU64(reply.version_before);
  encoder.PutU64(reply.version_after);
  PutOptional(&encoder, reply.non_finite_variable);
  return FinishWithPayload(std::move(encoder), reply.payload);
}

Result<DataReply> DecodeDataReply(std::string_view bytes) {
  Decoder decoder(bytes);
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder));
  TF_SMB_RETURN_IF_ERROR(CheckType(type, SegmentMessageType::kDataReply, "a data reply"));
  DataReply reply;
  reply.sequence = decoder.GetU64();
  TF_SMB_RETURN_IF_ERROR(GetStatus(&decoder, &reply.status));
  reply.chunks_moved = decoder.GetU64();
  reply.chunks_skipped = decoder.GetU64();
  reply.version_before = decoder.GetU64();
  reply.version_after = decoder.GetU64();
  reply.non_finite_variable = GetOptional(&decoder);
  TF_SMB_ASSIGN_OR_RETURN(reply.payload, GetPayload(bytes, &decoder, "a data reply"));
  return reply;
}

}  // namespace tf_smb
