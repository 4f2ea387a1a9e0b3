// Lanes: a link's channels to its server. Calls that may take long go over lanes of their
// own, so that a renewal of the lease waits for none of them.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_LANE_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_LANE_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cc/common/clock.h"
#include "cc/common/mutex.h"
#include "cc/common/status.h"
#include "cc/transport/message/channel.h"
#include "cc/wire/messages.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {

// What a request without a deadline of its own may take; the server answers at once.
constexpr double kCallSeconds = 10.0;
// A request that the server waits with until a deadline is given so much longer to come
// back: the server's answer says more than silence.
constexpr double kGraceSeconds = 1.0;

// Used by one thread at a time.
class Lane {
 public:
  explicit Lane(std::unique_ptr<Channel> channel) : channel_(std::move(channel)) {}
  ~Lane() { Close(); }

  uint64_t NextSequence() { return ++sequence_; }
  // False once no reply can be told from another's: the lane is of no more use.
  bool usable() const { return usable_; }
  void Close();

  // One request about segments as wholes, and whatever answers it. Not usable after a
  // failure: these replies bear no number.
  Result<std::string> CallForBytes(std::string_view request, const Deadline& deadline);
  // Sets the request's sequence. Usable after a late reply, which is dropped when it comes.
  Result<ControlReply> CallControl(ControlRequest* request, const Deadline& deadline);

  // The halves of a data request, several of which may be under way. The reply's payload
  // lies in `*bytes`.
  Status SendData(const DataRequest& request, const Deadline& deadline);
  Result<DataReply> ReceiveData(uint64_t sequence, const Deadline& deadline, std::string* bytes);

 private:
  Status Send(std::string_view message, const Deadline& deadline);
  Result<std::string> Receive(const Deadline& deadline);
  Status Fail(Status status);

  const std::unique_ptr<Channel> channel_;
  std::deque<std::string> inbox_;
  uint64_t sequence_ = 0;
  bool usable_ = true;
};

// As many lanes as there are calls at one time.
class LanePool {
 public:
  explicit LanePool(Dialer dial) : dial_(std::move(dial)) {}

  Result<std::unique_ptr<Lane>> Take(const Deadline& deadline) EXCLUDES(mutex_);
  void GiveBack(std::unique_ptr<Lane> lane) EXCLUDES(mutex_);

 private:
  const Dialer dial_;
  Mutex mutex_;
  std::vector<std::unique_ptr<Lane>> idle_ GUARDED_BY(mutex_);
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_LANE_H_
