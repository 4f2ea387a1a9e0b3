// Fixed little-endian encoding, field by field. A Decoder checks every length
// before it reads, so hostile input costs an error, never memory.
#ifndef TF_SMB_CC_WIRE_CODING_H_
#define TF_SMB_CC_WIRE_CODING_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "cc/common/status.h"

namespace tf_smb {

class Encoder {
 public:
  void PutU8(uint8_t value) { bytes_.push_back(static_cast<char>(value)); }
  void PutU32(uint32_t value) { PutFixed(value, 4); }
  void PutU64(uint64_t value) { PutFixed(value, 8); }
  // u32 length, then the bytes.
  void PutString(std::string_view value);

  const std::string& bytes() const& { return bytes_; }
  std::string Release() && { return std::move(bytes_); }

 private:
  void PutFixed(uint64_t value, int num_bytes);
  std::string bytes_;
};

// Reads what an Encoder wrote. After the first short or oversized field every
// further read gives zero or empty, and ok() stays false: check once, at the end.
class Decoder {
 public:
  explicit Decoder(std::string_view bytes) : bytes_(bytes) {}

  uint8_t GetU8() { return static_cast<uint8_t>(GetFixed(1)); }
  uint32_t GetU32() { return static_cast<uint32_t>(GetFixed(4)); }
  uint64_t GetU64() { return GetFixed(8); }
  std::string GetString(uint32_t max_bytes);

  bool ok() const { return ok_; }
  size_t remaining() const { return bytes_.size(); }
  // DATA_LOSS naming `what` unless all was read and all reads fitted.
  Status Finish(std::string_view what) const;

 private:
  uint64_t GetFixed(int num_bytes);
  std::string_view bytes_;
  bool ok_ = true;
};

// FNV-1a, 64 bits: tells a damaged or foreign header from ours. Not a defence
// against somebody who wants to forge one.
uint64_t Checksum(std::string_view bytes);

}  // namespace tf_smb

#endif  // TF_SMB_CC_WIRE_CODING_H_
