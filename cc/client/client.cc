#include "cc/client/client.h"

#include <utility>

#include "cc/transport/registry.h"

namespace tf_smb {

Result<std::unique_ptr<Client>> Client::Connect(const std::string& address,
                                                const Deadline& deadline) {
  TF_SMB_ASSIGN_OR_RETURN(const Address parsed, Address::Parse(address));
  TF_SMB_ASSIGN_OR_RETURN(Transport* const transport, FindTransport(parsed));
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Connection> connection,
                          transport->Connect(parsed, deadline));
  return std::unique_ptr<Client>(new Client(std::move(connection)));
}

Result<std::shared_ptr<AttachedSegment>> Client::Open(const OpenRequest& request, int num_threads,
                                                      const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSegmentName(request.segment_name));
  TF_SMB_RETURN_IF_ERROR(CheckJobId(request.job_id));
  bool created = false;
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<SegmentLink> link,
                          connection_->Open(request, &created, deadline));
  return std::make_shared<AttachedSegment>(std::move(link), created, num_threads);
}

Result<std::shared_ptr<AttachedSegment>> Client::Attach(const std::string& segment_name,
                                                        int num_threads,
                                                        const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSegmentName(segment_name));
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<SegmentLink> link,
                          connection_->Attach(segment_name, deadline));
  return std::make_shared<AttachedSegment>(std::move(link), /*created=*/false, num_threads);
}

Status Client::Free(const std::string& segment_name, const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  TF_SMB_RETURN_IF_ERROR(CheckSegmentName(segment_name));
  return connection_->Free(segment_name, deadline);
}

Result<std::vector<SegmentSummary>> Client::List(const Deadline& deadline) {
  TF_SMB_RETURN_IF_ERROR(fork_guard_.Check());
  return connection_->List(deadline);
}

}  // namespace tf_smb
