#include "cc/box/segment.h"

#include <algorithm>
#include <utility>

#include "cc/box/segment_lock.h"
#include "cc/common/clock.h"
#include "cc/common/futex.h"

// How members wait for each other: barriers, the lock, rounds, versions, changes.

namespace tf_smb {
namespace {

constexpr uint32_t kWordBits = 64;

bool Contains(const WorkerSet& set, uint32_t worker) {
  return (set.words[worker / kWordBits].load() >> (worker % kWordBits) & 1) != 0;
}

void Insert(WorkerSet* set, uint32_t worker) {
  set->words[worker / kWordBits].fetch_or(1ULL << (worker % kWordBits));
}

void Remove(WorkerSet* set, uint32_t worker) {
  set->words[worker / kWordBits].fetch_and(~(1ULL << (worker % kWordBits)));
}

bool IsEmpty(const WorkerSet& set) {
  return std::all_of(std::begin(set.words), std::end(set.words),
                     [](const std::atomic<uint64_t>& word) { return word.load() == 0; });
}

bool Holds(const WorkerSet& set, const std::vector<uint32_t>& workers) {
  WorkerSet same = {};
  for (const uint32_t worker : workers) Insert(&same, worker);
  return std::equal(std::begin(set.words), std::end(set.words), std::begin(same.words),
                    [](const auto& a, const auto& b) { return a.load() == b.load(); });
}

}  // namespace

// --- Barriers ----------------------------------------------------------------

std::vector<uint32_t> Segment::MissingLocked(const BarrierEntry& barrier) const {
  WorkerSet live = {}, been_here = {};
  for (const MemberSlot& member : UsedSlots()) {
    const uint32_t worker = member.worker_index.load();
    if (worker >= kMaxWorkers) continue;
    const bool free = member.state.load() == static_cast<uint32_t>(MemberState::kFree);
    if (!free) Insert(&been_here, worker);
    if (IsLive(member)) Insert(&live, worker);
  }
  std::vector<uint32_t> missing;
  for (uint32_t worker = 0; worker < kMaxWorkers; ++worker) {
    if (!Contains(barrier.expected, worker) || Contains(barrier.arrived, worker)) continue;
    const bool gone = Contains(been_here, worker) || IsAbsent(worker);
    if (Contains(live, worker) || !gone) missing.push_back(worker);
  }
  return missing;
}

BarrierEntry* Segment::FindBarrier(uint64_t id) {
  for (BarrierEntry& barrier : control()->barriers) {
    if (id != 0 && barrier.id.load() == id) return &barrier;
  }
  return nullptr;
}

void Segment::LeaveBarriers(uint32_t worker_index) {
  if (worker_index >= kMaxWorkers) return;
  for (BarrierEntry& barrier : control()->barriers) {
    if (barrier.id.load() == 0) continue;
    Remove(&barrier.arrived, worker_index);
    if (IsEmpty(barrier.arrived)) barrier.id.store(0);
  }
}

Result<uint64_t> Segment::ArriveAtBarrier(const MemberId& member,
                                          const std::vector<uint32_t>& workers) {
  for (const uint32_t worker : workers) {
    if (worker < kMaxWorkers) continue;
    return InvalidArgumentError("worker index " + std::to_string(worker) +
                                " in the barrier's list is out of range: 0 to " +
                                std::to_string(kMaxWorkers - 1) + " [SMB-E064]");
  }
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  TF_SMB_RETURN_IF_ERROR(CheckMember(member));
  const uint32_t self = slot(member).worker_index.load();
  if (std::find(workers.begin(), workers.end(), self) == workers.end()) {
    return InvalidArgumentError("worker " + std::to_string(self) +
                                " is not in the list of the barrier that it comes to [SMB-E065]");
  }
  BarrierEntry* barrier = nullptr;
  for (BarrierEntry& entry : control()->barriers) {
    const bool open = entry.id.load() != 0;
    if (open && Holds(entry.expected, workers)) {
      barrier = &entry;
      break;
    }
    if (!open && barrier == nullptr) barrier = &entry;
  }
  if (barrier == nullptr) {
    return ResourceExhaustedError("segment '" + name_ + "' has " + std::to_string(kMaxBarriers) +
                                  " open barriers, the most it can hold [SMB-E066]");
  }
  if (barrier->id.load() == 0) {
    for (auto& word : barrier->expected.words) word.store(0);
    for (auto& word : barrier->arrived.words) word.store(0);
    for (const uint32_t worker : workers) Insert(&barrier->expected, worker);
    barrier->id.store(control()->next_barrier_id.fetch_add(1) + 1);
  }
  const uint64_t id = barrier->id.load();
  Insert(&barrier->arrived, self);
  if (MissingLocked(*barrier).empty()) {
    barrier->id.store(0);
    NotifyChange();  // not at every arrival: nobody can go on before the last one
  }
  return id;
}

Result<std::vector<uint32_t>> Segment::MissingAtBarrier(const MemberId& member,
                                                        uint64_t barrier_id) {
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  TF_SMB_RETURN_IF_ERROR(CheckMember(member));
  BarrierEntry* const barrier = FindBarrier(barrier_id);
  if (barrier == nullptr) return std::vector<uint32_t>();
  std::vector<uint32_t> missing = MissingLocked(*barrier);
  if (missing.empty()) {
    barrier->id.store(0);
    NotifyChange();
  }
  return missing;
}

bool Segment::WithdrawFromBarrier(const MemberId& member, uint64_t barrier_id) {
  ControlLock lock(this);
  if (!lock.held()) return true;
  BarrierEntry* const barrier = FindBarrier(barrier_id);
  if (barrier == nullptr) return false;
  const uint32_t self = slot(member).worker_index.load();
  if (!CheckMember(member).ok() || self >= kMaxWorkers) return true;
  Remove(&barrier->arrived, self);
  if (IsEmpty(barrier->arrived)) barrier->id.store(0);
  NotifyChange();
  return true;
}

// --- The lock ----------------------------------------------------------------

Result<uint64_t> Segment::TryLock(const MemberId& member, double lease_s) {
  if (!(lease_s > 0 && lease_s <= kMaxLockLeaseSeconds)) {
    return InvalidArgumentError("the lease of a lock must be above 0 and at most " +
                                std::to_string(static_cast<int>(kMaxLockLeaseSeconds)) +
                                " seconds, got " + std::to_string(lease_s) + " [SMB-E067]");
  }
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  TF_SMB_RETURN_IF_ERROR(CheckMember(member));
  const int64_t now = BootTimeNanos();
  const bool held = control()->lock_holder.load() != 0 && now < control()->lock_expires_nanos.load();
  if (held) return uint64_t{0};
  const uint64_t token = control()->lock_token.load() + 1;
  control()->lock_holder.store(0);  // until all of the new grant is there
  control()->lock_expires_nanos.store(now + static_cast<int64_t>(lease_s * kNanosPerSecond));
  control()->lock_token.store(token);
  control()->lock_holder.store(member.incarnation);
  NotifyChange();
  return token;
}

Status Segment::Unlock(const MemberId& member, uint64_t token) {
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  if (control()->lock_holder.load() != member.incarnation ||
      control()->lock_token.load() != token ||
      BootTimeNanos() >= control()->lock_expires_nanos.load()) {
    return AbortedError("the lock of segment '" + name_ +
                        "' lapsed before it was given up: what it guarded may have been changed "
                        "by others; take it with a longer lease [SMB-E068]")
        .WithScope(FailureScope::kCall);
  }
  control()->lock_holder.store(0);
  NotifyChange();
  return Status::Ok();
}

std::optional<uint32_t> Segment::LockHolder() {
  const uint64_t holder = control()->lock_holder.load();
  if (holder == 0 || BootTimeNanos() >= control()->lock_expires_nanos.load()) return std::nullopt;
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member) && member.incarnation.load() == holder) return member.worker_index.load();
  }
  return std::nullopt;
}

// --- Rounds ------------------------------------------------------------------

std::vector<uint32_t> Segment::BehindInRound(uint64_t round,
                                             std::atomic<uint64_t> MemberSlot::*from,
                                             std::atomic<uint64_t> MemberSlot::*to) const {
  std::vector<uint32_t> behind;
  if (round == 0) return behind;
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member) && (member.*from).load() == round && (member.*to).load() < round) {
      behind.push_back(member.worker_index.load());
    }
  }
  return behind;
}

Result<uint64_t> Segment::EnterRound(const MemberId& member) {
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  TF_SMB_RETURN_IF_ERROR(CheckMember(member));
  if (!CloseCompleteRoundLocked()) {
    const uint64_t opened = control()->rounds_opened.load();
    const bool in_it = slot(member).round_entered.load() == opened;
    const bool done = slot(member).round_contributed.load() >= opened;
    return in_it && !done ? opened : uint64_t{0};
  }
  const uint64_t closed = control()->rounds_closed.load();
  // Whoever comes to the next one does not read the mean of the last one any more.
  slot(member).round_finished.store(closed);
  if (!BehindInRound(closed, &MemberSlot::round_contributed, &MemberSlot::round_finished).empty()) {
    return uint64_t{0};
  }
  for (MemberSlot& other : UsedSlots()) {
    if (IsLive(other)) other.round_entered.store(closed + 1);
  }
  control()->rounds_opened.store(closed + 1);
  NotifyChange();
  return closed + 1;
}

void Segment::FinishShare(const MemberId& member, uint64_t round) {
  if (!CheckMember(member).ok()) return;
  slot(member).round_contributed.store(round);
  NotifyChange();
}

bool Segment::TryCloseRound(uint64_t round, bool force) {
  if (control()->rounds_closed.load() >= round) return true;
  ControlLock lock(this);
  if (!lock.held()) return false;
  ReapLocked();
  if (control()->rounds_closed.load() >= round) return true;
  if (control()->rounds_opened.load() != round) return false;
  if (CloseCompleteRoundLocked()) return true;
  if (!force) return false;
  control()->rounds_closed.store(round);
  NotifyChange();
  return true;
}

bool Segment::CloseCompleteRoundLocked() {
  const uint64_t opened = control()->rounds_opened.load();
  if (opened <= control()->rounds_closed.load()) return true;
  if (!BehindInRound(opened, &MemberSlot::round_entered, &MemberSlot::round_contributed).empty()) {
    return false;
  }
  control()->rounds_closed.store(opened);
  NotifyChange();
  return true;
}

void Segment::FinishRound(const MemberId& member, uint64_t round) {
  if (!CheckMember(member).ok()) return;
  slot(member).round_finished.store(round);
  NotifyChange();
}

std::vector<uint32_t> Segment::MissingInRound() {
  Reap();
  const uint64_t closed = control()->rounds_closed.load();
  const uint64_t opened = control()->rounds_opened.load();
  return opened > closed
             ? BehindInRound(opened, &MemberSlot::round_entered, &MemberSlot::round_contributed)
             : BehindInRound(closed, &MemberSlot::round_contributed, &MemberSlot::round_finished);
}

bool Segment::IsOpenRound(uint64_t round) const {
  return control()->rounds_opened.load() == round && control()->rounds_closed.load() < round;
}

// --- Versions and changes ----------------------------------------------------

void Segment::AdvanceVersion() {
  control()->version.fetch_add(1);
  control()->version_signal.fetch_add(1);
  if (control()->version_waiters.load() > 0) FutexWakeAll(&control()->version_signal);
}

uint64_t Segment::WaitForVersion(uint64_t version, int64_t timeout_nanos) {
  if (this->version() >= version) return this->version();
  control()->version_waiters.fetch_add(1);
  const uint32_t seen = control()->version_signal.load();
  if (this->version() < version) FutexWait(&control()->version_signal, seen, timeout_nanos);
  control()->version_waiters.fetch_sub(1);
  return this->version();
}

void Segment::NotifyChange() const {
  control()->changes.fetch_add(1);
  FutexWakeAll(&control()->changes);
}

void Segment::WaitForChange(uint32_t seen, int64_t timeout_nanos) const {
  FutexWait(&control()->changes, seen, timeout_nanos);
}

}  // namespace tf_smb
