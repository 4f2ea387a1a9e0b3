#include "cc/box/segment.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "cc/box/segment_lock.h"
#include "cc/common/clock.h"

// Who is there: members and their leases, seeding, meetings.

namespace tf_smb {
namespace {

constexpr auto kLastMemberState = static_cast<uint32_t>(MemberState::kDead);

}  // namespace

// --- Members -----------------------------------------------------------------

Segment::SlotRange Segment::UsedSlots() const {
  MemberSlot* const first = control()->members;
  return {first, first + std::min(control()->slots_used.load(), kMaxMembers)};
}

Result<MemberId> Segment::Join(std::optional<uint32_t> worker_index) {
  if (worker_index.has_value() && *worker_index >= kMaxWorkers) {
    return InvalidArgumentError("worker index " + std::to_string(*worker_index) +
                                " is out of range: 0 to " + std::to_string(kMaxWorkers - 1) +
                                " [SMB-E060]");
  }
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  std::vector<bool> taken(kMaxWorkers, false);
  for (const MemberSlot& member : UsedSlots()) {
    if (!IsLive(member)) continue;
    const uint32_t index = member.worker_index.load();
    if (index < kMaxWorkers) taken[index] = true;
    if (worker_index.has_value() && index == *worker_index) {
      return AlreadyExistsError(
          "worker index " + std::to_string(index) + " is taken by live process " +
          std::to_string(member.process_id.load()) +
          ": give every worker its own TF_SMB_WORKER_INDEX, or start them with 'tf-smb run'"
          " [SMB-E061]");
    }
  }
  const uint32_t index =
      worker_index.has_value()
          ? *worker_index
          : static_cast<uint32_t>(std::find(taken.begin(), taken.end(), false) - taken.begin());
  MemberSlot* const taken_slot = TakeSlotLocked();
  if (taken_slot == nullptr) {
    return ResourceExhaustedError("segment '" + name_ + "' has " + std::to_string(kMaxMembers) +
                                  " members, the most it can hold [SMB-E062]");
  }
  const uint64_t incarnation = control()->next_incarnation.fetch_add(1);
  const uint64_t closed = control()->meetings_closed.load();
  taken_slot->worker_index.store(index);
  taken_slot->incarnation.store(incarnation);
  taken_slot->renewed_nanos.store(BootTimeNanos());
  taken_slot->steps.store(0);
  taken_slot->epoch.store(0);
  taken_slot->batch.store(0);
  taken_slot->phase.store(control()->phase.load());
  taken_slot->steps_at_begin.store(0);
  taken_slot->exchanges.store(0);
  taken_slot->arrived.store(closed);
  taken_slot->finished.store(closed);
  taken_slot->round_entered.store(0);
  taken_slot->round_contributed.store(0);
  taken_slot->round_finished.store(0);
  taken_slot->process_id.store(static_cast<uint32_t>(getpid()));
  taken_slot->training.store(0);
  taken_slot->state.store(static_cast<uint32_t>(MemberState::kLive));
  NotifyChange();
  return MemberId{static_cast<uint32_t>(taken_slot - control()->members), incarnation};
}

MemberSlot* Segment::TakeSlotLocked() {
  const uint32_t used = std::min(control()->slots_used.load(), kMaxMembers);
  // New slots first: an old one still tells who was here. A fenced member that is
  // only stopped still holds its slot's mutex.
  for (uint32_t i = 0; i < kMaxMembers; ++i) {
    MemberSlot& member = control()->members[(used + i) % kMaxMembers];
    if (IsLive(member) || !Holds(member.alive.TryLock())) continue;
    control()->slots_used.store(std::max(used, (used + i) % kMaxMembers + 1));
    return &member;
  }
  return nullptr;
}

Status Segment::CheckMember(const MemberId& member) const {
  if (slot(member).incarnation.load() == member.incarnation && IsLive(slot(member))) {
    return Status::Ok();
  }
  return AbortedError("this worker's lease lapsed: it did not renew it for " +
                      std::to_string(lease_nanos_ / kNanosPerSecond) + " s, and joins again"
                      " [SMB-E063]");
}

Status Segment::Renew(const MemberId& member) {
  slot(member).renewed_nanos.store(BootTimeNanos());
  Reap();
  return CheckMember(member);
}

void Segment::Leave(const MemberId& member) { End(member, MemberState::kLeft); }

void Segment::Abandon(const MemberId& member) { End(member, MemberState::kDead); }

void Segment::End(const MemberId& member, MemberState state) {
  {
    ControlLock lock(this);
    if (lock.held() && CheckMember(member).ok()) EndLocked(&slot(member), state);
  }
  slot(member).alive.Unlock();
  NotifyChange();
}

bool Segment::LeaveUnlessLast(const MemberId& member) {
  ControlLock lock(this);
  if (!lock.held() || !CheckMember(member).ok()) return false;
  ReapLocked();
  for (const MemberSlot& other : UsedSlots()) {
    if (&other == &slot(member) || !IsLive(other) || other.training.load() == 0) continue;
    EndLocked(&slot(member), MemberState::kLeft);
    NotifyChange();
    return true;
  }
  return false;
}

void Segment::PublishProgress(const MemberId& member, const Progress& progress) {
  slot(member).steps.store(progress.steps, std::memory_order_relaxed);
  slot(member).epoch.store(progress.epoch, std::memory_order_relaxed);
  slot(member).batch.store(progress.batch, std::memory_order_relaxed);
  slot(member).exchanges.fetch_add(1, std::memory_order_relaxed);
}

// Wakes nobody: it comes with every step.
void Segment::PublishSteps(const MemberId& member, uint64_t steps) {
  slot(member).steps.store(steps, std::memory_order_relaxed);
}

void Segment::SetTraining(const MemberId& member, bool training) {
  ControlLock lock(this);
  if (training) slot(member).steps_at_begin.store(slot(member).steps.load());
  slot(member).training.store(training ? 1 : 0);
  NotifyChange();
}

void Segment::EndLocked(MemberSlot* member, MemberState state) {
  // Before the state: who dies in between leaves a member that is still to be ended.
  LeaveBarriers(member->worker_index.load());
  if (control()->lock_holder.load() == member->incarnation.load()) control()->lock_holder.store(0);
  if (IsSeeder(*member)) control()->seed_state.store(static_cast<uint32_t>(SeedState::kEmpty));
  member->state.store(static_cast<uint32_t>(state));
}

bool Segment::ReapLocked() {
  bool any = false;
  const int64_t now = BootTimeNanos();
  for (MemberSlot& member : UsedSlots()) {
    if (!IsLive(member)) continue;
    const bool died = Holds(member.alive.TryLock());
    if (died) member.alive.Unlock();
    if (!died && member.renewed_nanos.load() >= now - lease_nanos_) continue;
    EndLocked(&member, MemberState::kDead);
    any = true;
  }
  if (any) NotifyChange();
  return any;
}

bool Segment::Reap() {
  ControlLock lock(this);
  return lock.held() && ReapLocked();
}

std::vector<MemberInfo> Segment::Members() {
  Reap();
  std::vector<MemberInfo> members;
  for (const MemberSlot& member : UsedSlots()) {
    MemberInfo info;
    const uint32_t state = member.state.load();
    if (state == static_cast<uint32_t>(MemberState::kFree) || state > kLastMemberState) continue;
    info.state = static_cast<MemberState>(state);
    info.worker_index = member.worker_index.load();
    info.process_id = member.process_id.load();
    info.incarnation = member.incarnation.load();
    info.steps = member.steps.load();
    info.epoch = member.epoch.load();
    info.batch = member.batch.load();
    info.phase = member.phase.load();
    info.exchanges = member.exchanges.load();
    info.arrived = member.arrived.load();
    info.finished = member.finished.load();
    info.training = member.training.load() != 0;
    members.push_back(info);
  }
  std::sort(members.begin(), members.end(), [](const MemberInfo& a, const MemberInfo& b) {
    return std::make_pair(a.worker_index, a.incarnation) <
           std::make_pair(b.worker_index, b.incarnation);
  });
  return members;
}

uint32_t Segment::CountLive() const {
  uint32_t live = 0;
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member)) ++live;
  }
  return live;
}

void Segment::MarkAbsent(uint32_t worker_index) {
  if (worker_index >= kMaxWorkers) return;
  control()->absent_workers.words[worker_index / 64].fetch_or(1ULL << (worker_index % 64));
  NotifyChange();
}

bool Segment::IsAbsent(uint32_t worker_index) const {
  if (worker_index >= kMaxWorkers) return true;
  return (control()->absent_workers.words[worker_index / 64].load() >> (worker_index % 64) & 1) !=
         0;
}

// --- Seeding -----------------------------------------------------------------

bool Segment::IsSeeder(const MemberSlot& member) const {
  return control()->seed_state.load() == static_cast<uint32_t>(SeedState::kSeeding) &&
         &control()->members[control()->seeder_slot.load() % kMaxMembers] == &member;
}

bool Segment::BeginSeeding(const MemberId& member) {
  ControlLock lock(this);
  if (!lock.held() || !CheckMember(member).ok()) return false;
  ReapLocked();
  if (IsSeeder(slot(member))) return true;
  if (control()->seed_state.load() != static_cast<uint32_t>(SeedState::kEmpty)) return false;
  control()->seeder_slot.store(member.slot);
  control()->seed_state.store(static_cast<uint32_t>(SeedState::kSeeding));
  return true;
}

void Segment::FinishSeeding(const MemberId& member) {
  ControlLock lock(this);
  if (CheckMember(member).ok() && IsSeeder(slot(member))) {
    control()->seed_state.store(static_cast<uint32_t>(SeedState::kSeeded));
  }
  NotifyChange();
}

// --- Meetings ----------------------------------------------------------------

uint64_t Segment::Arrive(const MemberId& member) {
  ControlLock lock(this);
  const uint64_t meeting =
      std::max(slot(member).arrived.load(), control()->meetings_closed.load()) + 1;
  slot(member).arrived.store(meeting);
  slot(member).training.store(0);
  NotifyChange();
  return meeting;
}

bool Segment::TryCloseMeeting(uint64_t meeting) {
  if (control()->meetings_closed.load() >= meeting) return true;
  ControlLock lock(this);
  if (!lock.held()) return false;
  ReapLocked();
  uint64_t fewest_steps = UINT64_MAX;
  for (const MemberSlot& member : UsedSlots()) {
    if (!IsLive(member)) continue;
    if (member.arrived.load() < meeting) return false;
    fewest_steps =
        std::min(fewest_steps, member.steps.load() - member.steps_at_begin.load());
  }
  control()->fewest_steps.store(fewest_steps);
  control()->stop_requested.store(0);  // all have ended their training
  control()->meetings_closed.store(std::max(meeting, control()->meetings_closed.load()));
  NotifyChange();
  return true;
}

void Segment::FinishMeeting(const MemberId& member, uint64_t meeting) {
  slot(member).finished.store(meeting);
  NotifyChange();
}

bool Segment::IsAtMeeting(const MemberSlot& member) const {
  return member.arrived.load() > control()->meetings_closed.load();
}

bool Segment::MeetingFinished(uint64_t meeting) const {
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member) && member.arrived.load() >= meeting && member.finished.load() < meeting) {
      return false;
    }
  }
  return true;
}

}  // namespace tf_smb
