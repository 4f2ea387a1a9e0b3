// What goes wrong, and when: lists that a test hands to a FaultyTransport or to faulty
// channels. Shared between them and the test.
#ifndef TF_SMB_CC_TRANSPORT_FAULTS_FAULT_PLAN_H_
#define TF_SMB_CC_TRANSPORT_FAULTS_FAULT_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cc/common/clock.h"
#include "cc/common/mutex.h"
#include "cc/common/status.h"

namespace tf_smb {

// The functions of Transport, Connection, SegmentLink and SegmentControl that reach a server.
enum class FaultyCall {
  kConnect,
  kOpen,
  kAttach,
  kFree,
  kList,
  kRegister,
  kRead,
  kWrite,
  kUpdate,
  kAxpy,
  kVersion,
  kWaitForVersion,
  kJoin,
  kRenew,
  kLeave,
  kLeaveUnlessLast,
  kCheckMember,
  kPublishProgress,
  kPublishSteps,
  kSetTraining,
  kMembers,
  kCountLive,
  kMarkAbsent,
  kIsAbsent,
  kSeeded,
  kBeginSeeding,
  kFinishSeeding,
  kArrive,
  kTryCloseMeeting,
  kFewestSteps,
  kFinishMeeting,
  kMeetingFinished,
  kArriveAtBarrier,
  kMissingAtBarrier,
  kWithdrawFromBarrier,
  kTryLock,
  kUnlock,
  kLockHolder,
  kEnterRound,
  kIsTurn,
  kFinishShare,
  kTryCloseRound,
  kFinishRound,
  kMissingInRound,
  kRoundsClosed,
  kPhase,
  kSetFirstPhase,
  kEnterPhase,
  kTryEndPhase,
  kAgreeOnSchedule,
  kPostNotice,
  kLastNotice,
  kRequestStop,
  kStopRequested,
  kChanges,
  kWaitForChange,
};

enum class FaultKind {
  // The peer is lost before it got the request, or before its answer came: the caller
  // waits `seconds`, at most to its deadline. Functions without a status then answer as
  // if nothing had happened.
  kDropRequest,
  kDropReply,
  kDelay,      // `seconds`, then as usual
  kFail,       // `status`, without a call
  kRunBefore,  // `action`: kill the peer, for example; then as usual
  kRunAfter,
};

struct Fault {
  FaultyCall call = FaultyCall::kConnect;
  uint64_t nth = 0;  // of its kind, from 1 on; 0: each
  FaultKind kind = FaultKind::kFail;
  double seconds = 0.0;
  Status status;
  std::function<void()> action;
};

// Thread-safe.
class FaultPlan {
 public:
  explicit FaultPlan(std::vector<Fault> faults) : faults_(std::move(faults)) {}

  void Add(Fault fault) EXCLUDES(mutex_);
  // Takes effect at once; calls are counted on.
  void Clear() EXCLUDES(mutex_);
  uint64_t calls(FaultyCall call) const EXCLUDES(mutex_);

  // Makes the call, with what goes wrong with it. `deadline` may be null.
  template <typename T, typename Body>
  T Around(FaultyCall call, const Deadline* deadline, const Body& body) {
    const std::vector<Fault> due = Take(call);
    if (const Fault* const fault = Before(due)) {
      return Outcome<T>(fault->kind == FaultKind::kFail ? fault->status : Lose(*fault, deadline));
    }
    T result = body();
    if (const Fault* const fault = After(due)) return Outcome<T>(Lose(*fault, deadline));
    return result;
  }

 private:
  template <typename T>
  static T Outcome(Status status) {
    if constexpr (std::is_convertible_v<Status, T>) {
      return status;
    } else {
      return T();
    }
  }

  std::vector<Fault> Take(FaultyCall call) EXCLUDES(mutex_);
  // Delays and actions; the fault that takes the place of the call, or of its result.
  static const Fault* Before(const std::vector<Fault>& due);
  static const Fault* After(const std::vector<Fault>& due);
  static Status Lose(const Fault& fault, const Deadline* deadline);

  mutable Mutex mutex_;
  std::vector<Fault> faults_ GUARDED_BY(mutex_);
  std::map<FaultyCall, uint64_t> calls_ GUARDED_BY(mutex_);
};

// --- Channels ------------------------------------------------------------------

enum class FrameDirection { kSend, kReceive };

enum class FrameFaultKind {
  kDrop,
  kDelay,     // `seconds`
  kClose,     // the channel, in the frame's place
  kTruncate,  // to `bytes`
};

struct FrameFault {
  FrameDirection direction = FrameDirection::kSend;
  uint64_t nth = 0;  // frame in this direction, from 1 on, of all channels; 0: each
  FrameFaultKind kind = FrameFaultKind::kDrop;
  double seconds = 0.0;
  size_t bytes = 0;
};

// Thread-safe.
class FrameFaultPlan {
 public:
  explicit FrameFaultPlan(std::vector<FrameFault> faults) : faults_(std::move(faults)) {}

  void Add(FrameFault fault) EXCLUDES(mutex_);
  void Clear() EXCLUDES(mutex_);
  // Counts a frame; what goes wrong with it.
  std::vector<FrameFault> Take(FrameDirection direction) EXCLUDES(mutex_);
  uint64_t frames(FrameDirection direction) const EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::vector<FrameFault> faults_ GUARDED_BY(mutex_);
  std::map<FrameDirection, uint64_t> frames_ GUARDED_BY(mutex_);
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_FAULTS_FAULT_PLAN_H_
