// The bytes of a segment, as every process that maps it sees them. SEGMENT.md,
// beside this file, describes them: change both together, and the version.
#ifndef TF_SMB_CC_BOX_SEGMENT_FORMAT_H_
#define TF_SMB_CC_BOX_SEGMENT_FORMAT_H_

#include <atomic>
#include <cstdint>

#include "cc/common/robust_mutex.h"

namespace tf_smb {

constexpr uint64_t kSegmentMagic = 0x314745534d53u;  // "SMSEG1"
constexpr uint32_t kSegmentFormatVersion = 3;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kChunkBytes = 256 * 1024;  // of the center
constexpr uint32_t kMaxMembers = 1024;
constexpr uint32_t kMaxWorkers = 1024;
constexpr uint32_t kMaxBarriers = 64;
constexpr uint32_t kMaxSideBuffers = 16;
constexpr uint32_t kMaxTextBytes = 4096;  // of a text that the control block keeps

// Written once by the creator, before anybody else sees the segment.
struct SegmentHeader {
  uint64_t magic;
  uint32_t format_version;
  uint32_t num_workers;  // how many the job means to start; indexes may go beyond
  uint64_t total_bytes;
  uint64_t directory_offset;
  uint64_t directory_bytes;
  uint64_t control_offset;
  uint64_t chunks_offset;
  uint64_t num_chunks;
  uint64_t sides_offset;
  uint64_t num_sides;
  uint64_t side_data_offset;
  uint64_t side_bytes;  // of each side buffer
  uint64_t center_offset;
  uint64_t center_bytes;
  int64_t lease_nanos;
  char name[208];
  char job_id[112];
  uint64_t checksum;  // of everything above and the directory
};
static_assert(sizeof(SegmentHeader) <= kPageBytes);

// Never renumber.
enum class MemberState : uint32_t {
  kFree = 0,
  kLive = 1,
  kLeft = 2,  // said goodbye
  kDead = 3,  // its process died, or its lease lapsed
};

enum class SeedState : uint32_t { kEmpty = 0, kSeeding = 1, kSeeded = 2 };

struct alignas(64) MemberSlot {
  // Held by the member's lease thread for as long as it lives: the kernel gives it
  // up when that thread dies, however it dies, in whatever PID namespace.
  RobustMutex alive;
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> worker_index;
  std::atomic<uint64_t> incarnation;
  std::atomic<int64_t> renewed_nanos;  // boot time
  std::atomic<uint64_t> steps;
  std::atomic<uint64_t> epoch;  // with `steps`, as of its last exchange
  std::atomic<uint64_t> batch;  // of the epoch: how many it had trained on then
  std::atomic<uint64_t> phase;  // of the schedule: the one it acts by
  std::atomic<uint64_t> steps_at_begin;  // of the training it is in, or was last in
  std::atomic<uint64_t> exchanges;
  std::atomic<uint64_t> arrived;   // meetings this member has come to
  std::atomic<uint64_t> finished;  // meetings this member has read the center of
  std::atomic<uint32_t> process_id;
  std::atomic<uint32_t> training;  // in the middle of fit
  std::atomic<uint64_t> round_entered;      // the last round it was counted in
  std::atomic<uint64_t> round_contributed;  // the last one it put its whole share into
  std::atomic<uint64_t> round_finished;     // the last one whose mean it has read
};

// Workers, by index: bit i % 64 of word i / 64.
struct WorkerSet {
  std::atomic<uint64_t> words[kMaxWorkers / 64];
};

// A text that changes as a whole: the next one is written where the present one is not,
// and then counted.
struct TextEntry {
  std::atomic<uint64_t> number;  // counts changes; the present one lies in texts[number % 2]
  struct {
    std::atomic<uint32_t> size_bytes;
    char bytes[kMaxTextBytes];
  } texts[2];
};

// Free while `id` is 0.
struct BarrierEntry {
  std::atomic<uint64_t> id;  // never used twice
  WorkerSet expected;
  WorkerSet arrived;
};

struct ControlBlock {
  // Guards changes of states below; reads need no lock.
  RobustMutex mutex;
  alignas(64) std::atomic<uint32_t> changes;  // futex: counts every change below
  std::atomic<uint32_t> seed_state;
  std::atomic<uint32_t> seeder_slot;
  std::atomic<uint32_t> slots_used;  // slots beyond have never been taken
  std::atomic<uint64_t> next_incarnation;
  std::atomic<uint64_t> meetings_closed;
  std::atomic<uint64_t> fewest_steps;  // by any live member in its training, at the last closing
  WorkerSet absent_workers;            // will not come (again)

  // The segment's lock, for those who ask for it.
  std::atomic<uint64_t> lock_holder;  // incarnation; 0: free
  std::atomic<uint64_t> lock_token;   // of the last grant: counts them
  std::atomic<int64_t> lock_expires_nanos;  // boot time

  // Rounds: opened is closed, or one more.
  std::atomic<uint64_t> rounds_opened;
  std::atomic<uint64_t> rounds_closed;
  std::atomic<uint64_t> round_ends_phase;  // 1 + the phase that ends with the open one; 0: none

  // The schedule.
  std::atomic<uint64_t> phase;           // never goes back
  std::atomic<uint32_t> stop_requested;  // until the next meeting closes
  TextEntry schedule;                    // in words: what all workers must have
  TextEntry notice;                      // from one worker to all

  std::atomic<uint64_t> next_barrier_id;
  BarrierEntry barriers[kMaxBarriers];

  alignas(64) std::atomic<uint64_t> version;  // updates applied to the center
  std::atomic<uint32_t> version_signal;       // futex: moves with every version
  std::atomic<uint32_t> version_waiters;      // how many may be asleep on it; never too few
  alignas(64) MemberSlot members[kMaxMembers];
};

struct alignas(64) ChunkState {
  RobustMutex mutex;
  std::atomic<uint64_t> version;  // moves applied to this chunk
  std::atomic<uint64_t> round;    // whose mean it holds
  std::atomic<double> weight;     // of what went into that mean
  // 1 + the side buffer that holds its next contents, whole; 0: none. Whoever finds it
  // set, with the last holder of the mutex dead, copies them into the center.
  std::atomic<uint32_t> pending;
};

// Where sums are computed before they are published, so that a death in the middle
// leaves all of a chunk's or nothing. Used by whoever holds a chunk's mutex.
struct alignas(64) SideBuffer {
  RobustMutex mutex;
  std::atomic<uint64_t> chunk;
  std::atomic<uint64_t> round;  // what the chunk's fields become
  std::atomic<double> weight;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<double>::is_always_lock_free);

}  // namespace tf_smb

#endif  // TF_SMB_CC_BOX_SEGMENT_FORMAT_H_
