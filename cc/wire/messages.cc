#include "cc/wire/messages.h"

#include <utility>

#include "cc/wire/coding.h"

namespace tf_smb {
namespace {

constexpr uint32_t kMaxMessageBytes = 64 * 1024;

void PutHeader(Encoder* encoder, MessageType type) {
  encoder->PutU32(kProtocolMajor);
  encoder->PutU32(kProtocolMinor);
  encoder->PutU8(static_cast<uint8_t>(type));
}

Status CheckName(const char* what, std::string_view text, uint32_t max_bytes) {
  if (!text.empty() && text.size() <= max_bytes && text.find('\0') == std::string_view::npos) {
    return Status::Ok();
  }
  return InvalidArgumentError(std::string(what) + " has 1 to " + std::to_string(max_bytes) +
                              " bytes, none of them zero; got " + std::to_string(text.size()) +
                              " bytes: '" + std::string(text.substr(0, text.find('\0'))) + "'");
}

// The type, or why these bytes are none of ours.
Result<MessageType> GetHeader(Decoder* decoder) {
  const uint32_t major = decoder->GetU32();
  const uint32_t minor = decoder->GetU32();
  const auto type = static_cast<MessageType>(decoder->GetU8());
  if (!decoder->ok()) return DataLossError("a message is too short for its header");
  if (major != kProtocolMajor) {
    return FailedPreconditionError(
        "the peer speaks protocol " + std::to_string(major) + "." + std::to_string(minor) +
        ", this side " + std::to_string(kProtocolMajor) + "." + std::to_string(kProtocolMinor) +
        ": upgrade " + (major < kProtocolMajor ? "the peer" : "this side"));
  }
  return type;
}

}  // namespace

Status CheckSegmentName(std::string_view name) {
  return CheckName("a segment name", name, kMaxSegmentNameBytes);
}

Status CheckJobId(std::string_view job_id) {
  return CheckName("a job id", job_id, kMaxJobIdBytes);
}

std::string EncodeRequest(const Request& request) {
  Encoder encoder;
  PutHeader(&encoder, request.type);
  switch (request.type) {
    case MessageType::kOpen:
      encoder.PutString(request.open.segment_name);
      encoder.PutString(request.open.job_id);
      encoder.PutU32(request.open.num_workers);
      encoder.PutU8(static_cast<uint8_t>(request.open.on_existing));
      encoder.PutString(request.open.layout.Encode());
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
  TF_SMB_ASSIGN_OR_RETURN(request.type, GetHeader(&decoder));
  switch (request.type) {
    case MessageType::kOpen: {
      request.open.segment_name = decoder.GetString(kMaxSegmentNameBytes);
      request.open.job_id = decoder.GetString(kMaxJobIdBytes);
      request.open.num_workers = decoder.GetU32();
      const uint8_t on_existing = decoder.GetU8();
      const std::string layout = decoder.GetString(kMaxFrameBytes);
      TF_SMB_RETURN_IF_ERROR(decoder.Finish("an open request"));
      if (on_existing > static_cast<uint8_t>(OnExisting::kReplace)) {
        return DataLossError("an open request has on_existing " + std::to_string(on_existing));
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
      return DataLossError("unknown request type " +
                           std::to_string(static_cast<int>(request.type)));
  }
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("a request"));
  return request;
}

std::string EncodeReply(const Reply& reply) {
  Encoder encoder;
  PutHeader(&encoder, MessageType::kReply);
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
  TF_SMB_ASSIGN_OR_RETURN(const MessageType type, GetHeader(&decoder));
  if (type != MessageType::kReply) return DataLossError("a message is not a reply");
  Reply reply;
  const uint32_t code = decoder.GetU32();
  std::string message = decoder.GetString(kMaxMessageBytes);
  if (code > static_cast<uint32_t>(StatusCode::kInternal)) {
    return DataLossError("a reply has status code " + std::to_string(code));
  }
  reply.status = Status(static_cast<StatusCode>(code), std::move(message));
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
