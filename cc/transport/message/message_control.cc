#include "cc/transport/message/message_control.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "cc/common/clock.h"

namespace tf_smb {
namespace {

// The longest that one message waits at the server; callers come again.
constexpr double kLongestWaitSeconds = 5.0;
// What a wait takes that the server cannot be asked for: callers loop.
constexpr std::chrono::milliseconds kFailedWait(20);

MemberInfo InfoOf(const ListedMember& listed) {
  MemberInfo info;
  info.worker_index = listed.worker_index;
  info.state = static_cast<MemberState>(listed.state);
  info.process_id = listed.process_id;
  info.incarnation = listed.incarnation;
  info.steps = listed.steps;
  info.exchanges = listed.exchanges;
  info.arrived = listed.arrived;
  info.finished = listed.finished;
  info.training = listed.training;
  info.epoch = listed.epoch;
  info.batch = listed.batch;
  info.phase = listed.phase;
  return info;
}

}  // namespace

// --- Calls ---------------------------------------------------------------------

ControlRequest MessageControl::NewRequest(ControlCall call) const {
  ControlRequest request;
  request.minor = std::min(grant_.minor, kProtocolMinor);
  request.attachment = grant_.attachment;
  request.call = call;
  return request;
}

ControlRequest MessageControl::NewRequest(ControlCall call, const MemberId& member,
                                          uint64_t number) const {
  ControlRequest request = NewRequest(call);
  request.member = member.incarnation;
  request.number = number;
  return request;
}

Status MessageControl::CheckKnown(ControlCall call) const {
  if (grant_.minor >= SinceMinor(call)) return Status::Ok();
  return FailedPreconditionError(
      "the server speaks protocol " + std::to_string(kProtocolMajor) + "." +
      std::to_string(grant_.minor) +
      ", which knows nothing of schedules, notices and stops: upgrade the server [SMB-E143]");
}

Result<ControlReply> MessageControl::Call(ControlRequest request) const {
  TF_SMB_RETURN_IF_ERROR(CheckKnown(request.call));
  const Deadline deadline = Deadline::After(kCallSeconds);
  MutexLock lock(&mutex_);
  TF_SMB_ASSIGN_OR_RETURN(ControlReply reply, lane_->CallControl(&request, deadline));
  TF_SMB_RETURN_IF_ERROR(reply.status);
  return reply;
}

Status MessageControl::CallForStatus(ControlRequest request) const {
  return Call(std::move(request)).status();
}

uint64_t MessageControl::CallForNumber(ControlRequest request) const {
  const Result<ControlReply> reply = Call(std::move(request));
  return reply.ok() ? reply->number : 0;
}

Result<ControlReply> MessageControl::Wait(ControlRequest request, int64_t timeout_nanos) const {
  const double wanted = static_cast<double>(timeout_nanos) / kNanosPerSecond;
  request.seconds = std::clamp(wanted, 0.0, kLongestWaitSeconds);
  const Deadline deadline = Deadline::After(request.seconds + kCallSeconds);
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, waiting_->Take(deadline));
  Result<ControlReply> reply = lane->CallControl(&request, deadline);
  waiting_->GiveBack(std::move(lane));
  if (reply.ok() && !reply->status.ok()) return reply->status;
  return reply;
}

// --- Versions and changes --------------------------------------------------------

uint64_t MessageControl::version() const {
  const Result<ControlReply> reply = Call(NewRequest(ControlCall::kVersion));
  if (reply.ok()) last_version_.store(reply->number);
  return last_version_.load();
}

uint64_t MessageControl::WaitForVersion(uint64_t version, int64_t timeout_nanos) {
  ControlRequest request = NewRequest(ControlCall::kWaitForVersion);
  request.number = version;
  const Result<ControlReply> reply = Wait(std::move(request), timeout_nanos);
  if (reply.ok()) {
    last_version_.store(reply->number);
  } else {
    std::this_thread::sleep_for(
        std::min<std::chrono::nanoseconds>(kFailedWait, std::chrono::nanoseconds(timeout_nanos)));
  }
  return last_version_.load();
}

uint32_t MessageControl::changes() const {
  const Result<ControlReply> reply = Call(NewRequest(ControlCall::kChanges));
  if (reply.ok()) last_changes_.store(static_cast<uint32_t>(reply->number));
  return last_changes_.load();
}

void MessageControl::WaitForChange(uint32_t seen, int64_t timeout_nanos) const {
  ControlRequest request = NewRequest(ControlCall::kWaitForChange);
  request.number = seen;
  if (Wait(std::move(request), timeout_nanos).ok()) return;
  std::this_thread::sleep_for(
      std::min<std::chrono::nanoseconds>(kFailedWait, std::chrono::nanoseconds(timeout_nanos)));
}

// --- Members -----------------------------------------------------------------

Result<MemberId> MessageControl::Join(std::optional<uint32_t> worker_index) {
  ControlRequest request = NewRequest(ControlCall::kJoin);
  request.worker_index = worker_index;
  TF_SMB_ASSIGN_OR_RETURN(const ControlReply reply, Call(std::move(request)));
  return MemberId{reply.slot, reply.number};
}

Status MessageControl::Renew(const MemberId& member) {
  return CallForStatus(NewRequest(ControlCall::kRenew, member));
}

void MessageControl::Leave(const MemberId& member) {
  static_cast<void>(Call(NewRequest(ControlCall::kLeave, member)));
}

bool MessageControl::LeaveUnlessLast(const MemberId& member) {
  return CallForNumber(NewRequest(ControlCall::kLeaveUnlessLast, member)) != 0;
}

Status MessageControl::CheckMember(const MemberId& member) const {
  return CallForStatus(NewRequest(ControlCall::kCheckMember, member));
}

void MessageControl::PublishProgress(const MemberId& member, const Progress& progress) {
  ControlRequest request = NewRequest(ControlCall::kPublishProgress, member, progress.steps);
  request.epoch = progress.epoch;
  request.batch = progress.batch;
  static_cast<void>(Call(std::move(request)));
}

void MessageControl::PublishSteps(const MemberId& member, uint64_t steps) {
  static_cast<void>(Call(NewRequest(ControlCall::kPublishSteps, member, steps)));
}

void MessageControl::SetTraining(const MemberId& member, bool training) {
  ControlRequest request = NewRequest(ControlCall::kSetTraining, member);
  request.flag = training;
  static_cast<void>(Call(std::move(request)));
}

std::vector<MemberInfo> MessageControl::Members() {
  std::vector<MemberInfo> members;
  const Result<ControlReply> reply = Call(NewRequest(ControlCall::kMembers));
  if (!reply.ok()) return members;
  for (const ListedMember& listed : reply->members) members.push_back(InfoOf(listed));
  return members;
}

uint32_t MessageControl::CountLive() const {
  return static_cast<uint32_t>(CallForNumber(NewRequest(ControlCall::kCountLive)));
}

void MessageControl::MarkAbsent(uint32_t worker_index) {
  ControlRequest request = NewRequest(ControlCall::kMarkAbsent);
  request.worker_index = worker_index;
  static_cast<void>(Call(std::move(request)));
}

bool MessageControl::IsAbsent(uint32_t worker_index) const {
  ControlRequest request = NewRequest(ControlCall::kIsAbsent);
  request.worker_index = worker_index;
  return CallForNumber(std::move(request)) != 0;
}

// --- Seeding and meetings ----------------------------------------------------------

bool MessageControl::seeded() const {
  return CallForNumber(NewRequest(ControlCall::kSeeded)) != 0;
}

bool MessageControl::BeginSeeding(const MemberId& member) {
  return CallForNumber(NewRequest(ControlCall::kBeginSeeding, member)) != 0;
}

void MessageControl::FinishSeeding(const MemberId& member) {
  static_cast<void>(Call(NewRequest(ControlCall::kFinishSeeding, member)));
}

uint64_t MessageControl::Arrive(const MemberId& member) {
  return CallForNumber(NewRequest(ControlCall::kArrive, member));
}

bool MessageControl::TryCloseMeeting(uint64_t meeting) {
  ControlRequest request = NewRequest(ControlCall::kTryCloseMeeting);
  request.number = meeting;
  return CallForNumber(std::move(request)) != 0;
}

uint64_t MessageControl::FewestSteps() const {
  return CallForNumber(NewRequest(ControlCall::kFewestSteps));
}

void MessageControl::FinishMeeting(const MemberId& member, uint64_t meeting) {
  static_cast<void>(Call(NewRequest(ControlCall::kFinishMeeting, member, meeting)));
}

bool MessageControl::MeetingFinished(uint64_t meeting) const {
  ControlRequest request = NewRequest(ControlCall::kMeetingFinished);
  request.number = meeting;
  return CallForNumber(std::move(request)) != 0;
}

// --- Barriers, the lock, rounds ------------------------------------------------------

Result<uint64_t> MessageControl::ArriveAtBarrier(const MemberId& member,
                                                 const std::vector<uint32_t>& workers) {
  if (workers.size() > kMaxListedWorkers) {
    return InvalidArgumentError("a barrier lists " + std::to_string(workers.size()) +
                                " workers, at most " + std::to_string(kMaxListedWorkers) +
                                " are accepted [SMB-E127]");
  }
  ControlRequest request = NewRequest(ControlCall::kArriveAtBarrier, member);
  request.workers = workers;
  TF_SMB_ASSIGN_OR_RETURN(const ControlReply reply, Call(std::move(request)));
  return reply.number;
}

Result<std::vector<uint32_t>> MessageControl::MissingAtBarrier(const MemberId& member,
                                                               uint64_t barrier) {
  TF_SMB_ASSIGN_OR_RETURN(
      ControlReply reply, Call(NewRequest(ControlCall::kMissingAtBarrier, member, barrier)));
  return std::move(reply.workers);
}

bool MessageControl::WithdrawFromBarrier(const MemberId& member, uint64_t barrier) {
  return CallForNumber(NewRequest(ControlCall::kWithdrawFromBarrier, member, barrier)) != 0;
}

Result<uint64_t> MessageControl::TryLock(const MemberId& member, double lease_s) {
  ControlRequest request = NewRequest(ControlCall::kTryLock, member);
  request.seconds = lease_s;
  TF_SMB_ASSIGN_OR_RETURN(const ControlReply reply, Call(std::move(request)));
  return reply.number;
}

Status MessageControl::Unlock(const MemberId& member, uint64_t token) {
  return CallForStatus(NewRequest(ControlCall::kUnlock, member, token));
}

std::optional<uint32_t> MessageControl::LockHolder() {
  const Result<ControlReply> reply = Call(NewRequest(ControlCall::kLockHolder));
  if (!reply.ok() || reply->workers.empty()) return std::nullopt;
  return reply->workers.front();
}

Result<uint64_t> MessageControl::EnterRound(const MemberId& member) {
  TF_SMB_ASSIGN_OR_RETURN(const ControlReply reply,
                          Call(NewRequest(ControlCall::kEnterRound, member)));
  return reply.number;
}

bool MessageControl::IsTurn(const MemberId& member, uint64_t round) {
  // Servers of 1.1 have no turns: nobody waits.
  if (!CheckKnown(ControlCall::kIsTurn).ok()) return true;
  return CallForNumber(NewRequest(ControlCall::kIsTurn, member, round)) != 0;
}

void MessageControl::FinishShare(const MemberId& member, uint64_t round, bool ends_phase) {
  ControlRequest request = NewRequest(ControlCall::kFinishShare, member, round);
  request.flag = ends_phase;
  static_cast<void>(Call(std::move(request)));
}

bool MessageControl::TryCloseRound(uint64_t round, bool force) {
  ControlRequest request = NewRequest(ControlCall::kTryCloseRound);
  request.number = round;
  request.flag = force;
  return CallForNumber(std::move(request)) != 0;
}

void MessageControl::FinishRound(const MemberId& member, uint64_t round) {
  static_cast<void>(Call(NewRequest(ControlCall::kFinishRound, member, round)));
}

std::vector<uint32_t> MessageControl::MissingInRound() {
  Result<ControlReply> reply = Call(NewRequest(ControlCall::kMissingInRound));
  if (!reply.ok()) return {};
  return std::move(reply->workers);
}

uint64_t MessageControl::rounds_closed() const {
  return CallForNumber(NewRequest(ControlCall::kRoundsClosed));
}

// --- The schedule, words to all --------------------------------------------------------

uint64_t MessageControl::phase() const {
  const Result<ControlReply> reply = Call(NewRequest(ControlCall::kPhase));
  if (reply.ok()) last_phase_.store(reply->number);
  return last_phase_.load();
}

void MessageControl::SetFirstPhase(const MemberId& member, uint64_t phase) {
  static_cast<void>(Call(NewRequest(ControlCall::kSetFirstPhase, member, phase)));
}

void MessageControl::EnterPhase(const MemberId& member, uint64_t phase) {
  static_cast<void>(Call(NewRequest(ControlCall::kEnterPhase, member, phase)));
}

bool MessageControl::TryEndPhase(const MemberId& member, uint64_t phase) {
  return CallForNumber(NewRequest(ControlCall::kTryEndPhase, member, phase)) != 0;
}

Result<std::string> MessageControl::AgreeOnSchedule(const MemberId& member,
                                                    const std::string& words) {
  TF_SMB_RETURN_IF_ERROR(CheckText(words));
  ControlRequest request = NewRequest(ControlCall::kAgreeOnSchedule, member);
  request.text = words;
  TF_SMB_ASSIGN_OR_RETURN(ControlReply reply, Call(std::move(request)));
  return std::move(reply.text);
}

Result<uint64_t> MessageControl::PostNotice(const MemberId& member, const std::string& text) {
  TF_SMB_RETURN_IF_ERROR(CheckText(text));
  ControlRequest request = NewRequest(ControlCall::kPostNotice, member);
  request.text = text;
  TF_SMB_ASSIGN_OR_RETURN(const ControlReply reply, Call(std::move(request)));
  return reply.number;
}

Notice MessageControl::LastNotice() {
  Result<ControlReply> reply = Call(NewRequest(ControlCall::kLastNotice));
  if (!reply.ok()) return {};
  return {reply->number, std::move(reply->text)};
}

void MessageControl::RequestStop(const MemberId& member) {
  static_cast<void>(Call(NewRequest(ControlCall::kRequestStop, member)));
}

bool MessageControl::stop_requested() const {
  return CallForNumber(NewRequest(ControlCall::kStopRequested)) != 0;
}

}  // namespace tf_smb
