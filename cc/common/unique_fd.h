// A file descriptor with one owner, closed with it.
#ifndef TF_SMB_CC_COMMON_UNIQUE_FD_H_
#define TF_SMB_CC_COMMON_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

namespace tf_smb {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() { Reset(); }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void Reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_COMMON_UNIQUE_FD_H_
