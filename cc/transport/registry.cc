#include "cc/transport/registry.h"

#include <string>

#include "cc/transport/loopback/loopback_transport.h"
#include "cc/transport/shm/shm_transport.h"

namespace tf_smb {

Result<Address> Address::Parse(std::string_view text) {
  const size_t separator = text.find("://");
  if (separator == std::string_view::npos || separator == 0 || separator + 3 == text.size()) {
    return InvalidArgumentError("a server address looks like shm://NAME, got '" +
                                std::string(text) + "' [SMB-E100]");
  }
  return Address{std::string(text.substr(0, separator)), std::string(text.substr(separator + 3))};
}

const std::vector<Transport*>& Transports() {
  static const std::vector<Transport*>* const transports =
      new std::vector<Transport*>{new ShmTransport(), new LoopbackTransport()};
  return *transports;
}

Result<Transport*> FindTransport(const Address& address) {
  std::string schemes;
  for (Transport* transport : Transports()) {
    if (address.scheme == transport->scheme()) {
      const Viability viability = transport->IsViable();
      if (viability.viable) return transport;
      return UnavailableError("transport " + address.scheme +
                              " cannot be used on this host: " + viability.reason + " [SMB-E102]");
    }
    if (!schemes.empty()) schemes += ", ";
    schemes += transport->scheme();
  }
  return InvalidArgumentError("unknown transport '" + address.scheme + "' in " +
                              address.ToString() + "; this build has: " + schemes + " [SMB-E101]");
}

}  // namespace tf_smb
