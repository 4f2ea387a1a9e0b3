// What the tests of segments share: layouts, segments with their raw bytes, and child
// processes, which are forked before any thread is made.
#ifndef TF_SMB_TESTS_CC_BOX_TESTING_H_
#define TF_SMB_TESTS_CC_BOX_TESTING_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/box/segment.h"
#include "cc/common/clock.h"
#include "cc/common/memory_mapping.h"

namespace tf_smb {

constexpr double kLongSeconds = 60.0;
constexpr int64_t kLongNanos = 60 * kNanosPerSecond;

inline Deadline Long() { return Deadline::After(kLongSeconds); }

inline bool WaitUntil(const std::function<bool()>& condition) {
  const Deadline deadline = Long();
  while (!condition()) {
    if (deadline.Expired()) return false;
    usleep(200);
  }
  return true;
}

// A message without its anchor in docs/errors.md, which every message must end with.
inline std::string WithoutAnchor(const std::string& message) {
  const size_t at = message.rfind(" [SMB-E");
  EXPECT_TRUE(at != std::string::npos && message.back() == ']') << message;
  return message.substr(0, at);
}

// --- Processes -----------------------------------------------------------------

// Runs `body` in a child, which ends with its return value.
inline pid_t Spawn(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  _exit(body());
}

// Its exit code, or minus the signal that ended it.
inline int WaitExit(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Until it has stopped itself at the point that matters.
inline void WaitStopped(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status)) << "it ended with " << status;
}

inline void Kill(pid_t child) {
  kill(child, SIGKILL);
  EXPECT_EQ(WaitExit(child), -SIGKILL);
}

// A zeroed T that forked children share.
template <typename T>
T* NewShared() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  EXPECT_NE(memory, MAP_FAILED);
  return static_cast<T*>(memory);
}

// --- Segments ------------------------------------------------------------------

inline Variable VariableOf(const std::vector<int64_t>& shape, DType dtype = DType::kFloat32,
                           const std::string& name = "w") {
  Variable variable;
  variable.name = name;
  variable.dtype = dtype;
  variable.shape = shape;
  return variable;
}

// "v0", "v1", ... of one dtype.
inline Layout LayoutOf(const std::vector<std::vector<int64_t>>& shapes,
                       DType dtype = DType::kFloat32) {
  std::vector<Variable> variables;
  for (const auto& shape : shapes) {
    variables.push_back(VariableOf(shape, dtype, "v" + std::to_string(variables.size())));
  }
  return *Layout::Create(variables);
}

// Never unmapped: tests die, and leave members behind, whose mutexes the thread's list of
// robust mutexes goes on pointing at.
inline Segment* Keep(Result<std::unique_ptr<Segment>> segment) {
  static auto* const kept = new std::vector<std::unique_ptr<Segment>>();
  EXPECT_TRUE(segment.ok()) << segment.status().message();
  kept->push_back(std::move(segment).value());
  return kept->back().get();
}

inline SegmentOptions OptionsOf(Layout layout, double lease_s = 3600.0) {
  SegmentOptions options;
  options.name = "run/0";
  options.job_id = "job-1";
  options.num_workers = 3;
  options.lease_s = lease_s;
  options.layout = std::move(layout);
  return options;
}

inline UniqueFd Duplicate(int fd) { return UniqueFd(fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

inline Segment* MapAgain(const Segment& segment) {
  return Keep(Segment::Map(Duplicate(segment.fd())));
}

// The bytes of a segment, to look at and to damage.
class RawSegment {
 public:
  explicit RawSegment(int fd) {
    struct stat info;
    EXPECT_EQ(fstat(fd, &info), 0);
    mapping_ = std::move(MemoryMapping::MapShared(fd, static_cast<uint64_t>(info.st_size))).value();
  }
  char* data() const { return mapping_.data(); }
  uint64_t size() const { return mapping_.size_bytes(); }
  SegmentHeader* header() const { return reinterpret_cast<SegmentHeader*>(data()); }
  ControlBlock* control() const {
    return reinterpret_cast<ControlBlock*>(data() + header()->control_offset);
  }
  ChunkState* chunk(uint64_t index) const {
    return reinterpret_cast<ChunkState*>(data() + header()->chunks_offset) + index;
  }
  SideBuffer* side(uint64_t number) const {
    return reinterpret_cast<SideBuffer*>(data() + header()->sides_offset) + number;
  }
  char* side_data(uint64_t number) const {
    return data() + header()->side_data_offset + number * header()->side_bytes;
  }
  char* center() const { return data() + header()->center_offset; }
  void Expire(const MemberId& member) const {
    control()->members[member.slot].renewed_nanos.store(BootTimeNanos() -
                                                        7200 * kNanosPerSecond);
  }

 private:
  MemoryMapping mapping_;
};

// A child that maps the segment, joins it, runs `then` and stays.
inline pid_t SpawnMember(const Segment& segment, std::optional<uint32_t> index,
                         const std::function<void(Segment*, MemberId)>& then = {}) {
  const uint32_t before = segment.CountLive();
  const pid_t child = Spawn([&] {
    Segment* const own = MapAgain(segment);
    const Result<MemberId> member = own->Join(index);
    if (!member.ok()) return 1;
    if (then) then(own, *member);
    for (;;) pause();
  });
  EXPECT_TRUE(WaitUntil([&] { return segment.CountLive() > before; }));
  return child;
}

}  // namespace tf_smb

#endif  // TF_SMB_TESTS_CC_BOX_TESTING_H_
