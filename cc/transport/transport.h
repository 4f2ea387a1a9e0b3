// The transport contract: how clients reach the segments of a server, whatever
// lies between them. One implementation a folder; `registry.h` finds them by the
// scheme of an address, and tests/cc/transport_contract_test.cc is what each one passes.
//
// Every call that can wait takes a Deadline. Every error says in its FailureScope what
// has to be made anew before it is worth another try.
#ifndef TF_SMB_CC_TRANSPORT_TRANSPORT_H_
#define TF_SMB_CC_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cc/box/segment.h"
#include "cc/box/segment_control.h"
#include "cc/box/segment_data.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/common/thread_pool.h"
#include "cc/wire/messages.h"

namespace tf_smb {

// "shm://name", taken apart.
struct Address {
  std::string scheme;
  std::string target;

  static Result<Address> Parse(std::string_view text);
  std::string ToString() const { return scheme + "://" + target; }
};

// Whether a transport can be used on this host: an answer, not an error.
struct Viability {
  bool viable = false;
  std::string reason;  // why not; empty when viable
};

// What a transport can do, for those who choose one and for `tf-smb version`.
struct Capabilities {
  // Workers run the moves themselves, on the server's memory.
  bool shared_memory = false;
  // Reads, and writes, that take none of the server's processor time.
  bool one_sided_read = false;
  bool one_sided_write = false;
  // Memory in a MemoryRegion is sent and received in place; other memory is copied first.
  bool registration = false;
  // Reaches other hosts.
  bool remote = false;
};

// Local memory that a connection may send from and receive into, for as long as this
// lives, which is at most as long as the connection. Buffers that lie in a region are
// used in place where Capabilities::registration says so; others always work too.
class MemoryRegion {
 public:
  virtual ~MemoryRegion() = default;
  virtual void* data() const = 0;
  virtual uint64_t size_bytes() const = 0;
};

// What a client can do with one segment. Thread-safe; calls on one link may wait for
// each other, those of control() for no other call for longer than a message takes.
// The meaning of the calls is that of cc/box/segment_data.h and segment_control.h.
class SegmentLink {
 public:
  virtual ~SegmentLink() = default;

  // Valid as long as the link. Join and Leave are called on one thread, see there.
  virtual SegmentControl* control() = 0;
  virtual Status Read(const std::vector<Span>& spans, const Deadline& deadline,
                      ThreadPool* pool) = 0;
  virtual Status Write(const std::vector<ConstSpan>& spans, const Deadline& deadline,
                       ThreadPool* pool) = 0;
  // Chunk by chunk, each one atomic move. `pool` may be null: then one thread.
  virtual Result<UpdateReport> Update(const UpdateRequest& request, ThreadPool* pool) = 0;
  // This segment += scale * source, which is of the same server: INVALID_ARGUMENT else.
  virtual Status Axpy(double scale, SegmentLink* source, const Deadline& deadline) = 0;
};

// Thread-safe.
class Connection {
 public:
  virtual ~Connection() = default;

  virtual Result<std::unique_ptr<SegmentLink>> Open(const OpenRequest& request, bool* created,
                                                    const Deadline& deadline) = 0;
  virtual Result<std::unique_ptr<SegmentLink>> Attach(const std::string& segment_name,
                                                      const Deadline& deadline) = 0;
  virtual Status Free(const std::string& segment_name, const Deadline& deadline) = 0;
  virtual Result<std::vector<SegmentSummary>> List(const Deadline& deadline) = 0;
  // `data` must outlive the region.
  virtual Result<std::unique_ptr<MemoryRegion>> Register(void* data, uint64_t size_bytes) = 0;
};

// What a server answers; a transport brings requests to it and carries `segment`
// to the client in its own way.
struct HandledRequest {
  Reply reply;
  std::shared_ptr<Segment> segment;
};

class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  virtual HandledRequest Handle(const Request& request) = 0;
};

// Serves from construction to destruction, on threads of its own.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual std::string address() const = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual const char* scheme() const = 0;
  virtual Viability IsViable() const = 0;
  virtual Capabilities capabilities() const = 0;
  // `handler` must outlive the listener. ALREADY_EXISTS if somebody listens there.
  virtual Result<std::unique_ptr<Listener>> Listen(const Address& address,
                                                   RequestHandler* handler) = 0;
  // Waits for a server to appear until the deadline; then UNAVAILABLE.
  virtual Result<std::unique_ptr<Connection>> Connect(const Address& address,
                                                      const Deadline& deadline) = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_TRANSPORT_H_
