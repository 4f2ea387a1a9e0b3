// Frames and a descriptor over an abstract Unix socket, between processes of one
// user.
#ifndef TF_SMB_CC_TRANSPORT_SHM_UNIX_SOCKET_H_
#define TF_SMB_CC_TRANSPORT_SHM_UNIX_SOCKET_H_

#include <string>
#include <string_view>

#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/common/unique_fd.h"

namespace tf_smb {

// The socket of `name` belongs to the calling user: two users may use one name.
Result<UniqueFd> ListenUnix(const std::string& name);
// Tries until the deadline while nobody listens there.
Result<UniqueFd> ConnectUnix(const std::string& name, const Deadline& deadline);
// PERMISSION_DENIED unless the peer runs as this process's user.
Status CheckPeerUser(int socket);

// Writes u32 length and bytes, with `fd` (or none: -1) beside the first byte.
Status SendFrame(int socket, std::string_view bytes, int fd, const Deadline& deadline);

struct Frame {
  std::string bytes;
  UniqueFd fd;
};
// UNAVAILABLE at end of file.
Result<Frame> ReceiveFrame(int socket, const Deadline& deadline);

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_SHM_UNIX_SOCKET_H_
