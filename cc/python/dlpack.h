// Tensors of other libraries (PyTorch, JAX, TensorFlow, ...), without a copy, by the
// DLPack protocol: https://dmlc.github.io/dlpack/latest/.
#ifndef TF_SMB_CC_PYTHON_DLPACK_H_
#define TF_SMB_CC_PYTHON_DLPACK_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cc/wire/dtype.h"

namespace tf_smb {

// The memory of one tensor, on the CPU, until this is destroyed. With the GIL held.
class DLPackTensor {
 public:
  // False if the object does not speak the protocol.
  static bool IsOffered(pybind11::handle object);
  // Null if it cannot be used: `why_not` says it, in words that follow "array 0: ".
  static std::unique_ptr<DLPackTensor> Take(pybind11::handle object, std::string* why_not);
  virtual ~DLPackTensor() = default;

  void* data() const { return data_; }
  // None: not one that a segment can hold.
  std::optional<DType> dtype() const { return dtype_; }
  uint64_t num_elements() const { return num_elements_; }
  // C-contiguous and aligned.
  bool usable_in_place() const { return usable_in_place_; }
  // False also if it does not say.
  bool writeable() const { return writeable_; }
  // "float64", or DLPack's numbers for what has no name here.
  std::string DTypeText() const;

 protected:
  struct Tensor;
  void Describe(const Tensor& tensor);
  bool writeable_ = false;

 private:
  template <typename Managed>
  class Owner;

  void* data_ = nullptr;
  std::optional<DType> dtype_;
  uint64_t num_elements_ = 0;
  bool usable_in_place_ = false;
  uint8_t type_code_ = 0;
  uint8_t type_bits_ = 0;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_DLPACK_H_
