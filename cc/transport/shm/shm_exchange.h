// Reading, writing and exchanging a segment that is mapped in this process.
#ifndef TF_SMB_CC_TRANSPORT_SHM_SHM_EXCHANGE_H_
#define TF_SMB_CC_TRANSPORT_SHM_SHM_EXCHANGE_H_

#include <vector>

#include "cc/box/segment.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/common/thread_pool.h"
#include "cc/transport/transport.h"

namespace tf_smb {

Status ReadCenter(const Segment& segment, const std::vector<float*>& values,
                  const Deadline& deadline);
Status WriteCenter(Segment* segment, const std::vector<const float*>& values,
                   const Deadline& deadline);
// A busy chunk is put off to the end of the pass, then waited for, then skipped.
Result<ExchangeReport> ExchangeCenter(Segment* segment, const ExchangeRequest& request,
                                      ThreadPool* pool);

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_SHM_SHM_EXCHANGE_H_
