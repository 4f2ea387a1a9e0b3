// The messages about one segment, for transports that carry no memory: what a client asks
// of its control block and of its center. PROTOCOL.md, beside this file, is their
// definition: change both together.
//
// Plain numbers here; whoever answers checks what they mean.
#ifndef TF_SMB_CC_WIRE_SEGMENT_MESSAGES_H_
#define TF_SMB_CC_WIRE_SEGMENT_MESSAGES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cc/common/status.h"
#include "cc/wire/layout.h"
#include "cc/wire/messages.h"

namespace tf_smb {

// More workers than a message may list.
constexpr uint32_t kMaxListedWorkers = 1024;
constexpr uint32_t kMaxListedMembers = 1024;
constexpr uint32_t kMaxControlTextBytes = 4096;
// Of one chunk: no more variables begin in it.
constexpr uint32_t kMaxSpans = 4096;
// Values in a message begin at a multiple of this, and so does each span in them: they
// are computed with where they arrive.
constexpr uint64_t kPayloadAlignment = 16;

// One number space with MessageType. Never renumber.
enum class SegmentMessageType : uint8_t {
  kControl = 5,
  kRead = 6,
  kWrite = 7,
  kUpdate = 8,
  kAxpy = 9,
  kGrant = 129,  // a successful open or attach
  kControlReply = 130,
  kDataReply = 131,
};

// The functions of SegmentControl. Never renumber.
enum class ControlCall : uint8_t {
  kVersion = 1,
  kWaitForVersion = 2,
  kJoin = 3,
  kRenew = 4,
  kLeave = 5,
  kLeaveUnlessLast = 6,
  kCheckMember = 7,
  kPublishProgress = 8,
  kSetTraining = 9,
  kMembers = 10,
  kCountLive = 11,
  kMarkAbsent = 12,
  kIsAbsent = 13,
  kSeeded = 14,
  kBeginSeeding = 15,
  kFinishSeeding = 16,
  kArrive = 17,
  kTryCloseMeeting = 18,
  kFewestSteps = 19,
  kFinishMeeting = 20,
  kMeetingFinished = 21,
  kArriveAtBarrier = 22,
  kMissingAtBarrier = 23,
  kWithdrawFromBarrier = 24,
  kTryLock = 25,
  kUnlock = 26,
  kLockHolder = 27,
  kEnterRound = 28,
  kFinishShare = 29,
  kTryCloseRound = 30,
  kFinishRound = 31,
  kMissingInRound = 32,
  kRoundsClosed = 33,
  kChanges = 34,
  kWaitForChange = 35,
  // Since 1.2.
  kPublishSteps = 36,
  kIsTurn = 37,
  kPhase = 38,
  kSetFirstPhase = 39,
  kEnterPhase = 40,
  kTryEndPhase = 41,
  kAgreeOnSchedule = 42,
  kPostNotice = 43,
  kLastNotice = 44,
  kRequestStop = 45,
  kStopRequested = 46,
};
constexpr ControlCall kLastControlCall = ControlCall::kStopRequested;

// The first minor version whose servers know it.
inline uint32_t SinceMinor(ControlCall call) {
  return call > ControlCall::kWaitForChange ? 2 : 1;
}

// What a client may use from now on, and what it has to know of it.
struct Grant {
  uint32_t minor = kProtocolMinor;  // of a decoded one: the server's version
  uint64_t service = 0;  // whose attachments these are: differs between servers
  uint64_t attachment = 0;
  bool created = false;
  std::string segment_name;
  std::string job_id;
  uint32_t num_workers = 0;
  double lease_s = 0.0;
  Layout layout;
};

// PROTOCOL.md says which fields a call looks at; the others are zero.
struct ControlRequest {
  uint32_t minor = kProtocolMinor;  // that it is written in
  uint64_t sequence = 0;  // the reply has the same
  uint64_t attachment = 0;
  ControlCall call = ControlCall::kVersion;
  uint64_t member = 0;  // the incarnation of one that joined on this channel
  std::optional<uint32_t> worker_index;
  uint64_t number = 0;
  bool flag = false;
  double seconds = 0.0;
  std::vector<uint32_t> workers;
  // Since 1.2.
  uint64_t epoch = 0;
  uint64_t batch = 0;
  std::string text;
};

struct ListedMember {
  uint32_t worker_index = 0;
  uint32_t state = 0;
  uint32_t process_id = 0;
  uint64_t incarnation = 0;
  uint64_t steps = 0;
  uint64_t exchanges = 0;
  uint64_t arrived = 0;
  uint64_t finished = 0;
  bool training = false;
  // Since 1.2.
  uint64_t epoch = 0;
  uint64_t batch = 0;
  uint64_t phase = 0;
};

struct ControlReply {
  uint32_t minor = kProtocolMinor;  // that it is written in: the request's
  uint64_t sequence = 0;
  Status status;
  uint64_t number = 0;
  uint32_t slot = 0;  // kJoin
  std::vector<uint32_t> workers;
  std::vector<ListedMember> members;
  std::string text;  // since 1.2
};

struct WireSpan {
  uint32_t variable = 0;
  uint64_t first = 0;
  uint64_t count = 0;
  bool wide = false;
};

struct WireShare {
  uint64_t round = 0;
  double weight = 0.0;
};

// All spans lie in one chunk, those of kAxpy, which has none, aside.
struct DataRequest {
  SegmentMessageType type = SegmentMessageType::kRead;
  uint64_t sequence = 0;
  uint64_t attachment = 0;
  double timeout_s = 0.0;  // how long a busy chunk is waited for
  uint8_t move = 0;        // kUpdate
  uint8_t output = 0;      // kUpdate
  double rate = 0.0;       // kUpdate; of kAxpy the scale
  bool wants_out = false;  // kUpdate
  bool advance_version = false;    // kWrite, kUpdate
  std::optional<WireShare> share;  // kUpdate
  uint64_t source = 0;             // kAxpy: an attachment
  std::vector<WireSpan> spans;
  std::string_view payload;  // of a decoded one: in the bytes it was decoded from
};

struct DataReply {
  uint64_t sequence = 0;
  Status status;
  uint64_t chunks_moved = 0;
  uint64_t chunks_skipped = 0;
  uint64_t version_before = 0;
  uint64_t version_after = 0;
  std::optional<uint32_t> non_finite_variable;
  std::string_view payload;  // as in DataRequest
};

std::string EncodeGrant(const Grant& grant);
Result<Grant> DecodeGrant(std::string_view bytes);
std::string EncodeControlRequest(const ControlRequest& request);
Result<ControlRequest> DecodeControlRequest(std::string_view bytes);
std::string EncodeControlReply(const ControlReply& reply);
Result<ControlReply> DecodeControlReply(std::string_view bytes);
std::string EncodeDataRequest(const DataRequest& request);
Result<DataRequest> DecodeDataRequest(std::string_view bytes);
std::string EncodeDataReply(const DataReply& reply);
Result<DataReply> DecodeDataReply(std::string_view bytes);

}  // namespace tf_smb

#endif  // TF_SMB_CC_WIRE_SEGMENT_MESSAGES_H_
