#include "cc/box/segment.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "cc/box/segment_lock.h"
#include "cc/common/clock.h"
#include "cc/common/futex.h"

// How members wait for each other, and what they tell each other: barriers, the lock, rounds,
// phases, texts, versions, changes.

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

// Its number. Whoever dies before the count leaves the present text as it was.
uint64_t SetText(const std::string& text, TextEntry* entry) {
  const uint64_t number = entry->number.load() + 1;
  auto& next = entry->texts[number % 2];
  next.size_bytes.store(static_cast<uint32_t>(text.size()));
  std::memcpy(next.bytes, text.data(), text.size());
  entry->number.store(number);
  return number;
}

std::string GetText(const TextEntry& entry) {
  const auto& text = entry.texts[entry.number.load() % 2];
  return std::string(text.bytes, std::min(text.size_bytes.load(), kMaxTextBytes));
}

}  // namespace

Status CheckText(const std::string& text) {
  if (text.size() <= kMaxTextBytes) return Status::Ok();
  return InvalidArgumentError("a text for all workers has " + std::to_string(text.size()) +
                              " bytes, more than " + std::to_string(kMaxTextBytes) +
                              " [SMB-E069]");
}

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
  const bool held =
      control()->lock_holder.load() != 0 && now < control()->lock_expires_nanos.load();
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

std::vector<uint32_t> Segment::MissingShares(uint64_t round) const {
  std::vector<uint32_t> missing;
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member) && !IsAtMeeting(member) && member.round_entered.load() == round &&
        member.round_contributed.load() < round) {
      missing.push_back(member.worker_index.load());
    }
  }
  return missing;
}

std::vector<uint32_t> Segment::MissingReaders(uint64_t round) const {
  std::vector<uint32_t> missing;
  if (round == 0) return missing;
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member) && member.round_contributed.load() == round &&
        member.round_finished.load() < round) {
      missing.push_back(member.worker_index.load());
    }
  }
  return missing;
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
  if (!MissingReaders(closed).empty()) return uint64_t{0};
  for (MemberSlot& other : UsedSlots()) {
    if (IsLive(other) && !IsAtMeeting(other)) other.round_entered.store(closed + 1);
  }
  slot(member).round_entered.store(closed + 1);  // wherever it was: it is here now
  control()->round_ends_phase.store(0);
  control()->rounds_opened.store(closed + 1);
  NotifyChange();
  return closed + 1;
}

bool Segment::AllBelowShared(const MemberId& member, uint64_t round) const {
  const uint32_t self = slot(member).worker_index.load();
  const std::vector<uint32_t> missing = MissingShares(round);
  return std::all_of(missing.begin(), missing.end(),
                     [self](uint32_t worker) { return worker >= self; });
}

bool Segment::IsTurn(const MemberId& member, uint64_t round) {
  // A closed one takes no share: whoever adds one is told so.
  if (!IsOpenRound(round) || AllBelowShared(member, round)) return true;
  return Reap() && AllBelowShared(member, round);
}

void Segment::FinishShare(const MemberId& member, uint64_t round, bool ends_phase) {
  if (ends_phase) {
    // Only while the round is open: the next one is another.
    ControlLock lock(this);
    if (lock.held() && CheckMember(member).ok() && IsOpenRound(round) &&
        control()->round_ends_phase.load() == 0) {
      control()->round_ends_phase.store(phase() + 1);
    }
  }
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
  CloseRoundLocked();
  return true;
}

bool Segment::CloseCompleteRoundLocked() {
  const uint64_t opened = control()->rounds_opened.load();
  if (opened <= control()->rounds_closed.load()) return true;
  if (!MissingShares(opened).empty()) return false;
  CloseRoundLocked();
  return true;
}

void Segment::CloseRoundLocked() {
  // Which phase it ends was said when it was: doing this twice, after a death in between,
  // ends no other.
  control()->phase.store(std::max(phase(), control()->round_ends_phase.load()));
  control()->rounds_closed.store(control()->rounds_opened.load());
  NotifyChange();
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
  return opened > closed ? MissingShares(opened) : MissingReaders(closed);
}

bool Segment::IsOpenRound(uint64_t round) const {
  return control()->rounds_opened.load() == round && control()->rounds_closed.load() < round;
}

// --- The schedule ------------------------------------------------------------

void Segment::SetFirstPhase(const MemberId& member, uint64_t phase) {
  ControlLock lock(this);
  if (!lock.held() || !CheckMember(member).ok() || !IsSeeder(slot(member))) return;
  control()->phase.store(std::max(phase, this->phase()));
  NotifyChange();
}

void Segment::EnterPhase(const MemberId& member, uint64_t phase) {
  if (!CheckMember(member).ok()) return;
  slot(member).phase.store(phase);
  NotifyChange();
}

bool Segment::TryEndPhase(const MemberId& member, uint64_t phase) {
  if (this->phase() > phase) return true;
  ControlLock lock(this);
  if (!lock.held()) return false;
  ReapLocked();
  if (this->phase() != phase) return this->phase() > phase;
  if (!CheckMember(member).ok()) return false;
  for (const MemberSlot& other : UsedSlots()) {
    if (IsLive(other) && other.training.load() != 0 && !IsAtMeeting(other) &&
        other.phase.load() < phase) {
      return false;
    }
  }
  control()->phase.store(phase + 1);
  NotifyChange();
  return true;
}

Result<std::string> Segment::AgreeOnSchedule(const MemberId& member, const std::string& words) {
  TF_SMB_RETURN_IF_ERROR(CheckText(words));
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  TF_SMB_RETURN_IF_ERROR(CheckMember(member));
  TextEntry* const schedule = &control()->schedule;
  if (schedule->number.load() == 0) {
    SetText(words, schedule);
  } else if (CountLive() == 1 && GetText(*schedule) != words) {
    // Nobody else goes by the old one: this member begins anew.
    SetText(words, schedule);
    control()->phase.store(0);
    slot(member).phase.store(0);
  }
  return GetText(*schedule);
}

// --- Words to all ------------------------------------------------------------

Result<uint64_t> Segment::PostNotice(const MemberId& member, const std::string& text) {
  TF_SMB_RETURN_IF_ERROR(CheckText(text));
  ControlLock lock(this);
  TF_SMB_RETURN_IF_ERROR(lock.status());
  ReapLocked();
  TF_SMB_RETURN_IF_ERROR(CheckMember(member));
  const uint64_t number = SetText(text, &control()->notice);
  NotifyChange();
  return number;
}

Notice Segment::LastNotice() {
  if (control()->notice.number.load() == 0) return {};
  // Two texts on, this one would be overwritten while it is read. Whoever has stopped with
  // the mutex writes no two.
  ControlLock lock(this);
  return {control()->notice.number.load(), GetText(control()->notice)};
}

void Segment::RequestStop(const MemberId& member) {
  if (!CheckMember(member).ok()) return;
  control()->stop_requested.store(1);
  NotifyChange();
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
