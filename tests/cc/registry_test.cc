#include "cc/transport/registry.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace tf_smb {
namespace {

TEST(AddressTest, ParsesSchemeAndTarget) {
  const Result<Address> address = Address::Parse("shm://a://b");
  ASSERT_TRUE(address.ok());
  EXPECT_EQ(address->scheme, "shm");
  EXPECT_EQ(address->target, "a://b");
  EXPECT_EQ(address->ToString(), "shm://a://b");
}

TEST(AddressTest, RefusesOthersWithAnExample) {
  for (const char* text : {"", "shm", "shm:/a", "://a", "shm://", "host:7000"}) {
    const Status status = Address::Parse(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_NE(status.message().find("shm://NAME, got '" + std::string(text) + "'"),
              std::string::npos);
  }
}

TEST(RegistryTest, FindsWhatItLists) {
  std::set<std::string> schemes;
  for (Transport* transport : Transports()) {
    EXPECT_TRUE(schemes.insert(transport->scheme()).second);
    const Viability viability = transport->IsViable();
    EXPECT_EQ(viability.viable, viability.reason.empty());
    const Result<Transport*> found = FindTransport({transport->scheme(), "name"});
    if (viability.viable) {
      ASSERT_TRUE(found.ok());
      EXPECT_EQ(*found, transport);
    } else {
      EXPECT_EQ(found.status().code(), StatusCode::kUnavailable);
    }
  }
  EXPECT_EQ(schemes.count("shm"), 1u);
}

TEST(RegistryTest, UnknownSchemeNamesTheAccepted) {
  const Status status = FindTransport({"quic", "host"}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("unknown transport 'quic' in quic://host"), std::string::npos);
  EXPECT_NE(status.message().find("this build has: shm"), std::string::npos);
}

}  // namespace
}  // namespace tf_smb
