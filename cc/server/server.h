// Server: lends memory as named segments, at one address. Runs on the threads of
// its listener; holds the segments until they are freed or it ends.
#ifndef TF_SMB_CC_SERVER_SERVER_H_
#define TF_SMB_CC_SERVER_SERVER_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc/box/segment.h"
#include "cc/common/fork_guard.h"
#include "cc/common/mutex.h"
#include "cc/common/status.h"
#include "cc/transport/transport.h"

namespace tf_smb {

struct ServerOptions {
  std::string address;    // "shm://name"
  double lease_s = 10.0;  // how long a silent member is waited for
  // Where segments are files, for this user alone, which outlive a server that crashes:
  // the next one of the same address takes them over. Empty: memfds, which go with their
  // last process.
  std::string directory;
};

class Server : public RequestHandler {
 public:
  static Result<std::unique_ptr<Server>> Start(const ServerOptions& options);
  ~Server() override;

  std::string address() const { return listener_->address(); }
  std::vector<SegmentSummary> List() EXCLUDES(mutex_);
  // Files of this server's that could not be taken over, with the reason.
  const std::vector<std::string>& refused_files() const { return refused_files_; }
  // No worker waits for this one (again), in any segment of now or later.
  void MarkWorkerAbsent(uint32_t worker_index) EXCLUDES(mutex_);

  HandledRequest Handle(const Request& request) override EXCLUDES(mutex_);

 private:
  Server(const ServerOptions& options, std::string name)
      : options_(options), name_(std::move(name)) {}

  HandledRequest OpenLocked(const OpenRequest& request) REQUIRES(mutex_);
  HandledRequest CreateLocked(const OpenRequest& request) REQUIRES(mutex_);
  HandledRequest AttachLocked(const std::string& name) REQUIRES(mutex_);
  HandledRequest FreeLocked(const std::string& name) REQUIRES(mutex_);
  Status NoSuchSegmentLocked(const std::string& name) const REQUIRES(mutex_);
  std::vector<SegmentSummary> ListLocked() REQUIRES(mutex_);

  void TakeOverFilesLocked() REQUIRES(mutex_);
  void RemoveFile(const std::string& segment_name) const;

  const ServerOptions options_;
  const std::string name_;  // of the address, without its scheme
  const ForkGuard fork_guard_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<Segment>> segments_ GUARDED_BY(mutex_);
  std::set<uint32_t> absent_workers_ GUARDED_BY(mutex_);
  std::vector<std::string> refused_files_;  // constant after Start
  std::unique_ptr<Listener> listener_;  // last: it calls Handle
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_SERVER_SERVER_H_
