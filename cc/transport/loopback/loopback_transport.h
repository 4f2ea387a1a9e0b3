// Client and server in one process, by messages that are really copied: what every
// transport by messages does, without a network. For tests, and for trying things out.
#ifndef TF_SMB_CC_TRANSPORT_LOOPBACK_LOOPBACK_TRANSPORT_H_
#define TF_SMB_CC_TRANSPORT_LOOPBACK_LOOPBACK_TRANSPORT_H_

#include <memory>
#include <string>

#include "cc/transport/message/channel.h"
#include "cc/transport/transport.h"

namespace tf_smb {

class LoopbackTransport : public Transport {
 public:
  const char* scheme() const override { return "loopback"; }
  Viability IsViable() const override { return {true, ""}; }
  Capabilities capabilities() const override { return {}; }
  Result<std::unique_ptr<Listener>> Listen(const Address& address,
                                           RequestHandler* handler) override;
  Result<std::unique_ptr<Connection>> Connect(const Address& address,
                                              const Deadline& deadline) override;

  // Channels to whoever listens there at the time.
  static Dialer DialerTo(const std::string& name);
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_TRANSPORT_LOOPBACK_LOOPBACK_TRANSPORT_H_
