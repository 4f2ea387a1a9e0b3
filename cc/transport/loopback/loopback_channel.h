// Two queues of byte strings: a channel inside one process.
#ifndef TF_SMB_CC_TRANSPORT_LOOPBACK_LOOPBACK_CHANNEL_H_
#define TF_SMB_CC_TRANSPORT_LOOPBACK_LOOPBACK_CHANNEL_H_

#include <memory>
#include <utility>

#include "cc/transport/message/channel.h"

namespace tf_smb {

// Both ends of a new channel. Each is closed by its destructor.
std::pair<std::unique_ptr<Channel>, std::unique_ptr<Channel>> NewLoopbackChannel();

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_LOOPBACK_LOOPBACK_CHANNEL_H_
