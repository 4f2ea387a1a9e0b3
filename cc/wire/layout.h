// Layout: which variables a segment holds, in which order, of which shape and
// dtype, and where each one lies in the center.
#ifndef TF_SMB_CC_WIRE_LAYOUT_H_
#define TF_SMB_CC_WIRE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cc/common/status.h"

namespace tf_smb {

// Never renumber: the values lie in segments and travel in messages.
enum class DType : uint8_t {
  kFloat32 = 1,
};

const char* DTypeName(DType dtype);

struct Variable {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  // Set by Layout::Create: first element of the variable in the center, and how
  // many there are.
  uint64_t offset_elements = 0;
  uint64_t num_elements = 0;

  // "'dense/kernel' float32[784,128]"
  std::string ToString() const;
};

class Layout {
 public:
  static constexpr uint32_t kMaxVariables = 1u << 20;
  static constexpr uint32_t kMaxNameBytes = 1024;
  static constexpr uint32_t kMaxRank = 32;
  // Variables start on a cache line, so that no two share one.
  static constexpr uint64_t kAlignmentElements = 16;

  Layout() = default;
  // INVALID_ARGUMENT for no variables, a name or rank too long, a negative
  // dimension, or more than 2^48 elements.
  static Result<Layout> Create(std::vector<Variable> variables);

  const std::vector<Variable>& variables() const { return variables_; }
  // Elements of the center, padding between variables included.
  uint64_t num_elements() const { return num_elements_; }

  std::string Encode() const;
  static Result<Layout> Decode(std::string_view bytes);

  // FAILED_PRECONDITION naming the first variable that differs, with both sides,
  // `theirs_label` being what the other layout is called. Compared: the number of
  // variables, and of each its last name component, shape and dtype; the
  // auto-numbered prefix ("dense_3/kernel") depends on what a process built before.
  Status CheckSame(const Layout& theirs, std::string_view theirs_label) const;

 private:
  std::vector<Variable> variables_;
  uint64_t num_elements_ = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_WIRE_LAYOUT_H_
