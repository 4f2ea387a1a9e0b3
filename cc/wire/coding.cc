#include "cc/wire/coding.h"

namespace tf_smb {

void Encoder::PutFixed(uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) {
    bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }
}

void Encoder::PutString(std::string_view value) {
  PutU32(static_cast<uint32_t>(value.size()));
  bytes_.append(value);
}

uint64_t Decoder::GetFixed(int num_bytes) {
  if (!ok_ || bytes_.size() < static_cast<size_t>(num_bytes)) {
    ok_ = false;
    return 0;
  }
  uint64_t value = 0;
  for (int i = 0; i < num_bytes; ++i) {
    value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes_[i])) << (8 * i);
  }
  bytes_.remove_prefix(num_bytes);
  return value;
}

std::string Decoder::GetString(uint32_t max_bytes) {
  const uint32_t size = GetU32();
  if (!ok_ || size > max_bytes || size > bytes_.size()) {
    ok_ = false;
    return {};
  }
  std::string value(bytes_.substr(0, size));
  bytes_.remove_prefix(size);
  return value;
}

Status Decoder::Finish(std::string_view what) const {
  if (ok_ && bytes_.empty()) return Status::Ok();
  return DataLossError(
      std::string(what) +
      (ok_ ? " is longer than its contents" : " is cut short or has a field out of range") +
      " [SMB-E018]");
}

uint64_t Checksum(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char byte : bytes) {
    hash ^= static_cast<uint8_t>(byte);
    hash *= 0x100000001b3ULL;
  }
  return hash;
}

}  // namespace tf_smb
