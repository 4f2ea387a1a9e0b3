// DType: what the elements of a variable are, for its owner and in the center.
#ifndef TF_SMB_CC_WIRE_DTYPE_H_
#define TF_SMB_CC_WIRE_DTYPE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tf_smb {

// Never renumber: the values lie in segments and travel in messages.
enum class DType : uint8_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kFloat16 = 3,
  kBFloat16 = 4,
  // Stored, read and written; never averaged or added to.
  kBool = 5,
  kInt8 = 6,
  kInt16 = 7,
  kInt32 = 8,
  kInt64 = 9,
  kUInt8 = 10,
  kUInt16 = 11,
  kUInt32 = 12,
  kUInt64 = 13,
  kComplex64 = 14,
  kComplex128 = 15,
};

// False for a byte from outside that is none of the above.
bool IsKnown(DType dtype);
// numpy's name: "float32", "bfloat16", "bool", ...
const char* DTypeName(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);
// "bool, int8, ..., complex128": for messages about a name that is none of them.
const std::string& AllDTypeNames();

// Bytes of an element, in its owner's arrays. 0 if not known.
uint64_t ElementBytes(DType dtype);
// The floating-point types: those that exchanges, accumulates and rounds work on.
bool IsAveraged(DType dtype);
// What the center holds: float32 for float16 and bfloat16, in which small deltas would
// vanish; else the dtype itself.
DType CenterDType(DType dtype);

}  // namespace tf_smb

#endif  // TF_SMB_CC_WIRE_DTYPE_H_
