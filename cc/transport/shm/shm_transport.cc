#include "cc/transport/shm/shm_transport.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <list>
#include <system_error>
#include <thread>
#include <utility>

#include "cc/box/segment_data.h"
#include "cc/common/mutex.h"
#include "cc/transport/shm/unix_socket.h"

namespace tf_smb {
namespace {

// How long a peer may take over one message once it began it.
constexpr double kMessageSeconds = 10.0;

// Memory is memory: nothing to be done.
class ShmMemoryRegion : public MemoryRegion {
 public:
  ShmMemoryRegion(void* data, uint64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  void* data() const override { return data_; }
  uint64_t size_bytes() const override { return size_bytes_; }

 private:
  void* const data_;
  const uint64_t size_bytes_;
};

class ShmSegmentLink : public SegmentLink {
 public:
  ShmSegmentLink(std::string server, std::unique_ptr<Segment> segment)
      : server_(std::move(server)), segment_(std::move(segment)) {}

  SegmentControl* control() override { return segment_.get(); }
  Status Read(const std::vector<Span>& spans, const Deadline& deadline,
              ThreadPool* pool) override {
    return ReadCenter(segment_.get(), spans, deadline, pool);
  }
  Status Write(const std::vector<ConstSpan>& spans, const Deadline& deadline,
               ThreadPool* pool) override {
    return WriteCenter(segment_.get(), spans, deadline, pool);
  }
  Result<UpdateReport> Update(const UpdateRequest& request, ThreadPool* pool) override {
    return UpdateCenter(segment_.get(), request, pool);
  }
  Status Axpy(double scale, SegmentLink* source, const Deadline& deadline) override {
    auto* const other = dynamic_cast<ShmSegmentLink*>(source);
    if (other == nullptr || other->server_ != server_) {
      return InvalidArgumentError("segment '" + source->control()->name() +
                                  "' is not of shm://" + server_ + ", as '" + segment_->name() +
                                  "' is: both must be of one server [SMB-E122]");
    }
    return tf_smb::Axpy(segment_.get(), scale, other->segment_.get(), deadline);
  }

 private:
  const std::string server_;
  const std::unique_ptr<Segment> segment_;
};

class ShmConnection : public Connection {
 public:
  ShmConnection(std::string name, UniqueFd socket)
      : name_(std::move(name)), socket_(std::move(socket)) {}

  Result<std::unique_ptr<SegmentLink>> Open(const OpenRequest& open, bool* created,
                                            const Deadline& deadline) override {
    Request request;
    request.type = MessageType::kOpen;
    request.open = open;
    UniqueFd fd;
    TF_SMB_ASSIGN_OR_RETURN(const Reply reply, Call(request, &fd, deadline));
    *created = reply.created;
    return MakeLink(std::move(fd));
  }
  Result<std::unique_ptr<SegmentLink>> Attach(const std::string& segment_name,
                                              const Deadline& deadline) override {
    Request request;
    request.type = MessageType::kAttach;
    request.segment_name = segment_name;
    UniqueFd fd;
    TF_SMB_ASSIGN_OR_RETURN(const Reply reply, Call(request, &fd, deadline));
    return MakeLink(std::move(fd));
  }
  Status Free(const std::string& segment_name, const Deadline& deadline) override {
    Request request;
    request.type = MessageType::kFree;
    request.segment_name = segment_name;
    UniqueFd fd;
    return Call(request, &fd, deadline).status();
  }
  Result<std::vector<SegmentSummary>> List(const Deadline& deadline) override {
    Request request;
    request.type = MessageType::kList;
    UniqueFd fd;
    TF_SMB_ASSIGN_OR_RETURN(Reply reply, Call(request, &fd, deadline));
    return std::move(reply.segments);
  }
  Result<std::unique_ptr<MemoryRegion>> Register(void* data, uint64_t size_bytes) override {
    return std::unique_ptr<MemoryRegion>(new ShmMemoryRegion(data, size_bytes));
  }

 private:
  Result<std::unique_ptr<SegmentLink>> MakeLink(UniqueFd fd) const {
    if (!fd.valid()) return DataLossError("the server's reply came without a segment [SMB-E120]");
    TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Segment> segment, Segment::Map(std::move(fd)));
    return std::unique_ptr<SegmentLink>(new ShmSegmentLink(name_, std::move(segment)));
  }

  Result<Reply> Call(const Request& request, UniqueFd* fd, const Deadline& deadline)
      EXCLUDES(mutex_) {
    MutexLock lock(&mutex_);
    if (!socket_.valid()) {
      // One try: whoever wants to wait for a new server connects anew.
      TF_SMB_ASSIGN_OR_RETURN(socket_, ConnectUnix(name_, Deadline::After(0)));
    }
    Result<Frame> frame = SendAndReceive(request, deadline);
    if (!frame.ok()) {
      // A reply that comes after all would be taken for the next request's.
      socket_.Reset();
      return frame.status();
    }
    TF_SMB_ASSIGN_OR_RETURN(Reply reply, DecodeReply(frame->bytes));
    TF_SMB_RETURN_IF_ERROR(reply.status);
    *fd = std::move(frame->fd);
    return reply;
  }

  Result<Frame> SendAndReceive(const Request& request, const Deadline& deadline)
      REQUIRES(mutex_) {
    TF_SMB_RETURN_IF_ERROR(SendFrame(socket_.get(), EncodeRequest(request), -1, deadline));
    return ReceiveFrame(socket_.get(), deadline);
  }

  const std::string name_;
  Mutex mutex_;  // one request at a time on the socket
  UniqueFd socket_ GUARDED_BY(mutex_);  // not valid after a failure: connects again
};

// One thread accepts; one thread a client answers it, so that a client which stops
// in the middle of a message holds up nobody else.
class ShmListener : public Listener {
 public:
  ShmListener(std::string name, UniqueFd socket, UniqueFd stop_event, UniqueFd done_event,
              RequestHandler* handler)
      : name_(std::move(name)),
        socket_(std::move(socket)),
        stop_event_(std::move(stop_event)),
        done_event_(std::move(done_event)),
        handler_(handler),
        accept_thread_([this] { AcceptLoop(); }) {}

  ~ShmListener() override {
    stopping_.store(true);
    Signal(stop_event_);  // stays readable, for all threads
    accept_thread_.join();
    for (Client& client : clients_) {
      shutdown(client.socket.get(), SHUT_RDWR);  // it may be in the middle of a message
      client.thread.join();
    }
  }

  std::string address() const override { return "shm://" + name_; }

 private:
  struct Client {
    UniqueFd socket;
    std::atomic<bool> done{false};
    std::thread thread;
  };

  static void Signal(const UniqueFd& event) {
    const uint64_t one = 1;
    const ssize_t written = write(event.get(), &one, sizeof(one));  // fails only at overflow
    static_cast<void>(written);
  }

  // True when `fd` has something to read, false when the listener stops.
  bool WaitReadable(int fd) const {
    while (!stopping_.load()) {
      pollfd entries[2] = {{fd, POLLIN, 0}, {stop_event_.get(), POLLIN, 0}};
      if (poll(entries, 2, -1) < 0 && errno != EINTR) return false;
      if (entries[0].revents != 0) return true;
    }
    return false;
  }

  void AcceptLoop() {
    while (!stopping_.load()) {
      pollfd entries[3] = {{socket_.get(), POLLIN, 0},
                           {stop_event_.get(), POLLIN, 0},
                           {done_event_.get(), POLLIN, 0}};
      if (poll(entries, 3, -1) < 0 && errno != EINTR) return;
      if (entries[2].revents != 0) JoinDoneClients();
      if (entries[0].revents != 0) Accept();
    }
  }

  void Accept() {
    UniqueFd accepted(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!accepted.valid()) {
      // Out of descriptors, or the peer gave up: neither goes away by spinning.
      poll(nullptr, 0, 10);
      return;
    }
    if (!CheckPeerUser(accepted.get()).ok()) return;
    Client& client = clients_.emplace_back();
    client.socket = std::move(accepted);
    try {
      client.thread = std::thread([this, &client] { Serve(&client); });
    } catch (const std::system_error&) {
      clients_.pop_back();  // out of threads: the client sees its connection close
    }
  }

  void JoinDoneClients() {
    uint64_t count;
    const ssize_t got = read(done_event_.get(), &count, sizeof(count));
    static_cast<void>(got);
    for (auto client = clients_.begin(); client != clients_.end();) {
      if (!client->done.load()) {
        ++client;
        continue;
      }
      client->thread.join();
      client = clients_.erase(client);
    }
  }

  void Serve(Client* client) {
    while (WaitReadable(client->socket.get())) {
      if (!ServeOne(client->socket.get()).ok()) break;
    }
    shutdown(client->socket.get(), SHUT_RDWR);
    client->done.store(true);
    Signal(done_event_);
  }

  Status ServeOne(int socket) {
    TF_SMB_ASSIGN_OR_RETURN(const Frame frame,
                            ReceiveFrame(socket, Deadline::After(kMessageSeconds)));
    const Result<Request> request = DecodeRequest(frame.bytes);
    HandledRequest handled;
    if (request.ok()) {
      handled = handler_->Handle(*request);
    } else {
      handled.reply.status = request.status();
    }
    const int fd = handled.segment == nullptr ? -1 : handled.segment->fd();
    return SendFrame(socket, EncodeReply(handled.reply), fd, Deadline::After(kMessageSeconds));
  }

  const std::string name_;
  const UniqueFd socket_;
  const UniqueFd stop_event_;
  const UniqueFd done_event_;  // some client's thread has ended
  RequestHandler* const handler_;
  std::atomic<bool> stopping_{false};
  std::list<Client> clients_;  // owned by the accept thread until it is joined
  std::thread accept_thread_;  // last: it uses all of the above
};

}  // namespace

Viability ShmTransport::IsViable() const {
  const UniqueFd probe(memfd_create("tf_smb_probe", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (probe.valid()) return {true, ""};
  return {false, std::string("memfd_create: ") + std::strerror(errno)};
}

Capabilities ShmTransport::capabilities() const {
  Capabilities capabilities;
  capabilities.shared_memory = true;
  capabilities.one_sided_read = true;
  capabilities.one_sided_write = true;
  capabilities.registration = true;
  return capabilities;
}

Result<std::unique_ptr<Listener>> ShmTransport::Listen(const Address& address,
                                                       RequestHandler* handler) {
  UniqueFd stop_event(eventfd(0, EFD_CLOEXEC));
  UniqueFd done_event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_event.valid() || !done_event.valid()) return ErrnoError(errno, "eventfd", "[SMB-E121]");
  TF_SMB_ASSIGN_OR_RETURN(UniqueFd socket, ListenUnix(address.target));
  return std::unique_ptr<Listener>(
      new ShmListener(address.target, std::move(socket), std::move(stop_event),
                      std::move(done_event), handler));
}

Result<std::unique_ptr<Connection>> ShmTransport::Connect(const Address& address,
                                                          const Deadline& deadline) {
  TF_SMB_ASSIGN_OR_RETURN(UniqueFd socket, ConnectUnix(address.target, deadline));
  return std::unique_ptr<Connection>(new ShmConnection(address.target, std::move(socket)));
}

}  // namespace tf_smb
