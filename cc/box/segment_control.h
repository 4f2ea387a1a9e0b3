// SegmentControl: what a segment says and is told beside its weights: its layout,
// its members and their leases, seeding, meetings, waiting. Over shared memory
// the segment itself is this (segment.h); other transports answer it by messages.
#ifndef TF_SMB_CC_BOX_SEGMENT_CONTROL_H_
#define TF_SMB_CC_BOX_SEGMENT_CONTROL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cc/box/segment_format.h"
#include "cc/common/status.h"
#include "cc/wire/layout.h"

namespace tf_smb {

constexpr double kMaxLockLeaseSeconds = 3600.0;

// A member's right to be one: slot and incarnation. A fenced member's differs from
// what the slot holds now.
struct MemberId {
  uint32_t slot = 0;
  uint64_t incarnation = 0;
};

struct MemberInfo {
  uint32_t worker_index = 0;
  MemberState state = MemberState::kFree;
  uint32_t process_id = 0;
  uint64_t incarnation = 0;
  uint64_t steps = 0;
  uint64_t exchanges = 0;
  uint64_t arrived = 0;
  uint64_t finished = 0;
  bool training = false;
};

class SegmentControl {
 public:
  virtual ~SegmentControl() = default;

  virtual const std::string& name() const = 0;
  virtual const std::string& job_id() const = 0;
  // How many workers the job means to start.
  virtual uint32_t num_workers() const = 0;
  virtual double lease_s() const = 0;
  virtual const Layout& layout() const = 0;
  // Updates (exchanges, accumulates, writes, rounds' shares) applied to the center.
  virtual uint64_t version() const = 0;
  // Returns the version once it is at least `version`, or after `timeout_nanos`; may
  // return early.
  virtual uint64_t WaitForVersion(uint64_t version, int64_t timeout_nanos) = 0;

  // --- Members ---------------------------------------------------------------
  // Takes a slot and its `alive` mutex, on the calling thread, which must call
  // Renew, and at last, while this object still is, Leave: the thread's list of
  // robust mutexes points into the segment. Without an index: the lowest not live.
  // ALREADY_EXISTS if that worker is live, RESOURCE_EXHAUSTED if all slots are.
  virtual Result<MemberId> Join(std::optional<uint32_t> worker_index) = 0;
  // ABORTED if fenced. Reaps the dead on the way.
  virtual Status Renew(const MemberId& member) = 0;
  // From the thread that joined. Harmless for a fenced member.
  virtual void Leave(const MemberId& member) = 0;
  // As Leave, but only while another member is still training: one atomic
  // decision, so of several that stop together one always stays. True if left.
  // May be called from any thread; the joining thread still calls Leave.
  virtual bool LeaveUnlessLast(const MemberId& member) = 0;
  virtual Status CheckMember(const MemberId& member) const = 0;

  virtual void PublishProgress(const MemberId& member, uint64_t steps) = 0;
  virtual void SetTraining(const MemberId& member, bool training) = 0;

  // Everybody who ever joined and whose slot was not taken since, after reaping.
  virtual std::vector<MemberInfo> Members() = 0;
  virtual uint32_t CountLive() const = 0;
  // The launcher's word that this worker will not come (again): nobody waits for it.
  virtual void MarkAbsent(uint32_t worker_index) = 0;
  virtual bool IsAbsent(uint32_t worker_index) const = 0;

  // --- Seeding ---------------------------------------------------------------
  virtual bool seeded() const = 0;
  // True if this member may now write the first center; nobody else may until it
  // finished, left or died.
  virtual bool BeginSeeding(const MemberId& member) = 0;
  virtual void FinishSeeding(const MemberId& member) = 0;

  // --- Meetings --------------------------------------------------------------
  // A meeting is where all live members stand at one center: each arrives, the
  // last one's arrival closes it, each reads the center and finishes.
  virtual uint64_t Arrive(const MemberId& member) = 0;
  // True once all live members have arrived, or the meeting was closed before.
  virtual bool TryCloseMeeting(uint64_t meeting) = 0;
  // The fewest steps that a live member made in its training, as of the closing of
  // the meeting: the same for all who came, until they finish it.
  virtual uint64_t FewestSteps() const = 0;
  virtual void FinishMeeting(const MemberId& member, uint64_t meeting) = 0;
  virtual bool MeetingFinished(uint64_t meeting) const = 0;

  // --- Barriers --------------------------------------------------------------
  // A barrier is where the workers of a list wait for each other. Of the list, those that
  // left or died are not waited for; those that did not come yet are.
  // Counts this member as arrived; the number of the barrier. INVALID_ARGUMENT if it is
  // not in the list, or an index is out of range; RESOURCE_EXHAUSTED if too many are open.
  virtual Result<uint64_t> ArriveAtBarrier(const MemberId& member,
                                           const std::vector<uint32_t>& workers) = 0;
  // The workers that are still missing; empty once the barrier is passed. ABORTED if
  // this member was fenced.
  virtual Result<std::vector<uint32_t>> MissingAtBarrier(const MemberId& member,
                                                         uint64_t barrier) = 0;
  // Gives up waiting. False if the barrier has been passed meanwhile.
  virtual bool WithdrawFromBarrier(const MemberId& member, uint64_t barrier) = 0;

  // --- The lock --------------------------------------------------------------
  // Excludes those who ask for it, nobody else. Ends when it is given up, when its holder
  // leaves or dies, or `lease_s` after it was granted.
  // The token of the grant, larger than any before; 0 if a member has it.
  virtual Result<uint64_t> TryLock(const MemberId& member, double lease_s) = 0;
  // ABORTED if it lapsed before.
  virtual Status Unlock(const MemberId& member, uint64_t token) = 0;
  // The worker that has it.
  virtual std::optional<uint32_t> LockHolder() = 0;

  // --- Rounds ----------------------------------------------------------------
  // A round makes the center the weighted mean of its members' weights. In it are those
  // who are live when it opens: with the first of them that enters.
  // The round this member is in now; 0 while it has to wait: one is open that it is not
  // in, or other members still read the mean of the last one, which it itself no longer will.
  virtual Result<uint64_t> EnterRound(const MemberId& member) = 0;
  // This member's share is in the center.
  virtual void FinishShare(const MemberId& member, uint64_t round) = 0;
  // True once all its live members' shares are in, or it was closed before. `force` closes
  // it with those that are there.
  virtual bool TryCloseRound(uint64_t round, bool force) = 0;
  // This member has read the mean.
  virtual void FinishRound(const MemberId& member, uint64_t round) = 0;
  // Whom the round waits for: for their shares, or, once closed, to read the mean.
  virtual std::vector<uint32_t> MissingInRound() = 0;
  virtual uint64_t rounds_closed() const = 0;

  // --- Waiting ---------------------------------------------------------------
  // Read the count, look at the state, then wait for the count to move on.
  virtual uint32_t changes() const = 0;
  // Returns at a change, or after `timeout_nanos`; may return early.
  virtual void WaitForChange(uint32_t seen, int64_t timeout_nanos) const = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_CONTROL_H_
