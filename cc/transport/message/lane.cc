#include "cc/transport/message/lane.h"

#include <utility>

namespace tf_smb {

// --- Lane ----------------------------------------------------------------------

void Lane::Close() {
  usable_ = false;
  channel_->Close();
}

Status Lane::Fail(Status status) {
  Close();
  return status;
}

Status Lane::Send(std::string_view message, const Deadline& deadline) {
  Status status = channel_->Send(message, deadline, &inbox_);
  // Late is not lost: what was not sent has no answer to be mistaken.
  if (status.ok() || status.code() == StatusCode::kDeadlineExceeded) return status;
  return Fail(std::move(status));
}

Result<std::string> Lane::Receive(const Deadline& deadline) {
  if (inbox_.empty()) return channel_->Receive(deadline);
  std::string frame = std::move(inbox_.front());
  inbox_.pop_front();
  return frame;
}

Result<std::string> Lane::CallForBytes(std::string_view request, const Deadline& deadline) {
  const Status sent = Send(request, deadline);
  if (!sent.ok()) return Fail(sent);
  Result<std::string> reply = Receive(deadline);
  if (!reply.ok()) return Fail(reply.status());
  return reply;
}

Result<ControlReply> Lane::CallControl(ControlRequest* request, const Deadline& deadline) {
  request->sequence = NextSequence();
  TF_SMB_RETURN_IF_ERROR(Send(EncodeControlRequest(*request), deadline));
  for (;;) {
    const Result<std::string> bytes = Receive(deadline);
    if (!bytes.ok()) {
      if (bytes.status().code() == StatusCode::kDeadlineExceeded) return bytes.status();
      return Fail(bytes.status());
    }
    Result<ControlReply> reply = DecodeControlReply(*bytes);
    if (!reply.ok()) return Fail(reply.status().WithScope(FailureScope::kConnection));
    if (reply->sequence == request->sequence) return reply;
    if (reply->sequence > request->sequence) {
      return Fail(DataLossError("the server answered request " + std::to_string(reply->sequence) +
                                ", the last one sent is " + std::to_string(request->sequence) +
                                " [SMB-E125]")
                      .WithScope(FailureScope::kConnection));
    }
  }
}

Status Lane::SendData(const DataRequest& request, const Deadline& deadline) {
  return Send(EncodeDataRequest(request), deadline);
}

Result<DataReply> Lane::ReceiveData(uint64_t sequence, const Deadline& deadline,
                                    std::string* bytes) {
  Result<std::string> received = Receive(deadline);
  if (!received.ok()) return Fail(received.status());
  *bytes = std::move(received).value();
  Result<DataReply> reply = DecodeDataReply(*bytes);
  if (!reply.ok()) return Fail(reply.status().WithScope(FailureScope::kConnection));
  if (reply->sequence != sequence) {
    return Fail(DataLossError("the server answered request " + std::to_string(reply->sequence) +
                              " where request " + std::to_string(sequence) + " was due [SMB-E125]")
                    .WithScope(FailureScope::kConnection));
  }
  return reply;
}

// --- LanePool ------------------------------------------------------------------

Result<std::unique_ptr<Lane>> LanePool::Take(const Deadline& deadline) {
  {
    MutexLock lock(&mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Lane> lane = std::move(idle_.back());
      idle_.pop_back();
      return lane;
    }
  }
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel, dial_(deadline));
  return std::make_unique<Lane>(std::move(channel));
}

void LanePool::GiveBack(std::unique_ptr<Lane> lane) {
  if (!lane->usable()) return;
  MutexLock lock(&mutex_);
  idle_.push_back(std::move(lane));
}

}  // namespace tf_smb
