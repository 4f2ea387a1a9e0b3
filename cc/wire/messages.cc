#include "cc/wire/messages.h"

#include <utility>

namespace tf_smb {
namespace {

constexpr uint32_t kMaxMessageBytes = 64 * 1024;

Status CheckName(const char* what, std::string_view text, uint32_t max_bytes) {
  if (!text.empty() && text.size() <= max_bytes && text.find('\0') == std::string_view::npos) {
    return Status::Ok();
  }
  return InvalidArgumentError(std::string(what) + " has 1 to " + std::to_string(max_bytes) +
                              " bytes, none of them zero; got " + std::to_string(text.size()) +
                              " bytes: '" + std::string(text.substr(0, text.find('\0'))) + "'"
                              " [SMB-E019]");
}

}  // namespace

Status CheckSegmentName(std::string_view name) {
  return CheckName("a segment name", name, kMaxSegmentNameBytes);
}

Status CheckJobId(std::string_view job_id) {
  return CheckName("a job id", job_id, kMaxJobIdBytes);
}

void PutMessageHeader(Encoder* encoder, uint8_t type, uint32_t minor) {
  encoder->PutU32(kProtocolMajor);
  encoder->PutU32(minor);
  encoder->PutU8(type);
}

Result<uint8_t> GetMessageHeader(Decoder* decoder, uint32_t* minor_version) {
  const uint32_t major = decoder->GetU32();
  const uint32_t minor = decoder->GetU32();
  const uint8_t type = decoder->GetU8();
  if (!decoder->ok()) return DataLossError("a message is too short for its header [SMB-E020]");
  if (major != kProtocolMajor) {
    return FailedPreconditionError(
        "the peer speaks protocol " + std::to_string(major) + "." + std::to_string(minor) +
        ", this side " + std::to_string(kProtocolMajor) + "." + std::to_string(kProtocolMinor) +
        ": upgrade " + (major < kProtocolMajor ? "the peer" : "this side") + " [SMB-E021]");
  }
  if (minor_version != nullptr) *minor_version = minor;
  return type;
}

Result<uint8_t> MessageTypeOf(std::string_view bytes) {
  Decoder decoder(bytes);
  return GetMessageHeader(&decoder);
}

Status StatusFromWire(StatusCode code, std::string message) {
  if (code == StatusCode::kUnavailable) return UnavailableError(std::move(message));
  if (code == StatusCode::kAborted) return AbortedError(std::move(message));
  return Status(code, std::move(message));
}

std::string EncodeRequest(const Request& request) {
  Encoder encoder;
  PutMessageHeader(&encoder, static_cast<uint8_t>(request.type));
  switch (request.type) {
    case MessageType::kOpen:
      encoder.PutString(request.open.segment_name);
      encoder.PutString(request.open.job_id);
      encoder.PutU32(request.open.num_workers);
      encoder.PutU8(static_cast<uint8_t>(request.open.on_existing));
      encoder.PutString(request.open.layout.Encode());
      // Servers of 1.0 do not know it.
      if (request.open.sparse) encoder.PutU8(1);
      break;
    case MessageType::kAttach:
    case MessageType::kFree:
      encoder.PutString(request.segment_name);
      break;
    case MessageType::kList:
    case MessageType::kReply:
      break;
  }
  return std::move(encoder).Release();
}

Result<Request> DecodeRequest(std::string_view bytes) {
  Decoder decoder(bytes);
  Request request;
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder));
  request.type = static_cast<MessageType>(type);
  switch (request.type) {
    case MessageType::kOpen: {
      request.open.segment_name = decoder.GetString(kMaxSegmentNameBytes);
      request.open.job_id = decoder.GetString(kMaxJobIdBytes);
      request.open.num_workers = decoder.GetU32();
      const uint8_t on_existing = decoder.GetU8();
      const std::string layout = decoder.GetString(kMaxFrameBytes);
      // Not in messages of 1.0.
      request.open.sparse = decoder.remaining() > 0 && decoder.GetU8() != 0;
      TF_SMB_RETURN_IF_ERROR(decoder.Finish("an open request"));
      if (on_existing > static_cast<uint8_t>(OnExisting::kReplace)) {
        return DataLossError("an open request has on_existing " + std::to_string(on_existing) +
                             " [SMB-E022]");
      }
      request.open.on_existing = static_cast<OnExisting>(on_existing);
      TF_SMB_ASSIGN_OR_RETURN(request.open.layout, Layout::Decode(layout));
      return request;
    }
    case MessageType::kAttach:
    case MessageType::kFree:
      request.segment_name = decoder.GetString(kMaxSegmentNameBytes);
      break;
    case MessageType::kList:
      break;
    default:
      return DataLossError("unknown request type " + std::to_string(type) + " [SMB-E023]");
  }
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("a request"));
  return request;
}

std::string EncodeReply(const Reply& reply) {
  Encoder encoder;
  PutMessageHeader(&encoder, static_cast<uint8_t>(MessageType::kReply));
  encoder.PutU32(static_cast<uint32_t>(reply.status.code()));
  encoder.PutString(std::string_view(reply.status.message()).substr(0, kMaxMessageBytes));
  encoder.PutU8(reply.created ? 1 : 0);
  encoder.PutU32(static_cast<uint32_t>(reply.segments.size()));
  for (const SegmentSummary& segment : reply.segments) {
    encoder.PutString(segment.name);
    encoder.PutString(segment.job_id);
    encoder.PutU64(segment.center_bytes);
    encoder.PutU32(segment.live_members);
  }
  return std::move(encoder).Release();
}

Result<Reply> DecodeReply(std::string_view bytes) {
  Decoder decoder(bytes);
  TF_SMB_ASSIGN_OR_RETURN(const uint8_t type, GetMessageHeader(&decoder));
  if (type != static_cast<uint8_t>(MessageType::kReply)) {
    return DataLossError("a message is not a reply [SMB-E024]");
  }
  Reply reply;
  const uint32_t code = decoder.GetU32();
  std::string message = decoder.GetString(kMaxMessageBytes);
  if (code > static_cast<uint32_t>(StatusCode::kInternal)) {
    return DataLossError("a reply has status code " + std::to_string(code) + " [SMB-E026]");
  }
  reply.status = StatusFromWire(static_cast<StatusCode>(code), std::move(message));
  reply.created = decoder.GetU8() != 0;
  const uint32_t count = decoder.GetU32();
  for (uint32_t i = 0; i < count && decoder.ok(); ++i) {
    SegmentSummary segment;
    segment.name = decoder.GetString(kMaxSegmentNameBytes);
    segment.job_id = decoder.GetString(kMaxJobIdBytes);
    segment.center_bytes = decoder.GetU64();
    segment.live_members = decoder.GetU32();
    reply.segments.push_back(std::move(segment));
  }
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("a reply"));
  return reply;
}

}  // namespace tf_smb
