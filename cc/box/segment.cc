#include "cc/box/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "cc/box/segment_lock.h"
#include "cc/wire/coding.h"
#include "cc/wire/messages.h"

// The memory of a segment: made, checked, and cut into chunks.

namespace tf_smb {
namespace {

constexpr double kMaxLeaseSeconds = 24 * 3600.0;
constexpr int64_t kMaxLeaseNanos = 24 * 3600 * kNanosPerSecond;
// No client could send a longer one, and nobody allocates what a damaged header asks for.
constexpr uint64_t kMaxDirectoryBytes = kMaxFrameBytes;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Where the parts lie, computed the same way by creator and reader.
SegmentHeader PlanHeader(uint64_t directory_bytes, uint64_t center_bytes) {
  SegmentHeader header = {};
  header.magic = kSegmentMagic;
  header.format_version = kSegmentFormatVersion;
  header.directory_offset = kPageBytes;
  header.directory_bytes = directory_bytes;
  header.control_offset = header.directory_offset + RoundUp(directory_bytes, kPageBytes);
  header.chunks_offset = header.control_offset + RoundUp(sizeof(ControlBlock), kPageBytes);
  header.num_chunks = RoundUp(center_bytes, kChunkBytes) / kChunkBytes;
  header.sides_offset =
      header.chunks_offset + RoundUp(header.num_chunks * sizeof(ChunkState), kPageBytes);
  header.num_sides = std::min<uint64_t>(header.num_chunks, kMaxSideBuffers);
  header.side_data_offset =
      header.sides_offset + RoundUp(header.num_sides * sizeof(SideBuffer), kPageBytes);
  header.side_bytes = std::min(kChunkBytes, RoundUp(center_bytes, kPageBytes));
  header.center_offset = header.side_data_offset + header.num_sides * header.side_bytes;
  header.center_bytes = center_bytes;
  header.total_bytes = header.center_offset + RoundUp(center_bytes, kPageBytes);
  return header;
}

bool SamePlan(const SegmentHeader& a, const SegmentHeader& b) {
  return a.total_bytes == b.total_bytes && a.directory_offset == b.directory_offset &&
         a.control_offset == b.control_offset && a.chunks_offset == b.chunks_offset &&
         a.num_chunks == b.num_chunks && a.sides_offset == b.sides_offset &&
         a.num_sides == b.num_sides && a.side_data_offset == b.side_data_offset &&
         a.side_bytes == b.side_bytes && a.center_offset == b.center_offset;
}

uint64_t HeaderChecksum(const SegmentHeader& header, std::string_view directory) {
  std::string bytes(reinterpret_cast<const char*>(&header), offsetof(SegmentHeader, checksum));
  bytes.append(directory);
  return Checksum(bytes);
}

Status DamagedHeader(const char* what) {
  return DataLossError(std::string("the segment's header is damaged: ") + what + " [SMB-E040]")
      .WithScope(FailureScope::kServer);
}

Status NoRoom(const std::string& name, uint64_t bytes, uint64_t available, const char* where) {
  return ResourceExhaustedError("segment '" + name + "' needs " + std::to_string(bytes >> 20) +
                                " MiB, and " + std::to_string(available >> 20) +
                                " MiB are available " + where + " [SMB-E041]");
}

Status CheckMemory(uint64_t bytes, const SegmentOptions& options) {
  const uint64_t available = AvailableMemoryBytes();
  if (bytes > available) {
    return NoRoom(options.name, bytes, available, "on this machine or in its cgroup");
  }
  struct statvfs file_system;
  if (options.directory.empty() || statvfs(options.directory.c_str(), &file_system) != 0) {
    return Status::Ok();
  }
  const uint64_t free_bytes = file_system.f_bavail * file_system.f_frsize;
  // A tmpfs without a limit says 0 blocks.
  if (file_system.f_blocks == 0 || bytes <= free_bytes) return Status::Ok();
  return NoRoom(options.name, bytes, free_bytes, ("in " + options.directory).c_str());
}

Status CheckOptions(const SegmentOptions& options) {
  TF_SMB_RETURN_IF_ERROR(CheckSegmentName(options.name));
  TF_SMB_RETURN_IF_ERROR(CheckJobId(options.job_id));
  if (options.num_workers < 1 || options.num_workers > kMaxWorkers) {
    return InvalidArgumentError("num_workers must be 1 to " + std::to_string(kMaxWorkers) +
                                ", got " + std::to_string(options.num_workers) + " [SMB-E042]");
  }
  if (!(options.lease_s >= 1e-9 && options.lease_s <= kMaxLeaseSeconds)) {
    return InvalidArgumentError("a lease must be above 0 and at most " +
                                std::to_string(static_cast<int>(kMaxLeaseSeconds)) +
                                " seconds, got " + std::to_string(options.lease_s) + " [SMB-E043]");
  }
  return Status::Ok();
}

// A file that has no name yet: one that is not finished is gone with its creator.
Result<UniqueFd> NewFile(const SegmentOptions& options) {
  if (options.directory.empty()) {
    UniqueFd fd(memfd_create("tf_smb_segment", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd.valid()) return ErrnoError(errno, "memfd_create", "[SMB-E044]");
    return fd;
  }
  UniqueFd fd(open(options.directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!fd.valid()) {
    return ErrnoError(errno, "cannot make a file in " + options.directory, "[SMB-E045]");
  }
  return fd;
}

// From here on others can find it, or, of a memfd, can rely on its size.
Status Finish(int fd, const SegmentOptions& options) {
  if (options.directory.empty()) {
    if (fchmod(fd, 0600) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      return ErrnoError(errno, "cannot seal segment '" + options.name + "'", "[SMB-E046]");
    }
    return Status::Ok();
  }
  const std::string from = "/proc/self/fd/" + std::to_string(fd);
  const std::string to = options.directory + "/" + options.file_name;
  if (linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW) != 0) {
    return ErrnoError(errno, "cannot put segment '" + options.name + "' at " + to, "[SMB-E047]");
  }
  return Status::Ok();
}

// What another process made can be mapped without fear that it changes in size, or
// belongs to somebody else.
Status CheckFile(int fd, const struct stat& info) {
  const int seals = fcntl(fd, F_GET_SEALS);
  // A memfd that could shrink under us would turn reads into SIGBUS.
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return Status::Ok();
  if (!S_ISREG(info.st_mode) || info.st_nlink == 0) {
    return DataLossError("what was received is not a sealed segment [SMB-E048]");
  }
  if (info.st_uid != geteuid()) {
    return PermissionDeniedError("the segment's file belongs to user " +
                                 std::to_string(info.st_uid) + ", this process runs as user " +
                                 std::to_string(geteuid()) + " [SMB-E049]");
  }
  if ((info.st_mode & 077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(info.st_mode & 07777));
    return PermissionDeniedError("the segment's file has mode " + std::string(mode) +
                                 ": others may open it, and it must be its owner's alone (0600)"
                                 " [SMB-E050]");
  }
  return Status::Ok();
}

}  // namespace

// --- The control mutex ---------------------------------------------------------

Segment::ControlLock::ControlLock(const Segment* segment)
    : mutex_(&segment->control()->mutex),
      timeout_s_(segment->control_timeout_s_),
      outcome_(mutex_->LockUntil(Deadline::After(timeout_s_))) {}

Status Segment::ControlLock::status() const {
  if (held()) return Status::Ok();
  if (outcome_ == LockOutcome::kBroken) {
    return DataLossError("the segment's control block is damaged: its mutex is none [SMB-E051]")
        .WithScope(FailureScope::kServer);
  }
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", timeout_s_);
  return DeadlineExceededError("the segment's control block has been locked for " +
                               std::string(seconds) + " s: one of its processes is stopped"
                               " [SMB-E052]");
}

// --- Creation ------------------------------------------------------------------

Segment::Segment(UniqueFd fd, MemoryMapping mapping)
    : fd_(std::move(fd)), mapping_(std::move(mapping)) {}

Result<std::unique_ptr<Segment>> Segment::Create(const SegmentOptions& options) {
  TF_SMB_RETURN_IF_ERROR(CheckOptions(options));
  const std::string directory = options.layout.Encode();
  if (directory.size() > kMaxDirectoryBytes) {
    return InvalidArgumentError("the names and shapes of the variables are " +
                                std::to_string(directory.size()) + " bytes, more than " +
                                std::to_string(kMaxDirectoryBytes) +
                                ": the model has too many variables [SMB-E053]");
  }
  SegmentHeader header = PlanHeader(directory.size(), options.layout.size_bytes());
  if (!options.sparse) TF_SMB_RETURN_IF_ERROR(CheckMemory(header.total_bytes, options));

  TF_SMB_ASSIGN_OR_RETURN(UniqueFd fd, NewFile(options));
  if (ftruncate(fd.get(), static_cast<off_t>(header.total_bytes)) != 0) {
    return ErrnoError(errno, "cannot size segment '" + options.name + "'", "[SMB-E054]");
  }
  TF_SMB_ASSIGN_OR_RETURN(MemoryMapping mapping,
                          MemoryMapping::MapShared(fd.get(), header.total_bytes));
  const int error = options.sparse ? 0 : mapping.Reserve(fd.get());
  if (error != 0) {
    return ErrnoError(error,
                      "cannot reserve the " + std::to_string(header.total_bytes >> 20) +
                          " MiB of segment '" + options.name + "'",
                      "[SMB-E055]");
  }

  header.num_workers = options.num_workers;
  header.lease_nanos = static_cast<int64_t>(options.lease_s * kNanosPerSecond);
  std::memcpy(header.name, options.name.data(), options.name.size());
  std::memcpy(header.job_id, options.job_id.data(), options.job_id.size());
  header.checksum = HeaderChecksum(header, directory);
  std::memcpy(mapping.data() + header.directory_offset, directory.data(), directory.size());
  std::memcpy(mapping.data(), &header, sizeof(header));

  std::unique_ptr<Segment> segment(new Segment(std::move(fd), std::move(mapping)));
  TF_SMB_RETURN_IF_ERROR(segment->ReadHeader());
  TF_SMB_RETURN_IF_ERROR(segment->InitShared());
  TF_SMB_RETURN_IF_ERROR(Finish(segment->fd(), options));
  return segment;
}

Status Segment::InitShared() {
  TF_SMB_RETURN_IF_ERROR(control()->mutex.Init());
  control()->next_incarnation.store(1);
  for (MemberSlot& member : control()->members) TF_SMB_RETURN_IF_ERROR(member.alive.Init());
  for (uint64_t i = 0; i < num_chunks(); ++i) TF_SMB_RETURN_IF_ERROR(chunks_[i].mutex.Init());
  for (uint32_t i = 0; i < num_sides_; ++i) TF_SMB_RETURN_IF_ERROR(sides_[i].mutex.Init());
  return Status::Ok();
}

Result<std::unique_ptr<Segment>> Segment::Map(UniqueFd fd) {
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoError(errno, "fstat of a segment", "[SMB-E056]");
  TF_SMB_RETURN_IF_ERROR(CheckFile(fd.get(), info));
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
  if (header.magic != kSegmentMagic) {
    return DamagedHeader("it does not begin with the magic number");
  }
  if (header.format_version != kSegmentFormatVersion) {
    return FailedPreconditionError(
        "the segment has format " + std::to_string(header.format_version) +
        ", this tf_smb reads format " + std::to_string(kSegmentFormatVersion) +
        ": use one version of tf_smb on all workers [SMB-E057]");
  }
  const uint64_t total = mapping_.size_bytes();
  if (header.directory_bytes > std::min(total, kMaxDirectoryBytes) ||
      header.center_bytes > total || header.total_bytes != total) {
    return DamagedHeader("a size is larger than the segment, or the segment was cut");
  }
  if (!SamePlan(header, PlanHeader(header.directory_bytes, header.center_bytes))) {
    return DamagedHeader("its sizes and offsets do not agree");
  }
  const std::string directory(mapping_.data() + header.directory_offset, header.directory_bytes);
  if (HeaderChecksum(header, directory) != header.checksum) {
    return DamagedHeader("its checksum does not match");
  }
  TF_SMB_ASSIGN_OR_RETURN(layout_, Layout::Decode(directory));
  if (layout_.size_bytes() != header.center_bytes) {
    return DamagedHeader("directory and center differ in size");
  }
  if (header.num_workers < 1 || header.num_workers > kMaxWorkers || header.lease_nanos <= 0 ||
      header.lease_nanos > kMaxLeaseNanos) {
    return DamagedHeader("the number of workers or the lease is out of range");
  }
  name_.assign(header.name, strnlen(header.name, sizeof(header.name)));
  job_id_.assign(header.job_id, strnlen(header.job_id, sizeof(header.job_id)));
  num_workers_ = header.num_workers;
  lease_nanos_ = header.lease_nanos;
  char* const base = mapping_.data();
  control_ = reinterpret_cast<ControlBlock*>(base + header.control_offset);
  chunks_ = reinterpret_cast<ChunkState*>(base + header.chunks_offset);
  sides_ = reinterpret_cast<SideBuffer*>(base + header.sides_offset);
  num_sides_ = static_cast<uint32_t>(header.num_sides);
  side_data_ = base + header.side_data_offset;
  side_bytes_ = header.side_bytes;
  center_ = base + header.center_offset;
  pieces_.resize(header.num_chunks);
  InitPieces();
  return Status::Ok();
}

void Segment::InitPieces() {
  const std::vector<Variable>& variables = layout_.variables();
  for (uint32_t v = 0; v < variables.size(); ++v) {
    const uint64_t element_bytes = variables[v].element_bytes();
    uint64_t done = 0;
    while (done < variables[v].num_elements) {
      const uint64_t at = variables[v].offset_bytes + done * element_bytes;
      const uint64_t chunk = at / kChunkBytes;
      // Whole elements: chunks and variables begin at multiples of every element's size.
      const uint64_t room = ((chunk + 1) * kChunkBytes - at) / element_bytes;
      const uint64_t count = std::min(room, variables[v].num_elements - done);
      pieces_[chunk].push_back({v, done, count, at});
      done += count;
    }
  }
}

// --- Chunks --------------------------------------------------------------------

uint64_t Segment::chunk_bytes(uint64_t index) const {
  return std::min(kChunkBytes, layout_.size_bytes() - index * kChunkBytes);
}

LockOutcome Segment::TryLockChunk(uint64_t index) {
  const LockOutcome outcome = chunks_[index].mutex.TryLock();
  if (outcome == LockOutcome::kLockedAfterDeath) RecoverChunk(index);
  return outcome;
}

LockOutcome Segment::LockChunk(uint64_t index, const Deadline& deadline) {
  const LockOutcome outcome = chunks_[index].mutex.LockUntil(deadline);
  if (outcome == LockOutcome::kLockedAfterDeath) RecoverChunk(index);
  return outcome;
}

void Segment::RecoverChunk(uint64_t index) {
  const uint32_t pending = chunks_[index].pending.load(std::memory_order_acquire);
  if (pending >= 1 && pending <= num_sides_ && sides_[pending - 1].chunk.load() == index) {
    CopySide(index, pending - 1);
  }
  // It may have changed the chunk, and did not come to saying so.
  chunks_[index].version.fetch_add(1, std::memory_order_relaxed);
  AdvanceVersion();
}

void Segment::CopySide(uint64_t index, uint32_t number) {
  std::memcpy(center_ + index * kChunkBytes, side_data_ + number * side_bytes_,
              chunk_bytes(index));
  chunks_[index].round.store(sides_[number].round.load());
  chunks_[index].weight.store(sides_[number].weight.load());
  chunks_[index].pending.store(0, std::memory_order_release);
}

void Segment::Publish(uint64_t index, const SideLease& side, uint64_t round, double weight) {
  side.side_->chunk.store(index);
  side.side_->round.store(round);
  side.side_->weight.store(weight);
  chunks_[index].pending.store(side.number_ + 1, std::memory_order_release);
  CopySide(index, side.number_);
  chunks_[index].version.fetch_add(1, std::memory_order_relaxed);
}

bool Segment::SideIsNeeded(uint32_t number) {
  const uint64_t chunk = sides_[number].chunk.load();
  if (chunk >= num_chunks() || chunks_[chunk].pending.load() != number + 1) return false;
  // Whoever locks the chunk next completes it: this thread, if it can. Never waits: it
  // holds a chunk already.
  if (!Holds(TryLockChunk(chunk))) return true;
  UnlockChunk(chunk);
  return false;
}

Result<Segment::SideLease> Segment::LeaseSide(const Deadline& deadline) {
  // Threads begin at different ones.
  static thread_local const uint32_t first = static_cast<uint32_t>(gettid());
  for (;;) {
    for (uint32_t i = 0; i < num_sides_; ++i) {
      const uint32_t number = (first + i) % num_sides_;
      if (!Holds(sides_[number].mutex.TryLock())) continue;
      if (!SideIsNeeded(number)) {
        return SideLease(&sides_[number], number, side_data_ + number * side_bytes_);
      }
      sides_[number].mutex.Unlock();
    }
    if (deadline.Expired()) {
      return DeadlineExceededError("all " + std::to_string(num_sides_) +
                                   " side buffers of segment '" + name_ +
                                   "' stayed in use: the workers that hold them are stopped"
                                   " [SMB-E058]");
    }
    usleep(50);
  }
}

}  // namespace tf_smb
