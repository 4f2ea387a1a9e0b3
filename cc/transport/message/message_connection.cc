#include "cc/transport/message/message_connection.h"

#include <utility>

#include "cc/transport/message/message_control.h"
#include "cc/transport/message/message_data.h"

namespace tf_smb {
namespace {

class MessageSegmentLink : public SegmentLink {
 public:
  MessageSegmentLink(Dialer dial, Grant grant, std::unique_ptr<Lane> lane)
      : state_(std::make_unique<State>(std::move(dial), std::move(grant), std::move(lane))) {}
  ~MessageSegmentLink() override {
    // Channels and locks are the parent's: a forked child can only forget them.
    if (fork_guard_.InForkedChild()) static_cast<void>(state_.release());
  }

  SegmentControl* control() override { return &state_->control; }
  Status Read(const std::vector<Span>& spans, const Deadline& deadline, ThreadPool*) override {
    return state_->data.Read(spans, deadline);
  }
  Status Write(const std::vector<ConstSpan>& spans, const Deadline& deadline,
               ThreadPool*) override {
    return state_->data.Write(spans, deadline);
  }
  Result<UpdateReport> Update(const UpdateRequest& request, ThreadPool*) override {
    return state_->data.Update(request);
  }
  Status Axpy(double scale, SegmentLink* source, const Deadline& deadline) override {
    const auto* const other = dynamic_cast<MessageSegmentLink*>(source);
    const Grant& ours = state_->control.grant();
    if (other == nullptr || other->state_->control.grant().service != ours.service) {
      return InvalidArgumentError("segment '" + source->control()->name() +
                                  "' is not of the server that segment '" + ours.segment_name +
                                  "' is of: both must be of one server [SMB-E122]");
    }
    return state_->data.Axpy(scale, other->state_->control.grant(), deadline);
  }

 private:
  struct State {
    State(Dialer dial, Grant grant, std::unique_ptr<Lane> lane)
        : waiting_lanes(dial),
          data_lanes(std::move(dial)),
          control(std::move(grant), std::move(lane), &waiting_lanes),
          data(&control.grant(), &data_lanes) {}

    LanePool waiting_lanes;
    LanePool data_lanes;
    MessageControl control;
    MessageData data;
  };

  const ForkGuard fork_guard_;
  std::unique_ptr<State> state_;
};

bool IsGrant(const std::string& bytes) {
  const Result<uint8_t> type = MessageTypeOf(bytes);
  return type.ok() && *type == static_cast<uint8_t>(SegmentMessageType::kGrant);
}

// Why there was no grant.
Status Refusal(const std::string& bytes) {
  TF_SMB_ASSIGN_OR_RETURN(const Reply reply, DecodeReply(bytes));
  TF_SMB_RETURN_IF_ERROR(reply.status);
  return DataLossError("the server's reply came without a segment [SMB-E120]");
}

Request NamedRequest(MessageType type, const std::string& segment_name) {
  Request request;
  request.type = type;
  request.segment_name = segment_name;
  return request;
}

}  // namespace

MessageConnection::~MessageConnection() {
  if (fork_guard_.InForkedChild()) static_cast<void>(lane_.release());
}

Result<std::unique_ptr<SegmentLink>> MessageConnection::Open(const OpenRequest& open,
                                                             bool* created,
                                                             const Deadline& deadline) {
  Request request;
  request.type = MessageType::kOpen;
  request.open = open;
  return NewLink(request, created, deadline);
}

Result<std::unique_ptr<SegmentLink>> MessageConnection::Attach(const std::string& segment_name,
                                                               const Deadline& deadline) {
  bool created = false;
  return NewLink(NamedRequest(MessageType::kAttach, segment_name), &created, deadline);
}

Status MessageConnection::Free(const std::string& segment_name, const Deadline& deadline) {
  return Call(NamedRequest(MessageType::kFree, segment_name), deadline).status();
}

Result<std::vector<SegmentSummary>> MessageConnection::List(const Deadline& deadline) {
  TF_SMB_ASSIGN_OR_RETURN(Reply reply, Call(Request(), deadline));
  return std::move(reply.segments);
}

Result<std::unique_ptr<MemoryRegion>> MessageConnection::Register(void* data,
                                                                  uint64_t size_bytes) {
  return std::unique_ptr<MemoryRegion>(new PlainMemoryRegion(data, size_bytes));
}

Result<std::unique_ptr<SegmentLink>> MessageConnection::NewLink(const Request& request,
                                                                bool* created,
                                                                const Deadline& deadline) {
  TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel, dial_(deadline));
  auto lane = std::make_unique<Lane>(std::move(channel));
  TF_SMB_ASSIGN_OR_RETURN(const std::string bytes,
                          lane->CallForBytes(EncodeRequest(request), deadline));
  if (!IsGrant(bytes)) return Refusal(bytes);
  TF_SMB_ASSIGN_OR_RETURN(Grant grant, DecodeGrant(bytes));
  *created = grant.created;
  return std::unique_ptr<SegmentLink>(
      new MessageSegmentLink(dial_, std::move(grant), std::move(lane)));
}

Result<Reply> MessageConnection::Call(const Request& request, const Deadline& deadline) {
  MutexLock lock(&mutex_);
  if (lane_ == nullptr || !lane_->usable()) {
    TF_SMB_ASSIGN_OR_RETURN(std::unique_ptr<Channel> channel, dial_(deadline));
    lane_ = std::make_unique<Lane>(std::move(channel));
  }
  TF_SMB_ASSIGN_OR_RETURN(const std::string bytes,
                          lane_->CallForBytes(EncodeRequest(request), deadline));
  Result<Reply> reply = DecodeReply(bytes);
  if (!reply.ok()) {
    lane_->Close();
    return reply;
  }
  TF_SMB_RETURN_IF_ERROR(reply->status);
  return reply;
}

}  // namespace tf_smb
