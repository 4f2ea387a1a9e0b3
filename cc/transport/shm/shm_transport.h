// Shared memory: client and server on one host. Requests go over an abstract Unix
// socket, whose peer must be of the same user; a segment is handed over as a
// descriptor, and from then on the client works in it without the server.
#ifndef TF_SMB_CC_TRANSPORT_SHM_SHM_TRANSPORT_H_
#define TF_SMB_CC_TRANSPORT_SHM_SHM_TRANSPORT_H_

#include <memory>

#include "cc/transport/transport.h"

namespace tf_smb {

class ShmTransport : public Transport {
 public:
  const char* scheme() const override { return "shm"; }
  Viability IsViable() const override;
  Capabilities capabilities() const override;
  Result<std::unique_ptr<Listener>> Listen(const Address& address,
                                           RequestHandler* handler) override;
  Result<std::unique_ptr<Connection>> Connect(const Address& address,
                                              const Deadline& deadline) override;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_SHM_SHM_TRANSPORT_H_
