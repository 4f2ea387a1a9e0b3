#include "cc/box/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "cc/common/futex.h"
#include "cc/wire/coding.h"
#include "cc/wire/messages.h"

namespace tf_smb {
namespace {

// Nobody holds the control mutex longer than a few instructions, unless stopped.
constexpr double kControlLockSeconds = 10.0;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Where the parts lie, computed the same way by creator and reader.
SegmentHeader PlanHeader(uint64_t directory_bytes, uint64_t center_elements) {
  SegmentHeader header = {};
  header.magic = kSegmentMagic;
  header.format_version = kSegmentFormatVersion;
  header.directory_offset = kPageBytes;
  header.directory_bytes = directory_bytes;
  header.control_offset = header.directory_offset + RoundUp(directory_bytes, kPageBytes);
  header.chunks_offset = header.control_offset + RoundUp(sizeof(ControlBlock), kPageBytes);
  header.num_chunks = RoundUp(center_elements, kChunkElements) / kChunkElements;
  header.center_offset =
      header.chunks_offset + RoundUp(header.num_chunks * sizeof(ChunkState), kPageBytes);
  header.center_elements = center_elements;
  header.total_bytes =
      header.center_offset + RoundUp(center_elements * sizeof(float), kPageBytes);
  return header;
}

uint64_t HeaderChecksum(const SegmentHeader& header, std::string_view directory) {
  std::string bytes(reinterpret_cast<const char*>(&header), offsetof(SegmentHeader, checksum));
  bytes.append(directory);
  return Checksum(bytes);
}

Status DamagedHeader(const char* what) {
  return DataLossError(std::string("the segment's header is damaged: ") + what);
}

Status CheckMemory(uint64_t bytes, const std::string& name) {
  const uint64_t available = AvailableMemoryBytes();
  if (bytes <= available) return Status::Ok();
  return ResourceExhaustedError("segment '" + name + "' needs " + std::to_string(bytes >> 20) +
                                " MiB, and " + std::to_string(available >> 20) +
                                " MiB are available on this machine or in its cgroup");
}

bool IsLive(const MemberSlot& member) {
  return member.state.load() == static_cast<uint32_t>(MemberState::kLive);
}

Status CheckOptions(const SegmentOptions& options) {
  TF_SMB_RETURN_IF_ERROR(CheckSegmentName(options.name));
  TF_SMB_RETURN_IF_ERROR(CheckJobId(options.job_id));
  if (options.num_workers < 1 || options.num_workers > kMaxWorkers) {
    return InvalidArgumentError("num_workers must be 1 to " + std::to_string(kMaxWorkers) +
                                ", got " + std::to_string(options.num_workers));
  }
  return Status::Ok();
}

}  // namespace

class Segment::ControlLock {
 public:
  explicit ControlLock(const Segment* segment)
      : mutex_(&segment->control()->mutex),
        outcome_(mutex_->LockUntil(Deadline::After(kControlLockSeconds))) {}
  ~ControlLock() {
    if (held()) mutex_->Unlock();
  }
  ControlLock(const ControlLock&) = delete;
  ControlLock& operator=(const ControlLock&) = delete;

  bool held() const { return Holds(outcome_); }
  Status status() const {
    if (held()) return Status::Ok();
    if (outcome_ == LockOutcome::kBroken) return DataLossError("the control mutex is damaged");
    return DeadlineExceededError("the segment's control block has been locked for 10 s: one of its "
                                 "processes is stopped");
  }

 private:
  RobustMutex* const mutex_;
  const LockOutcome outcome_;
};

Segment::Segment(UniqueFd fd, MemoryMapping mapping)
    : fd_(std::move(fd)), mapping_(std::move(mapping)) {}

Result<std::unique_ptr<Segment>> Segment::Create(const SegmentOptions& options) {
  TF_SMB_RETURN_IF_ERROR(CheckOptions(options));
  const std::string directory = options.layout.Encode();
  SegmentHeader header = PlanHeader(directory.size(), options.layout.num_elements());
  TF_SMB_RETURN_IF_ERROR(CheckMemory(header.total_bytes, options.name));

  UniqueFd fd(memfd_create("tf_smb_segment", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoError(errno, "memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(header.total_bytes)) != 0) {
    return ErrnoError(errno, "cannot size segment " + options.name);
  }
  TF_SMB_ASSIGN_OR_RETURN(MemoryMapping mapping,
                          MemoryMapping::MapShared(fd.get(), header.total_bytes));
  const int error = mapping.Reserve(fd.get());
  if (error != 0) return ErrnoError(error, "cannot reserve the memory of segment " + options.name);
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoError(errno, "cannot seal segment " + options.name);
  }

  header.num_workers = options.num_workers;
  header.lease_nanos = static_cast<int64_t>(options.lease_s * kNanosPerSecond);
  std::memcpy(header.name, options.name.data(), options.name.size());
  std::memcpy(header.job_id, options.job_id.data(), options.job_id.size());
  header.checksum = HeaderChecksum(header, directory);
  std::memcpy(mapping.data() + header.directory_offset, directory.data(), directory.size());

  auto* control = reinterpret_cast<ControlBlock*>(mapping.data() + header.control_offset);
  TF_SMB_RETURN_IF_ERROR(control->mutex.Init());
  control->next_incarnation.store(1);
  for (MemberSlot& member : control->members) TF_SMB_RETURN_IF_ERROR(member.alive.Init());
  auto* chunks = reinterpret_cast<ChunkState*>(mapping.data() + header.chunks_offset);
  for (uint64_t i = 0; i < header.num_chunks; ++i) TF_SMB_RETURN_IF_ERROR(chunks[i].mutex.Init());
  std::memcpy(mapping.data(), &header, sizeof(header));

  std::unique_ptr<Segment> segment(new Segment(std::move(fd), std::move(mapping)));
  TF_SMB_RETURN_IF_ERROR(segment->ReadHeader());
  return segment;
}

Result<std::unique_ptr<Segment>> Segment::Map(UniqueFd fd) {
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoError(errno, "fstat of a segment");
  // A segment that could shrink under us would turn reads into SIGBUS.
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return DataLossError("what was received is not a sealed segment");
  }
  if (info.st_size < static_cast<off_t>(kPageBytes)) return DamagedHeader("it is cut short");
  TF_SMB_ASSIGN_OR_RETURN(
      MemoryMapping mapping,
      MemoryMapping::MapShared(fd.get(), static_cast<uint64_t>(info.st_size)));
  std::unique_ptr<Segment> segment(new Segment(std::move(fd), std::move(mapping)));
  TF_SMB_RETURN_IF_ERROR(segment->ReadHeader());
  return segment;
}

Status Segment::ReadHeader() {
  SegmentHeader header;
  std::memcpy(&header, mapping_.data(), sizeof(header));
  if (header.magic != kSegmentMagic) return DamagedHeader("it does not begin with the magic number");
  if (header.format_version != kSegmentFormatVersion) {
    return FailedPreconditionError(
        "the segment has format " + std::to_string(header.format_version) +
        ", this tf_smb reads format " + std::to_string(kSegmentFormatVersion) +
        ": use one version of tf_smb on all workers");
  }
  const uint64_t total = mapping_.size_bytes();
  if (header.directory_bytes > total || header.center_elements > total ||
      header.num_chunks > total) {
    return DamagedHeader("a size is larger than the segment");
  }
  const SegmentHeader plan = PlanHeader(header.directory_bytes, header.center_elements);
  if (plan.total_bytes != total || header.total_bytes != total ||
      header.directory_offset != plan.directory_offset ||
      header.control_offset != plan.control_offset ||
      header.chunks_offset != plan.chunks_offset || header.num_chunks != plan.num_chunks ||
      header.center_offset != plan.center_offset) {
    return DamagedHeader("its sizes and offsets do not agree");
  }
  const std::string directory(mapping_.data() + header.directory_offset, header.directory_bytes);
  if (HeaderChecksum(header, directory) != header.checksum) {
    return DamagedHeader("its checksum does not match");
  }
  TF_SMB_ASSIGN_OR_RETURN(layout_, Layout::Decode(directory));
  if (layout_.num_elements() != header.center_elements) {
    return DamagedHeader("directory and center differ in size");
  }
  name_.assign(header.name, strnlen(header.name, sizeof(header.name)));
  job_id_.assign(header.job_id, strnlen(header.job_id, sizeof(header.job_id)));
  num_workers_ = header.num_workers;
  lease_nanos_ = header.lease_nanos;
  control_ = reinterpret_cast<ControlBlock*>(mapping_.data() + header.control_offset);
  chunks_ = reinterpret_cast<ChunkState*>(mapping_.data() + header.chunks_offset);
  center_ = reinterpret_cast<float*>(mapping_.data() + header.center_offset);
  pieces_.resize(header.num_chunks);
  InitPieces();
  return Status::Ok();
}

void Segment::InitPieces() {
  const std::vector<Variable>& variables = layout_.variables();
  for (uint32_t v = 0; v < variables.size(); ++v) {
    uint64_t done = 0;
    while (done < variables[v].num_elements) {
      const uint64_t at = variables[v].offset_elements + done;
      const uint64_t chunk = at / kChunkElements;
      const uint64_t room = (chunk + 1) * kChunkElements - at;
      const uint64_t count = std::min(room, variables[v].num_elements - done);
      pieces_[chunk].push_back({v, done, at, count});
      done += count;
    }
  }
}

// --- Members -----------------------------------------------------------------

Segment::SlotRange Segment::UsedSlots() const {
  MemberSlot* const first = control()->members;
  return {first, first + std::min(control()->slots_used.load(), kMaxMembers)};
}

Result<MemberId> Segment::Join(std::optional<uint32_t> worker_index) {
  if (worker_index.has_value() && *worker_index >= kMaxWorkers) {
    return InvalidArgumentError("worker index " + std::to_string(*worker_index) +
                                " is out of range: 0 to " + std::to_string(kMaxWorkers - 1));
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
          ": give every worker its own TF_SMB_WORKER_INDEX, or start them with 'tf-smb run'");
    }
  }
  const uint32_t index =
      worker_index.has_value()
          ? *worker_index
          : static_cast<uint32_t>(std::find(taken.begin(), taken.end(), false) - taken.begin());
  MemberSlot* const taken_slot = TakeSlotLocked();
  if (taken_slot == nullptr) {
    return ResourceExhaustedError("segment '" + name_ + "' has " + std::to_string(kMaxMembers) +
                                  " members, the most it can hold");
  }
  const uint64_t incarnation = control()->next_incarnation.fetch_add(1);
  const uint64_t closed = control()->meetings_closed.load();
  taken_slot->worker_index.store(index);
  taken_slot->incarnation.store(incarnation);
  taken_slot->renewed_nanos.store(BootTimeNanos());
  taken_slot->steps.store(0);
  taken_slot->steps_at_begin.store(0);
  taken_slot->exchanges.store(0);
  taken_slot->arrived.store(closed);
  taken_slot->finished.store(closed);
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
                      std::to_string(lease_nanos_ / kNanosPerSecond) + " s, and joins again");
}

Status Segment::Renew(const MemberId& member) {
  slot(member).renewed_nanos.store(BootTimeNanos());
  Reap();
  return CheckMember(member);
}

void Segment::Leave(const MemberId& member) {
  {
    ControlLock lock(this);
    if (lock.held() && CheckMember(member).ok()) EndLocked(&slot(member), MemberState::kLeft);
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

void Segment::PublishProgress(const MemberId& member, uint64_t steps) {
  slot(member).steps.store(steps, std::memory_order_relaxed);
  slot(member).exchanges.fetch_add(1, std::memory_order_relaxed);
}

void Segment::SetTraining(const MemberId& member, bool training) {
  ControlLock lock(this);
  if (training) slot(member).steps_at_begin.store(slot(member).steps.load());
  slot(member).training.store(training ? 1 : 0);
  NotifyChange();
}

void Segment::EndLocked(MemberSlot* member, MemberState state) {
  member->state.store(static_cast<uint32_t>(state));
  if (IsSeeder(*member)) control()->seed_state.store(static_cast<uint32_t>(SeedState::kEmpty));
}

bool Segment::ReapLocked() {
  bool any = false;
  const int64_t now = BootTimeNanos();
  for (MemberSlot& member : UsedSlots()) {
    if (!IsLive(member)) continue;
    const bool died = Holds(member.alive.TryLock());
    if (died) member.alive.Unlock();
    if (!died && now - member.renewed_nanos.load() <= lease_nanos_) continue;
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
    info.state = static_cast<MemberState>(member.state.load());
    if (info.state == MemberState::kFree) continue;
    info.worker_index = member.worker_index.load();
    info.process_id = member.process_id.load();
    info.incarnation = member.incarnation.load();
    info.steps = member.steps.load();
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
  control()->absent_workers[worker_index / 64].fetch_or(1ULL << (worker_index % 64));
  NotifyChange();
}

bool Segment::IsAbsent(uint32_t worker_index) const {
  if (worker_index >= kMaxWorkers) return true;
  return (control()->absent_workers[worker_index / 64].load() >> (worker_index % 64) & 1) != 0;
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
  control()->meetings_closed.store(std::max(meeting, control()->meetings_closed.load()));
  NotifyChange();
  return true;
}

void Segment::FinishMeeting(const MemberId& member, uint64_t meeting) {
  slot(member).finished.store(meeting);
  NotifyChange();
}

bool Segment::MeetingFinished(uint64_t meeting) const {
  for (const MemberSlot& member : UsedSlots()) {
    if (IsLive(member) && member.arrived.load() >= meeting && member.finished.load() < meeting) {
      return false;
    }
  }
  return true;
}

// --- Waiting -----------------------------------------------------------------

void Segment::NotifyChange() const {
  control()->changes.fetch_add(1);
  FutexWakeAll(&control()->changes);
}

void Segment::WaitForChange(uint32_t seen, int64_t timeout_nanos) const {
  FutexWait(&control()->changes, seen, timeout_nanos);
}

}  // namespace tf_smb
