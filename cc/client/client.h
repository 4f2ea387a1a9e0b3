// Client: a connection to a server, and the segments reached over it.
#ifndef TF_SMB_CC_CLIENT_CLIENT_H_
#define TF_SMB_CC_CLIENT_CLIENT_H_

#include <memory>
#include <string>
#include <vector>

#include "cc/client/attached_segment.h"
#include "cc/common/clock.h"
#include "cc/common/fork_guard.h"
#include "cc/common/status.h"
#include "cc/transport/transport.h"

namespace tf_smb {

class Client {
 public:
  static Result<std::unique_ptr<Client>> Connect(const std::string& address,
                                                 const Deadline& deadline);

  // Creates the segment or joins it, by the rules of OnExisting.
  Result<std::shared_ptr<AttachedSegment>> Open(const OpenRequest& request, int num_threads,
                                                const Deadline& deadline);
  Result<std::shared_ptr<AttachedSegment>> Attach(const std::string& segment_name, int num_threads,
                                                  const Deadline& deadline);
  Status Free(const std::string& segment_name, const Deadline& deadline);
  Result<std::vector<SegmentSummary>> List(const Deadline& deadline);

 private:
  explicit Client(std::unique_ptr<Connection> connection) : connection_(std::move(connection)) {}

  const std::unique_ptr<Connection> connection_;
  const ForkGuard fork_guard_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_CLIENT_H_
