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
};

// The part of a variable that lies in one chunk.
struct ChunkPiece {
  uint32_t variable;
  uint64_t variable_offset;  // elements
  uint64_t center_offset;    // elements
  uint64_t count;            // elements
};

class Segment : public SegmentControl {
 public:
  // A new memfd, zeroed, sealed. RESOURCE_EXHAUSTED, naming both numbers, if the
  // machine or the cgroup has not that much memory.
  static Result<std::unique_ptr<Segment>> Create(const SegmentOptions& options);
  // Maps and checks what another process made. DATA_LOSS for a damaged one.
  static Result<std::unique_ptr<Segment>> Map(UniqueFd fd);

  int fd() const { return fd_.get(); }

  // The center, packed as the layout says. Elements of chunk i may be touched only
  // under chunk(i)'s mutex.
  float* center() const { return center_; }
  uint64_t num_chunks() const { return pieces_.size(); }
  ChunkState* chunk(uint64_t index) const { return chunks_ + index; }
  const std::vector<ChunkPiece>& pieces(uint64_t index) const { return pieces_[index]; }
  void AdvanceVersion() { control()->version.fetch_add(1, std::memory_order_relaxed); }

  // SegmentControl, by the control block in the mapping itself.
  const std::string& name() const override { return name_; }
  const std::string& job_id() const override { return job_id_; }
  uint32_t num_workers() const override { return num_workers_; }
  double lease_s() const override { return static_cast<double>(lease_nanos_) / kNanosPerSecond; }
  const Layout& layout() const override { return layout_; }
  uint64_t version() const override { return control()->version.load(); }

  Result<MemberId> Join(std::optional<uint32_t> worker_index) override;
  Status Renew(const MemberId& member) override;
  void Leave(const MemberId& member) override;
  bool LeaveUnlessLast(const MemberId& member) override;
  Status CheckMember(const MemberId& member) const override;
  void PublishProgress(const MemberId& member, uint64_t steps) override;
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
  uint32_t changes() const override { return control()->changes.load(); }
  void WaitForChange(uint32_t seen, int64_t timeout_nanos) const override;

  // Marks dead who is dead. True if anybody was.
  bool Reap();
  // True once anybody has joined.
  bool ever_joined() const { return control()->next_incarnation.load() > 1; }

 private:
  Segment(UniqueFd fd, MemoryMapping mapping);
  Status ReadHeader();
  void InitPieces();

  ControlBlock* control() const { return control_; }
  MemberSlot& slot(const MemberId& member) const { return control_->members[member.slot]; }
  struct SlotRange {
    MemberSlot* first;
    MemberSlot* last;
    MemberSlot* begin() const { return first; }
    MemberSlot* end() const { return last; }
  };
  SlotRange UsedSlots() const;

  // The control mutex; DEADLINE_EXCEEDED if a stopped process holds it.
  class ControlLock;
  void NotifyChange() const;
  bool ReapLocked();
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
  ControlBlock* control_ = nullptr;
  ChunkState* chunks_ = nullptr;
  float* center_ = nullptr;
  std::vector<std::vector<ChunkPiece>> pieces_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_H_
