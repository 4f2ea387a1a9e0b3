// The transport contract: how clients reach the segments of a server, whatever
// lies between them. One implementation a folder; `registry.h` finds them by the
// scheme of an address. Every call that can wait takes a Deadline.
#ifndef TF_SMB_CC_TRANSPORT_TRANSPORT_H_
#define TF_SMB_CC_TRANSPORT_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cc/box/exchange_kernel.h"
#include "cc/box/segment.h"
#include "cc/box/segment_control.h"
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

// One exchange of all variables. Pointers have the layout's order and sizes.
struct ExchangeRequest {
  Move move;
  const std::vector<const float*>* local = nullptr;
  const std::vector<float*>* out = nullptr;  // see MoveOutput; kCopy needs none
  float* last = nullptr;                     // packed like the center; see ApplyMove
  uint64_t first_chunk = 0;                  // where to start: differs between workers
  double busy_chunk_timeout_s = 5.0;
};

struct ExchangeReport {
  uint64_t chunks_moved = 0;
  // Locked by somebody else until the deadline. Their part of `out` says that
  // nothing moved, and nothing of the worker's progress in them is lost.
  uint64_t chunks_skipped = 0;
  uint64_t version_before = 0;
  uint64_t version_after = 0;
  // A NaN or Inf in this variable: it did not reach the center, and the exchange was
  // broken off soon after.
  std::optional<uint32_t> non_finite_variable;
};

// What a client can do with one segment.
class SegmentLink {
 public:
  virtual ~SegmentLink() = default;

  virtual SegmentControl* control() = 0;
  // The center into `values`; DEADLINE_EXCEEDED naming the chunk that stayed locked.
  virtual Status Read(const std::vector<float*>& values, const Deadline& deadline) = 0;
  // `values` into the center.
  virtual Status Write(const std::vector<const float*>& values, const Deadline& deadline) = 0;
  // Chunk by chunk, each one atomic move. `pool` may be null: then one thread.
  virtual Result<ExchangeReport> Exchange(const ExchangeRequest& request, ThreadPool* pool) = 0;
};

class Connection {
 public:
  virtual ~Connection() = default;

  virtual Result<std::unique_ptr<SegmentLink>> Open(const OpenRequest& request, bool* created,
                                                    const Deadline& deadline) = 0;
  virtual Result<std::unique_ptr<SegmentLink>> Attach(const std::string& segment_name,
                                                      const Deadline& deadline) = 0;
  virtual Status Free(const std::string& segment_name, const Deadline& deadline) = 0;
  virtual Result<std::vector<SegmentSummary>> List(const Deadline& deadline) = 0;
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
  // `handler` must outlive the listener.
  virtual Result<std::unique_ptr<Listener>> Listen(const Address& address,
                                                   RequestHandler* handler) = 0;
  // Waits for a server to appear until the deadline.
  virtual Result<std::unique_ptr<Connection>> Connect(const Address& address,
                                                      const Deadline& deadline) = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_TRANSPORT_H_
