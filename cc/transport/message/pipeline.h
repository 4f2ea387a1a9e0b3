// Pipeline: data requests on a lane, several of them under way; replies come in order.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_PIPELINE_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_PIPELINE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/transport/message/lane.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {

class Pipeline {
 public:
  // Gets the replies, those that report errors too, each with the tag of its request. Not
  // OK: the reply cannot be one, and the lane is lost.
  using OnReply = std::function<Status(size_t tag, const DataReply& reply)>;

  // Takes a lane of `lanes`, which must outlive this.
  static Result<std::unique_ptr<Pipeline>> Start(LanePool* lanes, const Deadline& deadline,
                                                 OnReply on_reply);
  ~Pipeline();

  // Sets the request's sequence; first takes in replies until there is room for it.
  // `reply_by` bounds the sending too.
  Status Send(DataRequest* request, size_t tag, const Deadline& reply_by);
  // Takes in all replies.
  Status Drain();

 private:
  struct UnderWay {
    uint64_t sequence;
    size_t tag;
    Deadline reply_by;
  };

  Pipeline(LanePool* lanes, std::unique_ptr<Lane> lane, OnReply on_reply)
      : lanes_(lanes), lane_(std::move(lane)), on_reply_(std::move(on_reply)) {}
  Status ReceiveOne();

  LanePool* const lanes_;
  std::unique_ptr<Lane> lane_;
  const OnReply on_reply_;
  std::deque<UnderWay> under_way_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_PIPELINE_H_
