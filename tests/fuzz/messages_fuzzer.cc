// Whatever arrives: an error, or something that encodes to what decodes to the same.
#include <string>
#include <string_view>

#include "cc/wire/layout.h"
#include "cc/wire/messages.h"
#include "cc/wire/segment_messages.h"
#include "tests/fuzz/fuzz_input.h"

namespace tf_smb {
namespace {

template <typename Decode, typename Encode>
void RoundTrip(std::string_view bytes, Decode decode, Encode encode) {
  const auto message = decode(bytes);
  FuzzCheck(message.ok() || !message.status().message().empty(), "an error without a sentence");
  if (!message.ok()) return;
  const std::string once = encode(*message);
  const auto again = decode(std::string_view(once));
  FuzzCheck(again.ok(), "what was decoded encodes to something that does not decode");
  FuzzCheck(encode(*again) == once, "the second encoding differs from the first");
}

void DecodeOne(uint8_t which, std::string_view bytes) {
  switch (which % 9) {
    case 0:
      return RoundTrip(bytes, DecodeRequest, EncodeRequest);
    case 1:
      return RoundTrip(bytes, DecodeReply, EncodeReply);
    case 2: {
      const Result<Layout> layout = Layout::Decode(bytes);
      FuzzCheck(!layout.ok() || layout->Encode() == bytes, "a layout has two encodings");
      return;
    }
    case 3:
      return RoundTrip(bytes, DecodeGrant, EncodeGrant);
    case 4:
      return RoundTrip(bytes, DecodeControlRequest, EncodeControlRequest);
    case 5:
      return RoundTrip(bytes, DecodeControlReply, EncodeControlReply);
    case 6:
      return RoundTrip(bytes, DecodeDataRequest, EncodeDataRequest);
    case 7:
      return RoundTrip(bytes, DecodeDataReply, EncodeDataReply);
    default:
      static_cast<void>(MessageTypeOf(bytes));
  }
}

}  // namespace

// Every short message, in every byte of it.
void FuzzSystematically() {
  for (int which = 0; which < 9; ++which) {
    for (size_t size = 0; size < 40; ++size) {
      for (const char fill : {'\0', '\1', '\x7f', '\x80', '\xff'}) {
        FuzzOne(static_cast<char>(which) + std::string(size, fill));
      }
    }
  }
}

}  // namespace tf_smb

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tf_smb::FuzzInput input(data, size);
  const uint8_t which = input.Byte();
  tf_smb::DecodeOne(which, input.Rest());
  return 0;
}
