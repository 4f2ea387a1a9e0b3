// MessageSession: the server's end of one channel. Decodes requests, runs them on the
// segments, and answers for the members that joined over it.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_SESSION_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_SESSION_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/box/segment.h"
#include "cc/box/segment_data.h"
#include "cc/common/mutex.h"
#include "cc/common/status.h"
#include "cc/transport/message/channel.h"
#include "cc/transport/transport.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {

// What the clients of one service were granted, by numbers that differ between services:
// one of a server that is no more means nothing to its successor. Thread-safe.
class Attachments {
 public:
  Attachments();

  uint64_t service() const { return service_; }
  uint64_t Add(std::shared_ptr<Segment> segment) EXCLUDES(mutex_);
  void Remove(uint64_t attachment) EXCLUDES(mutex_);
  // UNAVAILABLE if the channel that it was granted on is closed.
  Result<std::shared_ptr<Segment>> Find(uint64_t attachment) EXCLUDES(mutex_);

 private:
  const uint64_t service_;
  Mutex mutex_;
  uint64_t next_ GUARDED_BY(mutex_);
  std::map<uint64_t, std::shared_ptr<Segment>> segments_ GUARDED_BY(mutex_);
};

// All of one session on one thread, from construction to destruction: the members'
// mutexes belong to it.
class MessageSession {
 public:
  // All must outlive the session. `stopping` ends what waits.
  MessageSession(RequestHandler* handler, Attachments* attachments,
                 const std::atomic<bool>* stopping)
      : handler_(handler), attachments_(attachments), stopping_(stopping) {}
  // Members that did not leave are dead to the others.
  ~MessageSession();
  MessageSession(const MessageSession&) = delete;
  MessageSession& operator=(const MessageSession&) = delete;

  // Until the channel is closed.
  void Run(Channel* channel);
  // The reply to one message, whatever it is.
  std::string Answer(std::string_view message);

 private:
  std::string AnswerWhole(std::string_view message);
  Result<std::string> GrantSegment(std::shared_ptr<Segment> segment, bool created);

  std::string AnswerControl(std::string_view message);
  Status Control(const ControlRequest& request, Segment* segment, ControlReply* reply);
  Status MemberCall(const ControlRequest& request, Segment* segment, const MemberId& member,
                    ControlReply* reply);
  Status Join(const ControlRequest& request, Segment* segment, ControlReply* reply);
  void Wait(const ControlRequest& request, Segment* segment, ControlReply* reply) const;
  Result<MemberId> FindMember(const ControlRequest& request) const;

  std::string AnswerData(std::string_view message);
  Status Data(const DataRequest& request, Segment* segment, DataReply* reply);
  Status Read(const DataRequest& request, Segment* segment);
  Status Write(const DataRequest& request, Segment* segment);
  Status Update(const DataRequest& request, Segment* segment, DataReply* reply);
  Status Axpy(const DataRequest& request, Segment* segment);
  // Runs attempt(seconds) until it returns true, the time is over or the service stops.
  template <typename Attempt>
  void Retry(double timeout_s, const Attempt& attempt) const;

  RequestHandler* const handler_;
  Attachments* const attachments_;
  const std::atomic<bool>* const stopping_;
  std::map<uint64_t, std::shared_ptr<Segment>> granted_;  // by attachment
  // By attachment and incarnation: of members that joined here and did not leave.
  std::map<std::pair<uint64_t, uint64_t>, MemberId> members_;
  std::string values_;  // of the reply that is being made
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_SESSION_H_
