#include "cc/transport/faults/faulty_channel.h"

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace tf_smb {
namespace {

class FaultyChannel : public Channel {
 public:
  FaultyChannel(std::unique_ptr<Channel> inner, std::shared_ptr<FrameFaultPlan> plan)
      : inner_(std::move(inner)), plan_(std::move(plan)) {}

  Status Send(std::string_view frame, const Deadline& deadline,
              std::deque<std::string>* inbox) override {
    const std::optional<std::string> changed =
        Change(FrameDirection::kSend, std::string(frame));
    if (!changed.has_value()) return Status::Ok();
    std::deque<std::string> arrived;
    Status status = inner_->Send(*changed, deadline, inbox == nullptr ? nullptr : &arrived);
    for (std::string& one : arrived) {
      std::optional<std::string> left = Change(FrameDirection::kReceive, std::move(one));
      if (left.has_value()) inbox->push_back(*std::move(left));
    }
    return status;
  }

  Result<std::string> Receive(const Deadline& deadline) override {
    for (;;) {
      TF_SMB_ASSIGN_OR_RETURN(std::string frame, inner_->Receive(deadline));
      std::optional<std::string> changed = Change(FrameDirection::kReceive, std::move(frame));
      if (changed.has_value()) return *std::move(changed);
    }
  }

  void Close() override { inner_->Close(); }

 private:
  // What is left of a frame; nothing if it is lost.
  std::optional<std::string> Change(FrameDirection direction, std::string frame) {
    for (const FrameFault& fault : plan_->Take(direction)) {
      switch (fault.kind) {
        case FrameFaultKind::kDrop:
          return std::nullopt;
        case FrameFaultKind::kDelay:
          std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
          break;
        case FrameFaultKind::kClose:
          inner_->Close();
          return std::nullopt;
        case FrameFaultKind::kTruncate:
          if (fault.bytes < frame.size()) frame.resize(fault.bytes);
          break;
      }
    }
    return frame;
  }

  const std::unique_ptr<Channel> inner_;
  const std::shared_ptr<FrameFaultPlan> plan_;
};

}  // namespace

std::unique_ptr<Channel> MakeFaulty(std::unique_ptr<Channel> inner,
                                    std::shared_ptr<FrameFaultPlan> plan) {
  return std::make_unique<FaultyChannel>(std::move(inner), std::move(plan));
}

Dialer MakeFaulty(Dialer inner, std::shared_ptr<FrameFaultPlan> plan) {
  return [inner = std::move(inner),
          plan = std::move(plan)](const Deadline& deadline) -> Result<std::unique_ptr<Channel>> {
    TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel, inner(deadline));
    return MakeFaulty(std::move(channel), plan);
  };
}

}  // namespace tf_smb
