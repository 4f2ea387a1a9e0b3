#include "cc/wire/layout.h"

#include <algorithm>
#include <utility>

#include "cc/wire/coding.h"

namespace tf_smb {
namespace {

constexpr uint64_t kMaxBytes = 1ULL << 48;

std::string_view LeafName(std::string_view name) {
  const size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? name : name.substr(slash + 1);
}

bool SameVariable(const Variable& a, const Variable& b) {
  return LeafName(a.name) == LeafName(b.name) && a.dtype == b.dtype && a.shape == b.shape;
}

}  // namespace

std::string Variable::ToString() const {
  std::string text = "'" + name + "' " + DTypeName(dtype) + "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

Result<Layout> Layout::Create(std::vector<Variable> variables) {
  if (variables.empty() || variables.size() > kMaxVariables) {
    return InvalidArgumentError("a layout needs 1 to " + std::to_string(kMaxVariables) +
                                " variables, got " + std::to_string(variables.size()) +
                                " [SMB-E010]");
  }
  Layout layout;
  uint64_t offset = 0;
  for (Variable& variable : variables) {
    if (variable.name.size() > kMaxNameBytes || variable.shape.size() > kMaxRank) {
      return InvalidArgumentError("variable " + variable.ToString() + " has a name over " +
                                  std::to_string(kMaxNameBytes) + " bytes or more than " +
                                  std::to_string(kMaxRank) + " dimensions [SMB-E011]");
    }
    if (!IsKnown(variable.dtype)) {
      return InvalidArgumentError("variable '" + variable.name + "' has dtype number " +
                                  std::to_string(static_cast<int>(variable.dtype)) +
                                  ", which this version of tf_smb does not know [SMB-E012]");
    }
    uint64_t elements = 1;
    for (const int64_t dimension : variable.shape) {
      if (dimension < 0) {
        return InvalidArgumentError("variable " + variable.ToString() +
                                    " has a negative dimension [SMB-E013]");
      }
      if (dimension != 0 && elements > kMaxBytes / static_cast<uint64_t>(dimension)) {
        return InvalidArgumentError("variable " + variable.ToString() + " is too large [SMB-E014]");
      }
      elements *= static_cast<uint64_t>(dimension);
    }
    variable.offset_bytes = offset;
    variable.num_elements = elements;
    // No overflow: both are at most 2^48 and 16.
    offset += (variable.size_bytes() + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
    if (offset > kMaxBytes) {
      return InvalidArgumentError("the variables up to " + variable.ToString() +
                                  " are more than 2^48 bytes [SMB-E015]");
    }
  }
  layout.variables_ = std::move(variables);
  layout.size_bytes_ = offset;
  return layout;
}

std::string Layout::Encode() const {
  Encoder encoder;
  encoder.PutU32(static_cast<uint32_t>(variables_.size()));
  for (const Variable& variable : variables_) {
    encoder.PutString(variable.name);
    encoder.PutU8(static_cast<uint8_t>(variable.dtype));
    encoder.PutU8(static_cast<uint8_t>(variable.shape.size()));
    for (const int64_t dimension : variable.shape) {
      encoder.PutU64(static_cast<uint64_t>(dimension));
    }
  }
  return std::move(encoder).Release();
}

Result<Layout> Layout::Decode(std::string_view bytes) {
  Decoder decoder(bytes);
  const uint32_t count = decoder.GetU32();
  std::vector<Variable> variables;
  for (uint32_t i = 0; i < count && decoder.ok(); ++i) {
    Variable variable;
    variable.name = decoder.GetString(kMaxNameBytes);
    variable.dtype = static_cast<DType>(decoder.GetU8());
    const uint8_t rank = decoder.GetU8();
    for (uint8_t d = 0; d < rank && decoder.ok(); ++d) {
      variable.shape.push_back(static_cast<int64_t>(decoder.GetU64()));
    }
    variables.push_back(std::move(variable));
  }
  TF_SMB_RETURN_IF_ERROR(decoder.Finish("the variable directory"));
  Result<Layout> layout = Create(std::move(variables));
  if (!layout.ok()) return DataLossError("the variable directory: " + layout.status().message());
  return layout;
}

Status Layout::CheckSame(const Layout& theirs, std::string_view theirs_label) const {
  const std::string label(theirs_label);
  const size_t shared = std::min(variables_.size(), theirs.variables_.size());
  for (size_t i = 0; i < shared; ++i) {
    if (SameVariable(variables_[i], theirs.variables_[i])) continue;
    return FailedPreconditionError("the models differ at variable " + std::to_string(i) +
                                   ": here " + variables_[i].ToString() + ", in " + label + " " +
                                   theirs.variables_[i].ToString() + " [SMB-E016]");
  }
  if (variables_.size() == theirs.variables_.size()) return Status::Ok();
  const bool here_longer = variables_.size() > shared;
  const Variable& extra = here_longer ? variables_[shared] : theirs.variables_[shared];
  return FailedPreconditionError(
      "the models differ: " + std::to_string(variables_.size()) + " variables here, " +
      std::to_string(theirs.variables_.size()) + " in " + label +
      "; the first without a partner is " + extra.ToString() +
      (here_longer ? " here" : " there") + " [SMB-E017]");
}

}  // namespace tf_smb
