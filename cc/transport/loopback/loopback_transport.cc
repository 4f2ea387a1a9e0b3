#include "cc/transport/loopback/loopback_transport.h"

#include <chrono>
#include <map>
#include <utility>

#include "cc/common/fork_guard.h"
#include "cc/common/mutex.h"
#include "cc/transport/loopback/loopback_channel.h"
#include "cc/transport/message/message_connection.h"
#include "cc/transport/message/message_service.h"

namespace tf_smb {
namespace {

// Who listens where in this process. A forked child finds nobody: its parent's threads
// did not come with it.
class Names {
 public:
  static Names* Get() {
    static auto* const names = new Names();
    return names;
  }

  bool Add(const std::string& name, std::shared_ptr<MessageService> service) EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    const bool added = services_.emplace(name, std::move(service)).second;
    changed_.NotifyAll();
    return added;
  }

  void Remove(const std::string& name) EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    services_.erase(name);
  }

  // Waits for it to be there; null if it is not by the deadline.
  std::shared_ptr<MessageService> Find(const std::string& name, const Deadline& deadline)
      EXCLUDES(mutex_) {
    if (fork_guard_.InForkedChild()) return nullptr;
    MutexLock lock(&mutex_);
    for (;;) {
      const auto found = services_.find(name);
      if (found != services_.end()) return found->second;
      const int64_t left = deadline.RemainingNanos();
      if (left == 0) return nullptr;
      changed_.WaitFor(&mutex_, std::chrono::nanoseconds(left));
    }
  }

 private:
  const ForkGuard fork_guard_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, std::shared_ptr<MessageService>> services_ GUARDED_BY(mutex_);
};

Result<std::unique_ptr<Channel>> Dial(const std::string& name, const Deadline& deadline) {
  const std::shared_ptr<MessageService> service = Names::Get()->Find(name, deadline);
  if (service == nullptr) {
    return UnavailableError("nobody listens at loopback://" + name + " in this process [SMB-E114]");
  }
  auto [ours, theirs] = NewLoopbackChannel();
  service->Serve(std::move(theirs));
  return std::move(ours);
}

class LoopbackListener : public Listener {
 public:
  LoopbackListener(std::string name, std::shared_ptr<MessageService> service)
      : name_(std::move(name)), service_(std::move(service)) {}
  ~LoopbackListener() override {
    Names::Get()->Remove(name_);
    service_->Stop();
  }

  std::string address() const override { return "loopback://" + name_; }

 private:
  const std::string name_;
  const std::shared_ptr<MessageService> service_;
};

}  // namespace

Result<std::unique_ptr<Listener>> LoopbackTransport::Listen(const Address& address,
                                                            RequestHandler* handler) {
  auto service = std::make_shared<MessageService>(handler);
  if (!Names::Get()->Add(address.target, service)) {
    return AlreadyExistsError("a server of this process already listens at " +
                              address.ToString() + " [SMB-E109]");
  }
  return std::unique_ptr<Listener>(new LoopbackListener(address.target, std::move(service)));
}

Result<std::unique_ptr<Connection>> LoopbackTransport::Connect(const Address& address,
                                                               const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(Dial(address.target, deadline).status());
  return std::unique_ptr<Connection>(new MessageConnection(DialerTo(address.target)));
}

Dialer LoopbackTransport::DialerTo(const std::string& name) {
  // What waits for a server to appear is Connect.
  return [name](const Deadline&) { return Dial(name, Deadline::After(0)); };
}

}  // namespace tf_smb
