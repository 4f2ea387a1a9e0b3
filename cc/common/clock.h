// Time: monotonic for deadlines inside a process, boot time for leases, because
// boot time also runs while the machine is suspended.
#ifndef TF_SMB_CC_COMMON_CLOCK_H_
#define TF_SMB_CC_COMMON_CLOCK_H_

#include <cstdint>
#include <ctime>

namespace tf_smb {

constexpr int64_t kNanosPerSecond = 1'000'000'000;

int64_t MonotonicNanos();
int64_t BootTimeNanos();

// A point on the monotonic clock. Every wait of the library takes one.
class Deadline {
 public:
  static Deadline After(double seconds);

  bool Expired() const { return RemainingNanos() == 0; }
  // 0 when expired.
  int64_t RemainingNanos() const;
  // For poll(2): rounded up, so that a loop around it does not spin.
  int RemainingMillis() const;
  timespec ToTimespec() const;

 private:
  explicit Deadline(int64_t at_nanos) : at_nanos_(at_nanos) {}
  int64_t at_nanos_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_CLOCK_H_
