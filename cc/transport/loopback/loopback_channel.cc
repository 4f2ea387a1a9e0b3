#include "cc/transport/loopback/loopback_channel.h"

#include <array>
#include <chrono>
#include <deque>
#include <string>
#include <utility>

#include "cc/common/mutex.h"
#include "cc/wire/messages.h"

namespace tf_smb {
namespace {

// Frames that may lie in one direction: few, as a slow peer's buffers are.
constexpr size_t kMaxQueued = 2;

struct Queues {
  Mutex mutex;
  CondVar changed;
  std::array<std::deque<std::string>, 2> frames GUARDED_BY(mutex);  // by the receiving end
  bool closed GUARDED_BY(mutex) = false;
};

Status ClosedError() { return UnavailableError("the peer closed the connection [SMB-E106]"); }

class LoopbackChannel : public Channel {
 public:
  LoopbackChannel(std::shared_ptr<Queues> queues, int end)
      : queues_(std::move(queues)), end_(end) {}
  ~LoopbackChannel() override { Close(); }

  Status Send(std::string_view frame, const Deadline& deadline,
              std::deque<std::string>* inbox) override {
    if (frame.size() > kMaxFrameBytes) {
      return InvalidArgumentError("a frame of " + std::to_string(frame.size()) +
                                  " bytes is longer than " + std::to_string(kMaxFrameBytes) +
                                  " [SMB-E117]");
    }
    MutexLock lock(&queues_->mutex);
    for (;;) {
      if (queues_->closed) return ClosedError();
      if (queues_->frames[1 - end_].size() < kMaxQueued) break;
      if (inbox != nullptr && TakeInto(inbox)) continue;
      if (!WaitLocked(deadline)) return LateError("take a message");
    }
    queues_->frames[1 - end_].emplace_back(frame);
    queues_->changed.NotifyAll();
    return Status::Ok();
  }

  Result<std::string> Receive(const Deadline& deadline) override {
    MutexLock lock(&queues_->mutex);
    std::deque<std::string>& frames = queues_->frames[end_];
    while (frames.empty()) {
      if (queues_->closed) return ClosedError();
      if (!WaitLocked(deadline)) return LateError("answer");
    }
    std::string frame = std::move(frames.front());
    frames.pop_front();
    queues_->changed.NotifyAll();
    return frame;
  }

  void Close() override {
    MutexLock lock(&queues_->mutex);
    queues_->closed = true;
    queues_->changed.NotifyAll();
  }

 private:
  static Status LateError(const std::string& what) {
    return DeadlineExceededError("the peer did not " + what + " in time [SMB-E139]");
  }

  bool TakeInto(std::deque<std::string>* inbox) REQUIRES(queues_->mutex) {
    std::deque<std::string>& frames = queues_->frames[end_];
    if (frames.empty()) return false;
    inbox->push_back(std::move(frames.front()));
    frames.pop_front();
    queues_->changed.NotifyAll();
    return true;
  }

  // False if the deadline has passed.
  bool WaitLocked(const Deadline& deadline) REQUIRES(queues_->mutex) {
    const int64_t left = deadline.RemainingNanos();
    if (left == 0) return false;
    queues_->changed.WaitFor(&queues_->mutex, std::chrono::nanoseconds(left));
    return true;
  }

  const std::shared_ptr<Queues> queues_;
  const int end_;
};

}  // namespace

std::pair<std::unique_ptr<Channel>, std::unique_ptr<Channel>> NewLoopbackChannel() {
  const auto queues = std::make_shared<Queues>();
  return {std::make_unique<LoopbackChannel>(queues, 0),
          std::make_unique<LoopbackChannel>(queues, 1)};
}

}  // namespace tf_smb
