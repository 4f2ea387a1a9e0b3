// The caller's arrays during one call: found, checked against a segment's layout, kept
// alive. No copies.
#ifndef TF_SMB_CC_PYTHON_BUFFERS_H_
#define TF_SMB_CC_PYTHON_BUFFERS_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc/box/segment_data.h"
#include "cc/python/dlpack.h"
#include "cc/wire/layout.h"

namespace tf_smb {

// As an index into the layout's variables. INVALID_ARGUMENT if there is none.
uint32_t CheckVariable(const Layout& layout, uint64_t number);

enum class BufferAccess { kRead, kWrite };

// Made and destroyed with the GIL held; the memory may be used without.
//
// An array is a numpy array, or a tensor that speaks DLPack; of the variable's dtype, or of
// the one that the center holds it in; C-contiguous and aligned; of the right number of
// elements. What is not throws INVALID_ARGUMENT naming variable, expected and got.
class Buffers {
 public:
  // One array for each variable of the layout, which must outlive this.
  Buffers(const Layout& layout, pybind11::handle arrays, BufferAccess access);
  // One array for as many elements of one variable.
  Buffers(const Layout& layout, uint64_t variable, uint64_t first, pybind11::handle array,
          BufferAccess access);
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  const std::vector<Span>& spans() const { return spans_; }
  std::vector<ConstSpan> ConstSpans() const;
  // Those of variables that are averaged.
  std::vector<ConstSpan> AveragedSpans() const;
  std::vector<void*> AveragedPointers() const;

 private:
  struct Array;

  void Add(uint32_t variable, uint64_t first, bool whole, PyObject* object, BufferAccess access);
  Array Find(PyObject* object, const Variable& variable, bool whole);
  std::string Title(bool whole) const;

  const Layout& layout_;
  std::vector<pybind11::object> objects_;
  std::vector<std::unique_ptr<DLPackTensor>> tensors_;
  std::vector<Span> spans_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_BUFFERS_H_
