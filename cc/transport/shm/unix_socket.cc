#include "cc/transport/shm/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "cc/wire/coding.h"
#include "cc/wire/messages.h"

namespace tf_smb {
namespace {

struct UnixAddress {
  sockaddr_un address;
  socklen_t size;
};

// In the abstract name space: nothing is left in a file system when a server dies.
Result<UnixAddress> MakeAddress(const std::string& name) {
  const std::string path = "tf_smb/" + std::to_string(geteuid()) + "/" + name;
  UnixAddress result = {};
  result.address.sun_family = AF_UNIX;
  if (path.size() + 1 > sizeof(result.address.sun_path)) {
    return InvalidArgumentError("the name in shm://" + name + " is longer than " +
                                std::to_string(sizeof(result.address.sun_path) - 1 -
                                               (path.size() - name.size())) +
                                " bytes [SMB-E103]");
  }
  std::memcpy(result.address.sun_path + 1, path.data(), path.size());
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return result;
}

// Not blocking: else connect() would wait as long as a stopped server's queue is full.
UniqueFd NewSocket() {
  return UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Status WaitReady(int socket, short events, const Deadline& deadline) {
  for (;;) {
    pollfd entry = {socket, events, 0};
    const int ready = poll(&entry, 1, deadline.RemainingMillis());
    if (ready > 0) return Status::Ok();
    if (ready < 0 && errno != EINTR) return ErrnoError(errno, "poll", "[SMB-E104]");
    if (deadline.Expired()) {
      return DeadlineExceededError("the server did not answer in time [SMB-E105]");
    }
  }
}

Status ReceiveBytes(int socket, char* data, size_t size, UniqueFd* fd, const Deadline& deadline) {
  size_t done = 0;
  while (done < size) {
    TF_SMB_RETURN_IF_ERROR(WaitReady(socket, POLLIN, deadline));
    iovec part = {data + done, size - done};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    // Not sizeof(control): its padding has room for a second descriptor, to be leaked.
    message.msg_controllen = CMSG_LEN(sizeof(int));
    const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got == 0) return UnavailableError("the peer closed the connection [SMB-E106]");
    if (got < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return ErrnoError(errno, "recvmsg", "[SMB-E107]");
    }
    for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
         header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      int received;
      std::memcpy(&received, CMSG_DATA(header), sizeof(received));
      *fd = UniqueFd(received);
    }
    done += static_cast<size_t>(got);
  }
  return Status::Ok();
}

}  // namespace

Result<UniqueFd> ListenUnix(const std::string& name) {
  TF_SMB_ASSIGN_OR_RETURN(const UnixAddress address, MakeAddress(name));
  UniqueFd socket = NewSocket();
  if (!socket.valid()) return ErrnoError(errno, "socket", "[SMB-E108]");
  if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.address), address.size) != 0) {
    if (errno == EADDRINUSE) {
      return AlreadyExistsError("a server of this user already listens at shm://" + name +
                                " [SMB-E109]");
    }
    return ErrnoError(errno, "cannot listen at shm://" + name, "[SMB-E110]");
  }
  if (listen(socket.get(), SOMAXCONN) != 0) return ErrnoError(errno, "listen", "[SMB-E111]");
  return socket;
}

Result<UniqueFd> ConnectUnix(const std::string& name, const Deadline& deadline) {
  TF_SMB_ASSIGN_OR_RETURN(const UnixAddress address, MakeAddress(name));
  for (;;) {
    UniqueFd socket = NewSocket();
    if (!socket.valid()) return ErrnoError(errno, "socket", "[SMB-E108]");
    if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.address),
                address.size) == 0) {
      TF_SMB_RETURN_IF_ERROR(CheckPeerUser(socket.get()));
      return socket;
    }
    if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
      return ErrnoError(errno, "cannot connect to shm://" + name, "[SMB-E112]");
    }
    if (deadline.Expired()) {
      return UnavailableError("no server of this user listens at shm://" + name +
                              " on this host: is its 'tf-smb run' or 'tf-smb serve' still "
                              "running? [SMB-E113]");
    }
    poll(nullptr, 0, std::min(20, deadline.RemainingMillis()));
  }
}

Status CheckPeerUser(int socket) {
  ucred peer = {};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return ErrnoError(errno, "SO_PEERCRED", "[SMB-E115]");
  }
  if (peer.uid == geteuid()) return Status::Ok();
  return PermissionDeniedError("the peer runs as user " + std::to_string(peer.uid) +
                               ", this process as user " + std::to_string(geteuid()) +
                               " [SMB-E116]");
}

Status SendFrame(int socket, std::string_view bytes, int fd, const Deadline& deadline) {
  if (bytes.size() > kMaxFrameBytes) {
    return InvalidArgumentError("a message of " + std::to_string(bytes.size()) +
                                " bytes is longer than " + std::to_string(kMaxFrameBytes) +
                                ": the model has too many variables [SMB-E117]");
  }
  Encoder encoder;
  encoder.PutU32(static_cast<uint32_t>(bytes.size()));
  std::string frame = std::move(encoder).Release();
  frame.append(bytes);
  size_t done = 0;
  while (done < frame.size()) {
    TF_SMB_RETURN_IF_ERROR(WaitReady(socket, POLLOUT, deadline));
    iovec part = {frame.data() + done, frame.size() - done};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (fd >= 0 && done == 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    const ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR || errno == EAGAIN) continue;
      return ErrnoError(errno, "sendmsg", "[SMB-E118]");
    }
    done += static_cast<size_t>(sent);
  }
  return Status::Ok();
}

Result<Frame> ReceiveFrame(int socket, const Deadline& deadline) {
  Frame frame;
  char length_bytes[4];
  TF_SMB_RETURN_IF_ERROR(
      ReceiveBytes(socket, length_bytes, sizeof(length_bytes), &frame.fd, deadline));
  const uint32_t length = Decoder(std::string_view(length_bytes, 4)).GetU32();
  if (length > kMaxFrameBytes) {
    return DataLossError("a frame says it has " + std::to_string(length) + " bytes, more than " +
                         std::to_string(kMaxFrameBytes) + " [SMB-E119]");
  }
  frame.bytes.resize(length);
  TF_SMB_RETURN_IF_ERROR(
      ReceiveBytes(socket, frame.bytes.data(), length, &frame.fd, deadline));
  return frame;
}

}  // namespace tf_smb
