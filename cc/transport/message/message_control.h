// MessageControl: a segment's control, asked for by messages. Functions that can say no
// failure answer as if nothing had happened (0, false, nothing) when the server cannot be
// reached; Renew and CheckMember tell.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_CONTROL_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_CONTROL_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/box/segment_control.h"
#include "cc/common/mutex.h"
#include "cc/common/status.h"
#include "cc/transport/message/lane.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {

// Thread-safe.
class MessageControl : public SegmentControl {
 public:
  // `lane` is the one that the grant came over: the server ends the memberships that were
  // begun on it when it closes. `waiting` must outlive this.
  MessageControl(Grant grant, std::unique_ptr<Lane> lane, LanePool* waiting)
      : grant_(std::move(grant)), waiting_(waiting), lane_(std::move(lane)) {}

  const Grant& grant() const { return grant_; }

  const std::string& name() const override { return grant_.segment_name; }
  const std::string& job_id() const override { return grant_.job_id; }
  uint32_t num_workers() const override { return grant_.num_workers; }
  double lease_s() const override { return grant_.lease_s; }
  const Layout& layout() const override { return grant_.layout; }
  uint64_t version() const override;
  uint64_t WaitForVersion(uint64_t version, int64_t timeout_nanos) override;
  Result<MemberId> Join(std::optional<uint32_t> worker_index) override;
  Status Renew(const MemberId& member) override;
  void Leave(const MemberId& member) override;
  bool LeaveUnlessLast(const MemberId& member) override;
  Status CheckMember(const MemberId& member) const override;
  void PublishProgress(const MemberId& member, const Progress& progress) override;
  void PublishSteps(const MemberId& member, uint64_t steps) override;
  void SetTraining(const MemberId& member, bool training) override;
  std::vector<MemberInfo> Members() override;
  uint32_t CountLive() const override;
  void MarkAbsent(uint32_t worker_index) override;
  bool IsAbsent(uint32_t worker_index) const override;
  bool seeded() const override;
  bool BeginSeeding(const MemberId& member) override;
  void FinishSeeding(const MemberId& member) override;
  uint64_t Arrive(const MemberId& member) override;
  bool TryCloseMeeting(uint64_t meeting) override;
  uint64_t FewestSteps() const override;
  void FinishMeeting(const MemberId& member, uint64_t meeting) override;
  bool MeetingFinished(uint64_t meeting) const override;
  Result<uint64_t> ArriveAtBarrier(const MemberId& member,
                                   const std::vector<uint32_t>& workers) override;
  Result<std::vector<uint32_t>> MissingAtBarrier(const MemberId& member,
                                                 uint64_t barrier) override;
  bool WithdrawFromBarrier(const MemberId& member, uint64_t barrier) override;
  Result<uint64_t> TryLock(const MemberId& member, double lease_s) override;
  Status Unlock(const MemberId& member, uint64_t token) override;
  std::optional<uint32_t> LockHolder() override;
  Result<uint64_t> EnterRound(const MemberId& member) override;
  bool IsTurn(const MemberId& member, uint64_t round) override;
  void FinishShare(const MemberId& member, uint64_t round, bool ends_phase) override;
  bool TryCloseRound(uint64_t round, bool force) override;
  void FinishRound(const MemberId& member, uint64_t round) override;
  std::vector<uint32_t> MissingInRound() override;
  uint64_t rounds_closed() const override;
  uint64_t phase() const override;
  void SetFirstPhase(const MemberId& member, uint64_t phase) override;
  void EnterPhase(const MemberId& member, uint64_t phase) override;
  bool TryEndPhase(const MemberId& member, uint64_t phase) override;
  Result<std::string> AgreeOnSchedule(const MemberId& member, const std::string& words) override;
  Result<uint64_t> PostNotice(const MemberId& member, const std::string& text) override;
  Notice LastNotice() override;
  void RequestStop(const MemberId& member) override;
  bool stop_requested() const override;
  uint32_t changes() const override;
  void WaitForChange(uint32_t seen, int64_t timeout_nanos) const override;

 private:
  ControlRequest NewRequest(ControlCall call) const;
  ControlRequest NewRequest(ControlCall call, const MemberId& member, uint64_t number = 0) const;
  // FAILED_PRECONDITION if the server is older than the call.
  Status CheckKnown(ControlCall call) const;
  // Over the link's own lane. Whoever comes later waits for those before, until
  // kCallSeconds after it came.
  Result<ControlReply> Call(ControlRequest request) const EXCLUDES(mutex_);
  Status CallForStatus(ControlRequest request) const;
  uint64_t CallForNumber(ControlRequest request) const;
  // Over a waiting lane, for at most `timeout_nanos`.
  Result<ControlReply> Wait(ControlRequest request, int64_t timeout_nanos) const;

  const Grant grant_;
  LanePool* const waiting_;
  mutable std::atomic<uint64_t> last_version_{0};
  mutable std::atomic<uint32_t> last_changes_{0};
  mutable std::atomic<uint64_t> last_phase_{0};
  mutable Mutex mutex_;
  const std::unique_ptr<Lane> lane_ GUARDED_BY(mutex_);
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_CONTROL_H_
