// The transports this build has, by scheme.
#ifndef TF_SMB_CC_TRANSPORT_REGISTRY_H_
#define TF_SMB_CC_TRANSPORT_REGISTRY_H_

#include <vector>

#include "cc/common/status.h"
#include "cc/transport/transport.h"

namespace tf_smb {

const std::vector<Transport*>& Transports();

// INVALID_ARGUMENT naming the accepted schemes; UNAVAILABLE with the reason if the
// transport exists but is not viable on this host.
Result<Transport*> FindTransport(const Address& address);

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_REGISTRY_H_
