// The messages between a client and a server about segments as wholes; those about
// one segment are in segment_messages.h. PROTOCOL.md, beside this file, is their
// definition: change all together.
#ifndef TF_SMB_CC_WIRE_MESSAGES_H_
#define TF_SMB_CC_WIRE_MESSAGES_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cc/common/status.h"
#include "cc/wire/coding.h"
#include "cc/wire/layout.h"

namespace tf_smb {

constexpr uint32_t kProtocolMajor = 1;
constexpr uint32_t kProtocolMinor = 2;
// A frame is u32 length, then so many bytes. Longer ones are refused unread.
constexpr uint32_t kMaxFrameBytes = 64u << 20;
constexpr uint32_t kMaxSegmentNameBytes = 200;
constexpr uint32_t kMaxJobIdBytes = 100;

// INVALID_ARGUMENT unless of 1 to so many bytes, none of them zero.
Status CheckSegmentName(std::string_view name);
Status CheckJobId(std::string_view job_id);

// What every message begins with. `minor`: what both sides know, where that matters.
void PutMessageHeader(Encoder* encoder, uint8_t type, uint32_t minor = kProtocolMinor);
// The type, which may be one that nobody knows, and, where wanted, the minor version.
// DATA_LOSS if there is no header, FAILED_PRECONDITION naming both versions if the peer's
// major one differs.
Result<uint8_t> GetMessageHeader(Decoder* decoder, uint32_t* minor = nullptr);
// The same of a whole message.
Result<uint8_t> MessageTypeOf(std::string_view bytes);

// A status in a message without a scope has the one that its code usually has.
Status StatusFromWire(StatusCode code, std::string message);

// One number space with SegmentMessageType. Never renumber.
enum class MessageType : uint8_t {
  kOpen = 1,    // create or join a segment, by the rules of OnExisting
  kAttach = 2,  // an existing one, whoever made it
  kFree = 3,    // take the name away; memory goes with its last user
  kList = 4,
  kReply = 128,
};

// What to do about a segment of this name that another job made, or that all
// workers of this job have left. Never renumber.
enum class OnExisting : uint8_t {
  kFail = 0,     // refuse
  kResume = 1,   // join it, and go on from its center
  kReplace = 2,  // start anew, unless live workers are on it
};

struct OpenRequest {
  std::string segment_name;
  std::string job_id;
  uint32_t num_workers = 1;
  OnExisting on_existing = OnExisting::kFail;
  Layout layout;
  bool sparse = false;  // see SegmentOptions in cc/box/segment.h
};

struct SegmentSummary {
  std::string name;
  std::string job_id;
  uint64_t center_bytes = 0;
  uint32_t live_members = 0;
};

struct Request {
  MessageType type = MessageType::kList;
  OpenRequest open;          // kOpen
  std::string segment_name;  // kAttach, kFree
};

struct Reply {
  Status status;
  bool created = false;                  // kOpen
  std::vector<SegmentSummary> segments;  // kList
};

std::string EncodeRequest(const Request& request);
Result<Request> DecodeRequest(std::string_view bytes);
std::string EncodeReply(const Reply& reply);
Result<Reply> DecodeReply(std::string_view bytes);

}  // namespace tf_smb

#endif  // TF_SMB_CC_WIRE_MESSAGES_H_
