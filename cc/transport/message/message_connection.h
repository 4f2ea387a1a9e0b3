// MessageConnection: the client's side of a transport by messages, over whatever channels
// its dialer makes.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_CONNECTION_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_CONNECTION_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/common/fork_guard.h"
#include "cc/common/mutex.h"
#include "cc/transport/message/channel.h"
#include "cc/transport/message/lane.h"
#include "cc/transport/transport.h"

namespace tf_smb {

// Memory that is sent from and received into as all other memory is.
class PlainMemoryRegion : public MemoryRegion {
 public:
  PlainMemoryRegion(void* data, uint64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  void* data() const override { return data_; }
  uint64_t size_bytes() const override { return size_bytes_; }

 private:
  void* const data_;
  const uint64_t size_bytes_;
};

// Links live on without the connection. After a failure the next call dials anew, once.
class MessageConnection : public Connection {
 public:
  // `dial` is called by links too, from any thread.
  explicit MessageConnection(Dialer dial) : dial_(std::move(dial)) {}
  ~MessageConnection() override;

  Result<std::unique_ptr<SegmentLink>> Open(const OpenRequest& request, bool* created,
                                            const Deadline& deadline) override;
  Result<std::unique_ptr<SegmentLink>> Attach(const std::string& segment_name,
                                              const Deadline& deadline) override;
  Status Free(const std::string& segment_name, const Deadline& deadline) override;
  Result<std::vector<SegmentSummary>> List(const Deadline& deadline) override;
  Result<std::unique_ptr<MemoryRegion>> Register(void* data, uint64_t size_bytes) override;

 private:
  // On a channel of its own, which is the link's from then on.
  Result<std::unique_ptr<SegmentLink>> NewLink(const Request& request, bool* created,
                                               const Deadline& deadline);
  Result<Reply> Call(const Request& request, const Deadline& deadline) EXCLUDES(mutex_);

  const Dialer dial_;
  const ForkGuard fork_guard_;
  Mutex mutex_;  // one request at a time on the lane
  std::unique_ptr<Lane> lane_ GUARDED_BY(mutex_);  // null, or not usable: dials anew
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_CONNECTION_H_
