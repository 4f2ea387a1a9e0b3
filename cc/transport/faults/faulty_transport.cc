#include "cc/transport/faults/faulty_transport.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tf_smb {
namespace {

class FaultyControl : public SegmentControl {
 public:
  FaultyControl(SegmentControl* inner, std::shared_ptr<FaultPlan> plan)
      : inner_(inner), plan_(std::move(plan)) {}

  const std::string& name() const override { return inner_->name(); }
  const std::string& job_id() const override { return inner_->job_id(); }
  uint32_t num_workers() const override { return inner_->num_workers(); }
  double lease_s() const override { return inner_->lease_s(); }
  const Layout& layout() const override { return inner_->layout(); }
  uint64_t version() const override {
    return Ask<uint64_t>(FaultyCall::kVersion, [&] { return inner_->version(); });
  }
  uint64_t WaitForVersion(uint64_t version, int64_t timeout_nanos) override {
    return Ask<uint64_t>(FaultyCall::kWaitForVersion,
                         [&] { return inner_->WaitForVersion(version, timeout_nanos); });
  }
  Result<MemberId> Join(std::optional<uint32_t> worker_index) override {
    return Ask<Result<MemberId>>(FaultyCall::kJoin, [&] { return inner_->Join(worker_index); });
  }
  Status Renew(const MemberId& member) override {
    return Ask<Status>(FaultyCall::kRenew, [&] { return inner_->Renew(member); });
  }
  void Leave(const MemberId& member) override {
    Tell(FaultyCall::kLeave, [&] { inner_->Leave(member); });
  }
  bool LeaveUnlessLast(const MemberId& member) override {
    return Ask<bool>(FaultyCall::kLeaveUnlessLast, [&] { return inner_->LeaveUnlessLast(member); });
  }
  Status CheckMember(const MemberId& member) const override {
    return Ask<Status>(FaultyCall::kCheckMember, [&] { return inner_->CheckMember(member); });
  }
  void PublishProgress(const MemberId& member, const Progress& progress) override {
    Tell(FaultyCall::kPublishProgress, [&] { inner_->PublishProgress(member, progress); });
  }
  void PublishSteps(const MemberId& member, uint64_t steps) override {
    Tell(FaultyCall::kPublishSteps, [&] { inner_->PublishSteps(member, steps); });
  }
  void SetTraining(const MemberId& member, bool training) override {
    Tell(FaultyCall::kSetTraining, [&] { inner_->SetTraining(member, training); });
  }
  std::vector<MemberInfo> Members() override {
    return Ask<std::vector<MemberInfo>>(FaultyCall::kMembers, [&] { return inner_->Members(); });
  }
  uint32_t CountLive() const override {
    return Ask<uint32_t>(FaultyCall::kCountLive, [&] { return inner_->CountLive(); });
  }
  void MarkAbsent(uint32_t worker_index) override {
    Tell(FaultyCall::kMarkAbsent, [&] { inner_->MarkAbsent(worker_index); });
  }
  bool IsAbsent(uint32_t worker_index) const override {
    return Ask<bool>(FaultyCall::kIsAbsent, [&] { return inner_->IsAbsent(worker_index); });
  }
  bool seeded() const override {
    return Ask<bool>(FaultyCall::kSeeded, [&] { return inner_->seeded(); });
  }
  bool BeginSeeding(const MemberId& member) override {
    return Ask<bool>(FaultyCall::kBeginSeeding, [&] { return inner_->BeginSeeding(member); });
  }
  void FinishSeeding(const MemberId& member) override {
    Tell(FaultyCall::kFinishSeeding, [&] { inner_->FinishSeeding(member); });
  }
  uint64_t Arrive(const MemberId& member) override {
    return Ask<uint64_t>(FaultyCall::kArrive, [&] { return inner_->Arrive(member); });
  }
  bool TryCloseMeeting(uint64_t meeting) override {
    return Ask<bool>(FaultyCall::kTryCloseMeeting,
                     [&] { return inner_->TryCloseMeeting(meeting); });
  }
  uint64_t FewestSteps() const override {
    return Ask<uint64_t>(FaultyCall::kFewestSteps, [&] { return inner_->FewestSteps(); });
  }
  void FinishMeeting(const MemberId& member, uint64_t meeting) override {
    Tell(FaultyCall::kFinishMeeting, [&] { inner_->FinishMeeting(member, meeting); });
  }
  bool MeetingFinished(uint64_t meeting) const override {
    return Ask<bool>(FaultyCall::kMeetingFinished,
                     [&] { return inner_->MeetingFinished(meeting); });
  }
  Result<uint64_t> ArriveAtBarrier(const MemberId& member,
                                   const std::vector<uint32_t>& workers) override {
    return Ask<Result<uint64_t>>(FaultyCall::kArriveAtBarrier,
                                 [&] { return inner_->ArriveAtBarrier(member, workers); });
  }
  Result<std::vector<uint32_t>> MissingAtBarrier(const MemberId& member,
                                                 uint64_t barrier) override {
    return Ask<Result<std::vector<uint32_t>>>(FaultyCall::kMissingAtBarrier,
        [&] { return inner_->MissingAtBarrier(member, barrier); });
  }
  bool WithdrawFromBarrier(const MemberId& member, uint64_t barrier) override {
    return Ask<bool>(FaultyCall::kWithdrawFromBarrier,
                     [&] { return inner_->WithdrawFromBarrier(member, barrier); });
  }
  Result<uint64_t> TryLock(const MemberId& member, double lease_s) override {
    return Ask<Result<uint64_t>>(FaultyCall::kTryLock,
                                 [&] { return inner_->TryLock(member, lease_s); });
  }
  Status Unlock(const MemberId& member, uint64_t token) override {
    return Ask<Status>(FaultyCall::kUnlock, [&] { return inner_->Unlock(member, token); });
  }
  std::optional<uint32_t> LockHolder() override {
    return Ask<std::optional<uint32_t>>(FaultyCall::kLockHolder,
                                        [&] { return inner_->LockHolder(); });
  }
  Result<uint64_t> EnterRound(const MemberId& member) override {
    return Ask<Result<uint64_t>>(FaultyCall::kEnterRound,
                                 [&] { return inner_->EnterRound(member); });
  }
  bool IsTurn(const MemberId& member, uint64_t round) override {
    return Ask<bool>(FaultyCall::kIsTurn, [&] { return inner_->IsTurn(member, round); });
  }
  void FinishShare(const MemberId& member, uint64_t round, bool ends_phase) override {
    Tell(FaultyCall::kFinishShare, [&] { inner_->FinishShare(member, round, ends_phase); });
  }
  bool TryCloseRound(uint64_t round, bool force) override {
    return Ask<bool>(FaultyCall::kTryCloseRound,
                     [&] { return inner_->TryCloseRound(round, force); });
  }
  void FinishRound(const MemberId& member, uint64_t round) override {
    Tell(FaultyCall::kFinishRound, [&] { inner_->FinishRound(member, round); });
  }
  std::vector<uint32_t> MissingInRound() override {
    return Ask<std::vector<uint32_t>>(FaultyCall::kMissingInRound,
                                      [&] { return inner_->MissingInRound(); });
  }
  uint64_t rounds_closed() const override {
    return Ask<uint64_t>(FaultyCall::kRoundsClosed, [&] { return inner_->rounds_closed(); });
  }
  uint64_t phase() const override {
    return Ask<uint64_t>(FaultyCall::kPhase, [&] { return inner_->phase(); });
  }
  void SetFirstPhase(const MemberId& member, uint64_t phase) override {
    Tell(FaultyCall::kSetFirstPhase, [&] { inner_->SetFirstPhase(member, phase); });
  }
  void EnterPhase(const MemberId& member, uint64_t phase) override {
    Tell(FaultyCall::kEnterPhase, [&] { inner_->EnterPhase(member, phase); });
  }
  bool TryEndPhase(const MemberId& member, uint64_t phase) override {
    return Ask<bool>(FaultyCall::kTryEndPhase, [&] { return inner_->TryEndPhase(member, phase); });
  }
  Result<std::string> AgreeOnSchedule(const MemberId& member, const std::string& words) override {
    return Ask<Result<std::string>>(FaultyCall::kAgreeOnSchedule,
                                    [&] { return inner_->AgreeOnSchedule(member, words); });
  }
  Result<uint64_t> PostNotice(const MemberId& member, const std::string& text) override {
    return Ask<Result<uint64_t>>(FaultyCall::kPostNotice,
                                 [&] { return inner_->PostNotice(member, text); });
  }
  Notice LastNotice() override {
    return Ask<Notice>(FaultyCall::kLastNotice, [&] { return inner_->LastNotice(); });
  }
  void RequestStop(const MemberId& member) override {
    Tell(FaultyCall::kRequestStop, [&] { inner_->RequestStop(member); });
  }
  bool stop_requested() const override {
    return Ask<bool>(FaultyCall::kStopRequested, [&] { return inner_->stop_requested(); });
  }
  uint32_t changes() const override {
    return Ask<uint32_t>(FaultyCall::kChanges, [&] { return inner_->changes(); });
  }
  void WaitForChange(uint32_t seen, int64_t timeout_nanos) const override {
    Tell(FaultyCall::kWaitForChange, [&] { inner_->WaitForChange(seen, timeout_nanos); });
  }

 private:
  template <typename T, typename Body>
  T Ask(FaultyCall call, const Body& body) const {
    return plan_->Around<T>(call, nullptr, body);
  }
  template <typename Body>
  void Tell(FaultyCall call, const Body& body) const {
    // There is nobody to tell it to.
    static_cast<void>(plan_->Around<Status>(call, nullptr, [&] {
      body();
      return Status::Ok();
    }));
  }

  SegmentControl* const inner_;
  const std::shared_ptr<FaultPlan> plan_;
};

class FaultyLink : public SegmentLink {
 public:
  FaultyLink(std::unique_ptr<SegmentLink> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)), control_(inner_->control(), plan_) {}

  SegmentControl* control() override { return &control_; }
  Status Read(const std::vector<Span>& spans, const Deadline& deadline,
              ThreadPool* pool) override {
    return plan_->Around<Status>(FaultyCall::kRead, &deadline,
                                 [&] { return inner_->Read(spans, deadline, pool); });
  }
  Status Write(const std::vector<ConstSpan>& spans, const Deadline& deadline,
               ThreadPool* pool) override {
    return plan_->Around<Status>(FaultyCall::kWrite, &deadline,
                                 [&] { return inner_->Write(spans, deadline, pool); });
  }
  Result<UpdateReport> Update(const UpdateRequest& request, ThreadPool* pool) override {
    return plan_->Around<Result<UpdateReport>>(
        FaultyCall::kUpdate, nullptr, [&] { return inner_->Update(request, pool); });
  }
  Status Axpy(double scale, SegmentLink* source, const Deadline& deadline) override {
    // The inner link knows only its own kind.
    auto* const faulty = dynamic_cast<FaultyLink*>(source);
    SegmentLink* const inner = faulty == nullptr ? source : faulty->inner_.get();
    return plan_->Around<Status>(FaultyCall::kAxpy, &deadline,
                                 [&] { return inner_->Axpy(scale, inner, deadline); });
  }

 private:
  const std::unique_ptr<SegmentLink> inner_;
  const std::shared_ptr<FaultPlan> plan_;
  FaultyControl control_;
};

class FaultyConnection : public Connection {
 public:
  FaultyConnection(std::unique_ptr<Connection> inner, std::shared_ptr<FaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  Result<std::unique_ptr<SegmentLink>> Open(const OpenRequest& request, bool* created,
                                            const Deadline& deadline) override {
    return Linked(plan_->Around<Result<std::unique_ptr<SegmentLink>>>(
        FaultyCall::kOpen, &deadline, [&] { return inner_->Open(request, created, deadline); }));
  }
  Result<std::unique_ptr<SegmentLink>> Attach(const std::string& segment_name,
                                              const Deadline& deadline) override {
    return Linked(plan_->Around<Result<std::unique_ptr<SegmentLink>>>(
        FaultyCall::kAttach, &deadline, [&] { return inner_->Attach(segment_name, deadline); }));
  }
  Status Free(const std::string& segment_name, const Deadline& deadline) override {
    return plan_->Around<Status>(FaultyCall::kFree, &deadline,
                                 [&] { return inner_->Free(segment_name, deadline); });
  }
  Result<std::vector<SegmentSummary>> List(const Deadline& deadline) override {
    return plan_->Around<Result<std::vector<SegmentSummary>>>(
        FaultyCall::kList, &deadline, [&] { return inner_->List(deadline); });
  }
  Result<std::unique_ptr<MemoryRegion>> Register(void* data, uint64_t size_bytes) override {
    return plan_->Around<Result<std::unique_ptr<MemoryRegion>>>(
        FaultyCall::kRegister, nullptr, [&] { return inner_->Register(data, size_bytes); });
  }

 private:
  Result<std::unique_ptr<SegmentLink>> Linked(Result<std::unique_ptr<SegmentLink>> link) const {
    if (!link.ok()) return link;
    return MakeFaulty(std::move(link).value(), plan_);
  }

  const std::unique_ptr<Connection> inner_;
  const std::shared_ptr<FaultPlan> plan_;
};

}  // namespace

std::unique_ptr<Connection> MakeFaulty(std::unique_ptr<Connection> inner,
                                       std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyConnection>(std::move(inner), std::move(plan));
}

std::unique_ptr<SegmentLink> MakeFaulty(std::unique_ptr<SegmentLink> inner,
                                        std::shared_ptr<FaultPlan> plan) {
  return std::make_unique<FaultyLink>(std::move(inner), std::move(plan));
}

Result<std::unique_ptr<Connection>> FaultyTransport::Connect(const Address& address,
                                                             const Deadline& deadline) {
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                          plan_->Around<Result<std::unique_ptr<Connection>>>(
                              FaultyCall::kConnect, &deadline,
                              [&] { return inner_->Connect(address, deadline); }));
  return MakeFaulty(std::move(connection), plan_);
}

}  // namespace tf_smb
