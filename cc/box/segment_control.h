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

// INVALID_ARGUMENT if longer than kMaxTextBytes.
Status CheckText(const std::string& text);

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
  uint64_t epoch = 0;
  uint64_t batch = 0;
  uint64_t phase = 0;
  uint64_t exchanges = 0;
  uint64_t arrived = 0;
  uint64_t finished = 0;
  bool training = false;
};

// How far a worker is. Steps are updates of its weights; batches count data.
struct Progress {
  uint64_t steps = 0;
  uint64_t epoch = 0;
  uint64_t batch = 0;  // of the epoch: how many it has trained on
};

// A text that one worker left for all.
struct Notice {
  uint64_t number = 0;  // counts notices from 1; 0: none yet
  std::string text;
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

  // What the center now has of this member; counts an exchange.
  virtual void PublishProgress(const MemberId& member, const Progress& progress) = 0;
  // How far it is between exchanges, for those who wait for it.
  virtual void PublishSteps(const MemberId& member, uint64_t steps) = 0;
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
  // who are live when it opens, with the first of them that enters, and have not come to
  // a meeting. Shares are added in the order of worker indexes, so that the same shares
  // give the same bits.
  // The round this member is in now; 0 while it has to wait: one is open that it is not
  // in, or other members still read the mean of the last one, which it itself no longer will.
  virtual Result<uint64_t> EnterRound(const MemberId& member) = 0;
  // Whether no member of the round with a lower index still has a share to add.
  virtual bool IsTurn(const MemberId& member, uint64_t round) = 0;
  // This member's share is in the center. `ends_phase`: the phase ends with this round.
  virtual void FinishShare(const MemberId& member, uint64_t round, bool ends_phase) = 0;
  // True once the shares of all its members that are live and have not come to a meeting
  // since are in, or it was closed before. `force` closes it with those that are there.
  // Closing ends the phase if any of its members said so.
  virtual bool TryCloseRound(uint64_t round, bool force) = 0;
  // This member has read the mean.
  virtual void FinishRound(const MemberId& member, uint64_t round) = 0;
  // Whom the round waits for: for their shares, or, once closed, to read the mean.
  virtual std::vector<uint32_t> MissingInRound() = 0;
  virtual uint64_t rounds_closed() const = 0;

  // --- The schedule ----------------------------------------------------------
  // Phases of a schedule, counted from 0, one after the other; all workers go through
  // them together, and none through one that another has not come to yet: two workers
  // are never more than one phase apart. Never goes back under one schedule.
  virtual uint64_t phase() const = 0;
  // Where the schedule begins: for the member that seeds, while it seeds. Else ignored.
  virtual void SetFirstPhase(const MemberId& member, uint64_t phase) = 0;
  // This member acts by `phase` from now on.
  virtual void EnterPhase(const MemberId& member, uint64_t phase) = 0;
  // Ends `phase` unless a live member that is training has not entered it yet: true once
  // phase() is beyond it. Phases of rounds end with a round instead: see FinishShare.
  virtual bool TryEndPhase(const MemberId& member, uint64_t phase) = 0;
  // Sets the schedule in words, if nobody has before or no other member is live; returns
  // the words in force. Other words than before begin at phase 0. INVALID_ARGUMENT if
  // longer than kMaxTextBytes.
  virtual Result<std::string> AgreeOnSchedule(const MemberId& member,
                                              const std::string& words) = 0;

  // --- Words to all ----------------------------------------------------------
  // Leaves a text, instead of the one before; its number. INVALID_ARGUMENT if longer
  // than kMaxTextBytes.
  virtual Result<uint64_t> PostNotice(const MemberId& member, const std::string& text) = 0;
  virtual Notice LastNotice() = 0;
  // Asks all members to end their training; holds until a meeting closes.
  virtual void RequestStop(const MemberId& member) = 0;
  virtual bool stop_requested() const = 0;

  // --- Waiting ---------------------------------------------------------------
  // Read the count, look at the state, then wait for the count to move on.
  virtual uint32_t changes() const = 0;
  // Returns at a change, or after `timeout_nanos`; may return early.
  virtual void WaitForChange(uint32_t seen, int64_t timeout_nanos) const = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_CONTROL_H_
