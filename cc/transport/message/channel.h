// Channel: frames in order between two ends. What a transport by messages has to bring;
// all the rest (message_connection.h, message_service.h) is shared.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_CHANNEL_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_CHANNEL_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "cc/common/clock.h"
#include "cc/common/status.h"

namespace tf_smb {

// One thread sends and receives; Close may be called by any.
//
// UNAVAILABLE once either end is closed, after what arrived before. A call that ends with
// DEADLINE_EXCEEDED in the middle of a frame leaves the channel closed; between frames it
// leaves it as it was.
class Channel {
 public:
  virtual ~Channel() = default;

  // While the peer takes nothing, what arrives is put into `inbox`, unless that is null:
  // so an end that keeps several requests under way never waits for a peer that waits for
  // it. INVALID_ARGUMENT for more than kMaxFrameBytes.
  virtual Status Send(std::string_view frame, const Deadline& deadline,
                      std::deque<std::string>* inbox) = 0;
  // DATA_LOSS, and the channel closed, for a frame that is too long.
  virtual Result<std::string> Receive(const Deadline& deadline) = 0;
  // Wakes both ends.
  virtual void Close() = 0;
};

// Makes a new channel to the server: one try, no waiting for a server to appear.
using Dialer = std::function<Result<std::unique_ptr<Channel>>(const Deadline&)>;

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_CHANNEL_H_
