// Segment: a named, typed piece of memory that several processes map: the center,
// the directory of its variables, who is there, and the locks.
//
// Thread-safe: state shared between processes is atomic or under the robust
// mutexes of the segment itself.
#ifndef TF_SMB_CC_BOX_SEGMENT_H_
#define TF_SMB_CC_BOX_SEGMENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/box/segment_control.h"
#include "cc/box/segment_format.h"
#include "cc/common/clock.h"
#include "cc/common/memory_mapping.h"
#include "cc/common/status.h"
#include "cc/common/unique_fd.h"
#include "cc/wire/layout.h"

namespace tf_smb {

struct SegmentOptions {
  std::string name;
  std::string job_id;
  uint32_t num_workers = 1;
  double lease_s = 10.0;
  Layout layout;
  // Memory is taken when it is first touched, not now: for segments that are larger than
  // what is used of them. If there is none then, the process that touches it is killed.
  bool sparse = false;
  // Empty: a memfd, which goes with its last process whatever happens. Else a file in this
  // folder, under `file_name`, for its owner alone, which stays until it is unlinked.
  std::string directory;
  std::string file_name;
};

// The part of a variable that lies in one chunk.
struct ChunkPiece {
  uint32_t variable;
  uint64_t first;          // element of the variable
  uint64_t count;          // elements
  uint64_t center_offset;  // bytes
};

class Segment : public SegmentControl {
 public:
  // A new one, zeroed; a memfd is sealed. RESOURCE_EXHAUSTED, naming both numbers, if the
  // machine, the cgroup or the file system has not that much memory; ALREADY_EXISTS if
  // the file is there.
  static Result<std::unique_ptr<Segment>> Create(const SegmentOptions& options);
  // Maps and checks what another process made. DATA_LOSS for a damaged one,
  // PERMISSION_DENIED for a file of another user, or that others may open.
  static Result<std::unique_ptr<Segment>> Map(UniqueFd fd);

  int fd() const { return fd_.get(); }

  // How long a call waits for the control mutex, which nobody holds for more than a few
  // instructions, unless stopped. Before other threads use this.
  void set_control_timeout(double seconds) { control_timeout_s_ = seconds; }

  // The center, packed as the layout says. Elements of a chunk may be touched only while
  // its mutex is held.
  char* center() const { return center_; }
  uint64_t num_chunks() const { return pieces_.size(); }
  ChunkState* chunk(uint64_t index) const { return chunks_ + index; }
  uint64_t chunk_bytes(uint64_t index) const;
  const std::vector<ChunkPiece>& pieces(uint64_t index) const { return pieces_[index]; }

  // A chunk's mutex. After the death of its last holder, first completes what that one
  // had computed whole, and counts it.
  LockOutcome TryLockChunk(uint64_t index);
  LockOutcome LockChunk(uint64_t index, const Deadline& deadline);
  void UnlockChunk(uint64_t index) { chunks_[index].mutex.Unlock(); }

  // A side buffer, held by this thread, for the next contents of a chunk that it holds too.
  class SideLease {
   public:
    ~SideLease() {
      if (side_ != nullptr) side_->mutex.Unlock();
    }
    SideLease(SideLease&& other) noexcept
        : side_(std::exchange(other.side_, nullptr)), number_(other.number_), data_(other.data_) {}
    SideLease& operator=(SideLease&&) = delete;

    // As long as the longest chunk.
    char* data() const { return data_; }

   private:
    friend class Segment;
    SideLease(SideBuffer* side, uint32_t number, char* data)
        : side_(side), number_(number), data_(data) {}
    SideBuffer* side_;
    uint32_t number_;
    char* data_;
  };
  // DEADLINE_EXCEEDED if stopped processes hold them all.
  Result<SideLease> LeaseSide(const Deadline& deadline);
  // Replaces the chunk's contents by the buffer's, and its round and weight: all or, if
  // the process dies before, nothing.
  void Publish(uint64_t index, const SideLease& side, uint64_t round, double weight);

  void AdvanceVersion();
  // Whether shares of this round are still taken.
  bool IsOpenRound(uint64_t round) const;

  // SegmentControl, by the control block in the mapping itself.
  const std::string& name() const override { return name_; }
  const std::string& job_id() const override { return job_id_; }
  uint32_t num_workers() const override { return num_workers_; }
  double lease_s() const override { return static_cast<double>(lease_nanos_) / kNanosPerSecond; }
  const Layout& layout() const override { return layout_; }
  uint64_t version() const override { return control()->version.load(); }
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
  bool seeded() const override {
    return control()->seed_state.load() == static_cast<uint32_t>(SeedState::kSeeded);
  }
  bool BeginSeeding(const MemberId& member) override;
  void FinishSeeding(const MemberId& member) override;
  uint64_t Arrive(const MemberId& member) override;
  bool TryCloseMeeting(uint64_t meeting) override;
  uint64_t FewestSteps() const override { return control()->fewest_steps.load(); }
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
  uint64_t rounds_closed() const override { return control()->rounds_closed.load(); }
  uint64_t phase() const override { return control()->phase.load(); }
  void SetFirstPhase(const MemberId& member, uint64_t phase) override;
  void EnterPhase(const MemberId& member, uint64_t phase) override;
  bool TryEndPhase(const MemberId& member, uint64_t phase) override;
  Result<std::string> AgreeOnSchedule(const MemberId& member, const std::string& words) override;
  Result<uint64_t> PostNotice(const MemberId& member, const std::string& text) override;
  Notice LastNotice() override;
  void RequestStop(const MemberId& member) override;
  bool stop_requested() const override { return control()->stop_requested.load() != 0; }
  uint32_t changes() const override { return control()->changes.load(); }
  void WaitForChange(uint32_t seen, int64_t timeout_nanos) const override;

  // Marks dead who is dead. True if anybody was.
  bool Reap();
  // As Leave, of a member that is gone without a word: it is seen dead. For whoever speaks
  // for a member that is elsewhere.
  void Abandon(const MemberId& member);
  // True once anybody has joined.
  bool ever_joined() const { return control()->next_incarnation.load() > 1; }

 private:
  Segment(UniqueFd fd, MemoryMapping mapping);
  Status ReadHeader();
  // The locks and counters of a new one.
  Status InitShared();
  void InitPieces();

  ControlBlock* control() const { return control_; }
  MemberSlot& slot(const MemberId& member) const {
    return control_->members[member.slot % kMaxMembers];
  }
  struct SlotRange {
    MemberSlot* first;
    MemberSlot* last;
    MemberSlot* begin() const { return first; }
    MemberSlot* end() const { return last; }
  };
  SlotRange UsedSlots() const;

  class ControlLock;  // segment_lock.h
  // What the last holder of the chunk's mutex, who died, left to be done.
  void RecoverChunk(uint64_t index);
  void CopySide(uint64_t index, uint32_t number);
  // True if a chunk still needs what is in the buffer, after trying to complete it.
  bool SideIsNeeded(uint32_t number);
  // The workers of the barrier that did not arrive and may still.
  std::vector<uint32_t> MissingLocked(const BarrierEntry& barrier) const;
  BarrierEntry* FindBarrier(uint64_t id);
  void LeaveBarriers(uint32_t worker_index);
  // Whether it has come to a meeting that is still open.
  bool IsAtMeeting(const MemberSlot& member) const;
  // The workers whose shares the round waits for.
  std::vector<uint32_t> MissingShares(uint64_t round) const;
  // Those whose shares are in and who still have to read the mean.
  std::vector<uint32_t> MissingReaders(uint64_t round) const;
  bool AllBelowShared(const MemberId& member, uint64_t round) const;
  // Closes the open round once no share is missing. True if no round is open now.
  bool CloseCompleteRoundLocked();
  void CloseRoundLocked();
  void NotifyChange() const;
  bool ReapLocked();
  void End(const MemberId& member, MemberState state);
  // Ends a live member's membership, and with it its seeding.
  void EndLocked(MemberSlot* member, MemberState state);
  bool IsSeeder(const MemberSlot& member) const;
  // A slot that no member is live in, its `alive` mutex held; null if there is none.
  MemberSlot* TakeSlotLocked();

  UniqueFd fd_;
  MemoryMapping mapping_;
  // Constant after construction. Copies of header fields: the header is shared
  // memory, and is not trusted twice.
  std::string name_;
  std::string job_id_;
  Layout layout_;
  uint32_t num_workers_ = 1;
  int64_t lease_nanos_ = 0;
  double control_timeout_s_ = 10.0;
  ControlBlock* control_ = nullptr;
  ChunkState* chunks_ = nullptr;
  SideBuffer* sides_ = nullptr;
  uint32_t num_sides_ = 0;
  char* side_data_ = nullptr;
  uint64_t side_bytes_ = 0;
  char* center_ = nullptr;
  std::vector<std::vector<ChunkPiece>> pieces_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_H_
