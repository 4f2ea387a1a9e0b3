#include "cc/wire/dtype.h"

#include <cstddef>

namespace tf_smb {
namespace {

struct Entry {
  DType dtype;
  const char* name;
  uint8_t element_bytes;
};

constexpr Entry kEntries[] = {
    {DType::kFloat32, "float32", 4},      {DType::kFloat64, "float64", 8},
    {DType::kFloat16, "float16", 2},      {DType::kBFloat16, "bfloat16", 2},
    {DType::kBool, "bool", 1},            {DType::kInt8, "int8", 1},
    {DType::kInt16, "int16", 2},          {DType::kInt32, "int32", 4},
    {DType::kInt64, "int64", 8},          {DType::kUInt8, "uint8", 1},
    {DType::kUInt16, "uint16", 2},        {DType::kUInt32, "uint32", 4},
    {DType::kUInt64, "uint64", 8},        {DType::kComplex64, "complex64", 8},
    {DType::kComplex128, "complex128", 16},
};

const Entry* Find(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  if (number < 1 || number > sizeof(kEntries) / sizeof(kEntries[0])) return nullptr;
  return &kEntries[number - 1];
}

}  // namespace

bool IsKnown(DType dtype) { return Find(dtype) != nullptr; }

const char* DTypeName(DType dtype) {
  const Entry* const entry = Find(dtype);
  return entry == nullptr ? "unknown dtype" : entry->name;
}

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const Entry& entry : kEntries) {
    if (name == entry.name) return entry.dtype;
  }
  return std::nullopt;
}

const std::string& AllDTypeNames() {
  static const std::string* const names = [] {
    auto* text = new std::string();
    for (const Entry& entry : kEntries) {
      *text += (text->empty() ? "" : ", ") + std::string(entry.name);
    }
    return text;
  }();
  return *names;
}

uint64_t ElementBytes(DType dtype) {
  const Entry* const entry = Find(dtype);
  return entry == nullptr ? 0 : entry->element_bytes;
}

bool IsAveraged(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 ||
         dtype == DType::kBFloat16;
}

DType CenterDType(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

}  // namespace tf_smb
