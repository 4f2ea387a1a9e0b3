// MessageService: the server's side of a transport by messages: a session, and a thread,
// for each channel.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_SERVICE_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_SERVICE_H_

#include <atomic>
#include <list>
#include <memory>
#include <thread>

#include "cc/common/mutex.h"
#include "cc/transport/message/channel.h"
#include "cc/transport/message/message_session.h"
#include "cc/transport/transport.h"

namespace tf_smb {

// Thread-safe.
class MessageService {
 public:
  // `handler` must outlive the service, or Stop.
  explicit MessageService(RequestHandler* handler) : handler_(handler) {}
  ~MessageService() { Stop(); }

  // Until the channel is closed; closes it at once when stopped, or out of threads.
  void Serve(std::unique_ptr<Channel> channel) EXCLUDES(mutex_);
  // Ends all sessions, and waits for them. For good.
  void Stop() EXCLUDES(mutex_);

 private:
  struct Served {
    std::unique_ptr<Channel> channel;
    std::atomic<bool> done{false};
    std::thread thread;
  };

  void RunSession(Served* served);
  void JoinDone() REQUIRES(mutex_);

  RequestHandler* const handler_;
  Attachments attachments_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::list<Served> served_ GUARDED_BY(mutex_);
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_SERVICE_H_
