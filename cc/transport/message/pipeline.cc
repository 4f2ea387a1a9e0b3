#include "cc/transport/message/pipeline.h"

#include <string>
#include <utility>

namespace tf_smb {
namespace {

// Enough for the server to find the next request there when it has answered one; more
// only fill buffers.
constexpr size_t kWindow = 4;

}  // namespace

Result<std::unique_ptr<Pipeline>> Pipeline::Start(LanePool* lanes, const Deadline& deadline,
                                                  OnReply on_reply) {
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, lanes->Take(deadline));
  return std::unique_ptr<Pipeline>(
      new Pipeline(lanes, std::move(lane), std::move(on_reply)));
}

Pipeline::~Pipeline() {
  // Replies that are still to come would be taken for others'.
  if (under_way_.empty()) lanes_->GiveBack(std::move(lane_));
}

Status Pipeline::Send(DataRequest* request, size_t tag, const Deadline& reply_by) {
  while (under_way_.size() >= kWindow) TF_SMB_RETURN_IF_ERROR(ReceiveOne());
  request->sequence = lane_->NextSequence();
  under_way_.push_back({request->sequence, tag, reply_by});
  return lane_->SendData(*request, reply_by);
}

Status Pipeline::Drain() {
  while (!under_way_.empty()) TF_SMB_RETURN_IF_ERROR(ReceiveOne());
  return Status::Ok();
}

Status Pipeline::ReceiveOne() {
  const UnderWay first = under_way_.front();
  std::string bytes;
  TF_SMB_ASSIGN_OR_RETURN(const DataReply reply,
                          lane_->ReceiveData(first.sequence, first.reply_by, &bytes));
  under_way_.pop_front();
  Status status = on_reply_(first.tag, reply);
  if (!status.ok()) lane_->Close();
  return status;
}

}  // namespace tf_smb
