// Reading, writing and updating the center of a segment by messages: one request a chunk,
// several of them under way, so that both directions and the server are busy at once.
#ifndef TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_DATA_H_
#define TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_DATA_H_

#include <cstdint>
#include <vector>

#include "cc/box/segment_data.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/transport/message/lane.h"
#include "cc/wire/segment_messages.h"

namespace tf_smb {

// Thread-safe; calls at one time go over lanes of their own.
class MessageData {
 public:
  // Both must outlive this.
  MessageData(const Grant* grant, LanePool* lanes) : grant_(grant), lanes_(lanes) {}

  // As in cc/box/segment_data.h.
  Status Read(const std::vector<Span>& spans, const Deadline& deadline);
  Status Write(const std::vector<ConstSpan>& spans, const Deadline& deadline);
  Result<UpdateReport> Update(const UpdateRequest& request);
  Status Axpy(double scale, const Grant& source, const Deadline& deadline);

 private:
  const Grant* const grant_;
  LanePool* const lanes_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_MESSAGE_MESSAGE_DATA_H_
