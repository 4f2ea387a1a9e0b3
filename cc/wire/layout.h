// Layout: which variables a segment holds, in which order, of which shape and
// dtype, and where each one lies in the center.
#ifndef TF_SMB_CC_WIRE_LAYOUT_H_
#define TF_SMB_CC_WIRE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cc/common/status.h"
#include "cc/wire/dtype.h"

namespace tf_smb {

struct Variable {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  // Set by Layout::Create: where the variable begins in the center, and how many
  // elements it has.
  uint64_t offset_bytes = 0;
  uint64_t num_elements = 0;

  // In the center.
  uint64_t element_bytes() const { return ElementBytes(CenterDType(dtype)); }
  uint64_t size_bytes() const { return num_elements * element_bytes(); }

  // "'dense/kernel' float32[784,128]"
  std::string ToString() const;
};

class Layout {
 public:
  static constexpr uint32_t kMaxVariables = 1u << 20;
  static constexpr uint32_t kMaxNameBytes = 1024;
  static constexpr uint32_t kMaxRank = 32;
  // Variables start on a cache line, so that no two share one.
  static constexpr uint64_t kAlignmentBytes = 64;

  Layout() = default;
  // INVALID_ARGUMENT for no variables, a name or rank too long, a negative
  // dimension, an unknown dtype, or a center of more than 2^48 bytes.
  static Result<Layout> Create(std::vector<Variable> variables);

  const std::vector<Variable>& variables() const { return variables_; }
  // Of the center, padding between variables included.
  uint64_t size_bytes() const { return size_bytes_; }

  std::string Encode() const;
  static Result<Layout> Decode(std::string_view bytes);

  // FAILED_PRECONDITION naming the first variable that differs, with both sides,
  // `theirs_label` being what the other layout is called. Compared: the number of
  // variables, and of each its last name component, shape and dtype; the
  // auto-numbered prefix ("dense_3/kernel") depends on what a process built before.
  Status CheckSame(const Layout& theirs, std::string_view theirs_label) const;

 private:
  std::vector<Variable> variables_;
  uint64_t size_bytes_ = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_WIRE_LAYOUT_H_
