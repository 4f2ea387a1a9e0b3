// The transport over real sockets: peers that stop, lie, leave or are somebody else.
#include "cc/transport/shm/shm_transport.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/server/server.h"
#include "cc/transport/shm/unix_socket.h"
#include "cc/wire/coding.h"

namespace tf_smb {
namespace {

constexpr double kLongSeconds = 60.0;

Deadline Long() { return Deadline::After(kLongSeconds); }

std::string UniqueName() {
  static int count = 0;
  return "shm_transport_test-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

size_t OpenDescriptors() {
  size_t count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

bool WaitUntil(const std::function<bool()>& condition) {
  const Deadline deadline = Long();
  while (!condition()) {
    if (deadline.Expired()) return false;
    usleep(1000);
  }
  return true;
}

std::unique_ptr<Server> StartServer(const std::string& name) {
  Result<std::unique_ptr<Server>> server = Server::Start({"shm://" + name, 10.0, ""});
  EXPECT_TRUE(server.ok()) << server.status().message();
  return std::move(server).value();
}

std::unique_ptr<Connection> Connect(const std::string& name) {
  Result<std::unique_ptr<Connection>> connection = ShmTransport().Connect({"shm", name}, Long());
  EXPECT_TRUE(connection.ok()) << connection.status().message();
  return std::move(connection).value();
}

UniqueFd RawConnect(const std::string& name) {
  Result<UniqueFd> socket = ConnectUnix(name, Long());
  EXPECT_TRUE(socket.ok()) << socket.status().message();
  return std::move(socket).value();
}

OpenRequest OpenOf(int64_t size = 5) {
  Variable variable;
  variable.name = "w";
  variable.shape = {size};
  OpenRequest request;
  request.segment_name = "run/0";
  request.job_id = "job";
  request.layout = *Layout::Create({variable});
  return request;
}

Request ListRequest() { return Request(); }

void Send(const UniqueFd& socket, std::string_view bytes) {
  ASSERT_EQ(send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
}

pid_t Spawn(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  _exit(body());
}

int WaitExit(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// The socket of `name`, of whichever user, without the library's checks.
sockaddr_un AddressOf(const std::string& name, uid_t user, socklen_t* size) {
  const std::string path = "tf_smb/" + std::to_string(user) + "/" + name;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, path.data(), path.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + path.size());
  return address;
}

// --- Frames ----------------------------------------------------------------------

class SocketPair {
 public:
  SocketPair() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    a = UniqueFd(ends[0]);
    b = UniqueFd(ends[1]);
  }
  UniqueFd a, b;
};

TEST(FrameTest, RoundTripsWithAndWithoutDescriptor) {
  for (const size_t size : {0u, 1u, 3u, 1u << 20}) {
    SocketPair pair;
    const std::string sent(size, 'x');
    std::thread sender([&] {
      EXPECT_TRUE(SendFrame(pair.a.get(), sent, -1, Long()).ok());
      EXPECT_TRUE(SendFrame(pair.a.get(), sent, pair.a.get(), Long()).ok());
    });
    const Result<Frame> without = ReceiveFrame(pair.b.get(), Long());
    const Result<Frame> with = ReceiveFrame(pair.b.get(), Long());
    sender.join();
    ASSERT_TRUE(without.ok() && with.ok());
    EXPECT_EQ(without->bytes, sent);
    EXPECT_FALSE(without->fd.valid());
    EXPECT_EQ(with->bytes, sent);
    EXPECT_TRUE(with->fd.valid());
    EXPECT_EQ(fcntl(with->fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
}

TEST(FrameTest, HugeFramesAreRefusedUnreadAndUnsent) {
  SocketPair pair;
  Send(pair.a, std::string("\x01\x00\x00\x04", 4));  // 64 MiB and one byte
  EXPECT_EQ(ReceiveFrame(pair.b.get(), Long()).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(SendFrame(pair.a.get(), std::string(kMaxFrameBytes + 1, 'x'), -1, Long()).code(),
            StatusCode::kInvalidArgument);
}

TEST(FrameTest, EndOfFileAndSilence) {
  SocketPair pair;
  Send(pair.a, std::string("\x08\x00\x00\x00half", 8));
  EXPECT_EQ(ReceiveFrame(pair.b.get(), Deadline::After(0.02)).status().code(),
            StatusCode::kDeadlineExceeded);
  Send(pair.a, std::string("\x08\x00\x00\x00half", 8));
  pair.a.Reset();
  EXPECT_EQ(ReceiveFrame(pair.b.get(), Long()).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(SendFrame(pair.b.get(), "x", -1, Long()).code(), StatusCode::kUnavailable);
}

TEST(FrameTest, FullPeerIsADeadlineNotAHang) {
  SocketPair pair;  // blocking: each call must not
  const std::string big(32u << 20, 'x');
  EXPECT_EQ(SendFrame(pair.a.get(), big, -1, Deadline::After(0.05)).code(),
            StatusCode::kDeadlineExceeded);
}

// --- Requests --------------------------------------------------------------------

TEST(ShmTransportTest, OpenAttachListFree) {
  const std::string name = UniqueName();
  const std::unique_ptr<Server> server = StartServer(name);
  const std::unique_ptr<Connection> connection = Connect(name);
  bool created = false;
  Result<std::unique_ptr<SegmentLink>> first = connection->Open(OpenOf(), &created, Long());
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_TRUE(created);
  Result<std::unique_ptr<SegmentLink>> second =
      Connect(name)->Open(OpenOf(), &created, Long());  // its connection closes at once
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE(created);
  const Result<std::unique_ptr<SegmentLink>> third = connection->Attach("run/0", Long());
  ASSERT_TRUE(third.ok());

  std::vector<float> values = {1, 2, 3, 4, 5}, read(5);
  ASSERT_TRUE((*first)->Write({{0, 0, 5, values.data()}}, Long(), nullptr).ok());
  ASSERT_TRUE((*second)->Read({{0, 0, 5, read.data()}}, Long(), nullptr).ok());
  EXPECT_EQ(read, values);
  const Result<std::vector<SegmentSummary>> list = connection->List(Long());
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->size(), 1u);
  EXPECT_EQ(list->at(0).name, "run/0");
  EXPECT_TRUE(connection->Free("run/0", Long()).ok());
  EXPECT_EQ(connection->Attach("run/0", Long()).status().code(), StatusCode::kNotFound);
}

TEST(ShmTransportTest, SegmentOutlivesItsServer) {
  const std::string name = UniqueName();
  std::unique_ptr<Server> server = StartServer(name);
  const std::unique_ptr<Connection> connection = Connect(name);
  bool created;
  std::unique_ptr<SegmentLink> link =
      std::move(connection->Open(OpenOf(), &created, Long())).value();
  server.reset();
  EXPECT_EQ(connection->List(Long()).status().code(), StatusCode::kUnavailable);
  std::vector<float> values = {1, 2, 3, 4, 5}, read(5);
  EXPECT_TRUE(link->Write({{0, 0, 5, values.data()}}, Long(), nullptr).ok());
  EXPECT_TRUE(link->Read({{0, 0, 5, read.data()}}, Long(), nullptr).ok());
  EXPECT_EQ(read, values);
}

TEST(ShmTransportTest, ConnectsAgainToANewServer) {
  const std::string name = UniqueName();
  std::unique_ptr<Server> server = StartServer(name);
  const std::unique_ptr<Connection> connection = Connect(name);
  ASSERT_TRUE(connection->List(Long()).ok());
  server.reset();
  EXPECT_EQ(connection->List(Long()).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(connection->List(Long()).status().code(), StatusCode::kUnavailable);  // at once
  server = StartServer(name);
  EXPECT_TRUE(connection->List(Long()).ok());
}

TEST(ShmTransportTest, NobodyThereIsUnavailableAtTheDeadline) {
  const std::string name = UniqueName();
  for (const double seconds : {0.0, 0.05}) {
    const Status status =
        ShmTransport().Connect({"shm", name}, Deadline::After(seconds)).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_NE(status.message().find("shm://" + name), std::string::npos);
  }
}

TEST(ShmTransportTest, WaitsForAServerToAppear) {
  const std::string name = UniqueName();
  std::unique_ptr<Server> server;
  std::thread starter([&] {
    usleep(50'000);
    server = StartServer(name);
  });
  EXPECT_TRUE(ShmTransport().Connect({"shm", name}, Long()).ok());
  starter.join();
}

// A server that does not accept any more, with its queue full.
TEST(ShmTransportTest, StoppedServerIsADeadlineNotAHang) {
  const std::string name = UniqueName();
  socklen_t size;
  const sockaddr_un address = AddressOf(name, geteuid(), &size);
  const UniqueFd stopped(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(bind(stopped.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(stopped.get(), 0), 0);
  std::vector<UniqueFd> queue;
  Status status;
  for (int i = 0; i < 10 && status.ok(); ++i) {
    Result<UniqueFd> socket = ConnectUnix(name, Deadline::After(0.05));
    status = socket.status();
    if (socket.ok()) queue.push_back(std::move(socket).value());
  }
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  ASSERT_FALSE(queue.empty());
}

TEST(ShmTransportTest, LateReplyIsNotTakenForTheNextOne) {
  const std::string name = UniqueName();
  const UniqueFd listener = std::move(ListenUnix(name)).value();
  const auto accept_one = [&] {
    UniqueFd accepted;
    EXPECT_TRUE(WaitUntil([&] {
      accepted = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      return accepted.valid();
    }));
    return accepted;
  };
  const std::unique_ptr<Connection> connection = Connect(name);
  const UniqueFd first = accept_one();
  EXPECT_EQ(connection->List(Deadline::After(0.02)).status().code(),
            StatusCode::kDeadlineExceeded);
  std::thread server([&] {
    const UniqueFd second = accept_one();
    EXPECT_TRUE(ReceiveFrame(second.get(), Long()).ok());
    Reply reply;
    reply.segments = {{"right", "job", 1, 0}};
    EXPECT_TRUE(SendFrame(second.get(), EncodeReply(reply), -1, Long()).ok());
  });
  Reply late;
  late.segments = {{"late", "job", 1, 0}};
  static_cast<void>(SendFrame(first.get(), EncodeReply(late), -1, Long()));
  const Result<std::vector<SegmentSummary>> list = connection->List(Long());
  server.join();
  ASSERT_TRUE(list.ok()) << list.status().message();
  EXPECT_EQ(list->at(0).name, "right");
}

TEST(ShmTransportTest, ReplyWithoutASegmentIsDataLoss) {
  const std::string name = UniqueName();
  const UniqueFd listener = std::move(ListenUnix(name)).value();
  const std::unique_ptr<Connection> connection = Connect(name);
  std::thread server([&] {
    UniqueFd accepted;
    EXPECT_TRUE(WaitUntil([&] {
      accepted = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      return accepted.valid();
    }));
    EXPECT_TRUE(ReceiveFrame(accepted.get(), Long()).ok());
    EXPECT_TRUE(SendFrame(accepted.get(), EncodeReply(Reply()), -1, Long()).ok());
    EXPECT_TRUE(ReceiveFrame(accepted.get(), Long()).ok());
    const UniqueFd no_segment(open("/dev/null", O_RDONLY | O_CLOEXEC));
    EXPECT_TRUE(SendFrame(accepted.get(), EncodeReply(Reply()), no_segment.get(), Long()).ok());
  });
  EXPECT_EQ(connection->Attach("x", Long()).status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(connection->Attach("x", Long()).status().code(), StatusCode::kDataLoss);
  server.join();
}

// --- Peers that misbehave --------------------------------------------------------

TEST(HostilePeerTest, OneThatStopsInTheMiddleHoldsUpNobody) {
  const std::string name = UniqueName();
  std::unique_ptr<Server> server = StartServer(name);
  std::vector<UniqueFd> stalled;
  for (const std::string& part : {std::string(), std::string("\x05", 1),
                                  std::string("\x05\x00\x00\x00", 4),
                                  std::string("\x05\x00\x00\x00 ab", 7)}) {
    stalled.push_back(RawConnect(name));
    Send(stalled.back(), part);
  }
  const int64_t before = MonotonicNanos();
  EXPECT_TRUE(Connect(name)->List(Long()).ok());
  server.reset();  // nor the server's end: less than what a message may take
  EXPECT_LT(MonotonicNanos() - before, 8 * kNanosPerSecond);
}

TEST(HostilePeerTest, HugeFrameEndsItsConnectionOnly) {
  const std::string name = UniqueName();
  const std::unique_ptr<Server> server = StartServer(name);
  const UniqueFd hostile = RawConnect(name);
  Send(hostile, "\xff\xff\xff\xff");
  EXPECT_EQ(ReceiveFrame(hostile.get(), Long()).status().code(), StatusCode::kUnavailable);
  EXPECT_TRUE(Connect(name)->List(Long()).ok());
}

TEST(HostilePeerTest, NonsenseIsAnsweredWithASentence) {
  const std::string name = UniqueName();
  const std::unique_ptr<Server> server = StartServer(name);
  const UniqueFd peer = RawConnect(name);
  std::string newer = EncodeRequest(ListRequest());
  newer[0] = 9;
  const std::pair<std::string, StatusCode> messages[] = {
      {"", StatusCode::kDataLoss},
      {"nonsense", StatusCode::kDataLoss},
      {newer, StatusCode::kFailedPrecondition},
      {EncodeReply(Reply()), StatusCode::kDataLoss},
      {EncodeRequest(ListRequest()), StatusCode::kOk}};
  for (const auto& [bytes, code] : messages) {
    ASSERT_TRUE(SendFrame(peer.get(), bytes, -1, Long()).ok());
    const Result<Frame> frame = ReceiveFrame(peer.get(), Long());
    ASSERT_TRUE(frame.ok()) << frame.status().message();
    const Result<Reply> reply = DecodeReply(frame->bytes);
    ASSERT_TRUE(reply.ok());
    EXPECT_EQ(reply->status.code(), code) << reply->status.message();
    EXPECT_EQ(reply->status.ok(), reply->status.message().empty());
  }
}

TEST(HostilePeerTest, DescriptorsSentUnaskedAreClosed) {
  const std::string name = UniqueName();
  const std::unique_ptr<Server> server = StartServer(name);
  const UniqueFd peer = RawConnect(name);
  ASSERT_TRUE(SendFrame(peer.get(), EncodeRequest(ListRequest()), -1, Long()).ok());
  ASSERT_TRUE(ReceiveFrame(peer.get(), Long()).ok());
  const size_t before = OpenDescriptors();
  for (int i = 0; i < 10; ++i) {
    Encoder length;
    const std::string request = EncodeRequest(ListRequest());
    length.PutU32(static_cast<uint32_t>(request.size()));
    std::string bytes = length.bytes() + request;
    iovec part = {bytes.data(), bytes.size()};
    const int descriptors[2] = {peer.get(), peer.get()};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(descriptors))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(descriptors));
    std::memcpy(CMSG_DATA(header), descriptors, sizeof(descriptors));
    ASSERT_EQ(sendmsg(peer.get(), &message, MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
    ASSERT_TRUE(ReceiveFrame(peer.get(), Long()).ok());
  }
  EXPECT_TRUE(WaitUntil([&] { return OpenDescriptors() == before; })) << OpenDescriptors();
}

TEST(HostilePeerTest, ClientsThatGoLeaveNoDescriptors) {
  const std::string name = UniqueName();
  const std::unique_ptr<Server> server = StartServer(name);
  const size_t before = OpenDescriptors();
  {
    std::vector<std::unique_ptr<Connection>> connections;
    for (int i = 0; i < 20; ++i) {
      connections.push_back(Connect(name));
      ASSERT_TRUE(connections.back()->List(Long()).ok());
    }
  }
  EXPECT_TRUE(WaitUntil([&] { return OpenDescriptors() == before; })) << OpenDescriptors();
}

// Real processes that are killed while they are connected and attached.
TEST(HostilePeerTest, KilledClientsLeaveNothingBehind) {
  const std::string name = UniqueName();
  std::vector<pid_t> children;
  for (int i = 0; i < 3; ++i) {  // before there are threads
    children.push_back(Spawn([&] {
      const std::unique_ptr<Connection> connection = Connect(name);
      bool created;
      Result<std::unique_ptr<SegmentLink>> link = connection->Open(OpenOf(), &created, Long());
      if (!link.ok() || !(*link)->control()->Join(std::nullopt).ok()) return 1;
      for (;;) pause();
    }));
  }
  const std::unique_ptr<Server> server = StartServer(name);
  ASSERT_TRUE(WaitUntil([&] {
    const std::vector<SegmentSummary> segments = server->List();
    return !segments.empty() && segments[0].live_members == 3;
  }));
  const size_t with_clients = OpenDescriptors();
  for (const pid_t child : children) {
    kill(child, SIGKILL);
    EXPECT_EQ(WaitExit(child), -SIGKILL);
  }
  EXPECT_EQ(server->List().at(0).live_members, 0u);  // the lease has 10 s to go
  EXPECT_TRUE(WaitUntil([&] { return OpenDescriptors() == with_clients - 3; }))
      << OpenDescriptors() << " of " << with_clients;
}

TEST(HostilePeerTest, AnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "to be another user, it takes root";
  constexpr uid_t kNobody = 65534;
  constexpr int kNoOtherUser = 77;
  const uid_t user = geteuid();
  const std::string servers = UniqueName(), squatters = UniqueName();
  int ready[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  const pid_t stranger = Spawn([&] {
    if (setresuid(kNobody, kNobody, kNobody) != 0) return kNoOtherUser;
    socklen_t size;
    // A server in our name.
    sockaddr_un address = AddressOf(squatters, user, &size);
    const UniqueFd listening(socket(AF_UNIX, SOCK_STREAM, 0));
    if (bind(listening.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) return 2;
    if (listen(listening.get(), 5) != 0 || write(ready[1], "x", 1) != 1) return 3;
    // A client of ours.
    address = AddressOf(servers, user, &size);
    const UniqueFd client(socket(AF_UNIX, SOCK_STREAM, 0));
    if (!WaitUntil([&] {
          return connect(client.get(), reinterpret_cast<sockaddr*>(&address), size) == 0;
        })) {
      return 4;
    }
    static_cast<void>(SendFrame(client.get(), EncodeRequest(ListRequest()), -1, Long()));
    const StatusCode code = ReceiveFrame(client.get(), Long()).status().code();
    return code == StatusCode::kUnavailable ? 0 : 5;  // closed without an answer
  });
  close(ready[1]);
  char byte;
  if (read(ready[0], &byte, 1) != 1) {
    ASSERT_EQ(WaitExit(stranger), kNoOtherUser);
    GTEST_SKIP() << "this user namespace has no other user";
  }
  const Status status = ShmTransport().Connect({"shm", squatters}, Long()).status();
  EXPECT_EQ(status.code(), StatusCode::kPermissionDenied);
  EXPECT_NE(status.message().find("user 65534"), std::string::npos);
  const std::unique_ptr<Server> server = StartServer(servers);
  EXPECT_EQ(WaitExit(stranger), 0);
  EXPECT_TRUE(Connect(servers)->List(Long()).ok());
  close(ready[0]);
}

TEST(ShmTransportTest, ManyClientsAtOnce) {
  const std::string name = UniqueName();
  const std::unique_ptr<Server> server = StartServer(name);
  std::atomic<int> created_count{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      const std::unique_ptr<Connection> connection = Connect(name);
      for (int i = 0; i < 10; ++i) {
        bool created = false;
        Result<std::unique_ptr<SegmentLink>> link = connection->Open(OpenOf(), &created, Long());
        EXPECT_TRUE(link.ok()) << link.status().message();
        created_count.fetch_add(created ? 1 : 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(created_count.load(), 1);
}

}  // namespace
}  // namespace tf_smb
