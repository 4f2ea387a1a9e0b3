#include "cc/transport/faults/fault_plan.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace tf_smb {
namespace {

void Sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

}  // namespace

// --- FaultPlan -----------------------------------------------------------------

void FaultPlan::Add(Fault fault) {
  MutexLock lock(&mutex_);
  faults_.push_back(std::move(fault));
}

void FaultPlan::Clear() {
  MutexLock lock(&mutex_);
  faults_.clear();
}

uint64_t FaultPlan::calls(FaultyCall call) const {
  MutexLock lock(&mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

std::vector<Fault> FaultPlan::Take(FaultyCall call) {
  MutexLock lock(&mutex_);
  const uint64_t number = ++calls_[call];
  std::vector<Fault> due;
  for (const Fault& fault : faults_) {
    if (fault.call == call && (fault.nth == 0 || fault.nth == number)) due.push_back(fault);
  }
  return due;
}

const Fault* FaultPlan::Before(const std::vector<Fault>& due) {
  const Fault* instead = nullptr;
  for (const Fault& fault : due) {
    if (fault.kind == FaultKind::kDelay) Sleep(fault.seconds);
    if (fault.kind == FaultKind::kRunBefore) fault.action();
    if (fault.kind == FaultKind::kFail || fault.kind == FaultKind::kDropRequest) instead = &fault;
  }
  return instead;
}

const Fault* FaultPlan::After(const std::vector<Fault>& due) {
  const Fault* instead = nullptr;
  for (const Fault& fault : due) {
    if (fault.kind == FaultKind::kRunAfter) fault.action();
    if (fault.kind == FaultKind::kDropReply) instead = &fault;
  }
  return instead;
}

Status FaultPlan::Lose(const Fault& fault, const Deadline* deadline) {
  double seconds = fault.seconds;
  if (deadline != nullptr) {
    const double left = static_cast<double>(deadline->RemainingNanos()) / kNanosPerSecond;
    seconds = std::min(seconds, left);
  }
  Sleep(seconds);
  if (deadline != nullptr && deadline->Expired()) {
    return DeadlineExceededError("the server did not answer in time (a fault of this test)"
                                 " [SMB-E140]");
  }
  return UnavailableError("the connection is lost (a fault of this test) [SMB-E141]");
}

// --- FrameFaultPlan --------------------------------------------------------------

void FrameFaultPlan::Add(FrameFault fault) {
  MutexLock lock(&mutex_);
  faults_.push_back(fault);
}

void FrameFaultPlan::Clear() {
  MutexLock lock(&mutex_);
  faults_.clear();
}

std::vector<FrameFault> FrameFaultPlan::Take(FrameDirection direction) {
  MutexLock lock(&mutex_);
  const uint64_t number = ++frames_[direction];
  std::vector<FrameFault> due;
  for (const FrameFault& fault : faults_) {
    if (fault.direction == direction && (fault.nth == 0 || fault.nth == number)) {
      due.push_back(fault);
    }
  }
  return due;
}

uint64_t FrameFaultPlan::frames(FrameDirection direction) const {
  MutexLock lock(&mutex_);
  const auto found = frames_.find(direction);
  return found == frames_.end() ? 0 : found->second;
}

}  // namespace tf_smb
