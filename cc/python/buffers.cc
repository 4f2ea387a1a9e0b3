#include "cc/python/buffers.h"

#include <pybind11/numpy.h>

#include <cstring>
#include <optional>
#include <utility>

#include "cc/python/exceptions.h"

namespace py = pybind11;

namespace tf_smb {

struct Buffers::Array {
  void* data = nullptr;
  std::optional<DType> dtype;  // none: not one that a segment can hold
  uint64_t num_elements = 0;
  bool usable_in_place = false;
  bool writeable = false;
  const DLPackTensor* tensor = nullptr;  // none: it is numpy's
};

namespace {

using Numpy = py::detail::npy_api;

constexpr int kUsableInPlace = Numpy::NPY_ARRAY_C_CONTIGUOUS_ | Numpy::NPY_ARRAY_ALIGNED_;
constexpr int kNumpyHalf = 23;  // NPY_HALF, which pybind11 does not list

// ml_dtypes' type, whose number is given when it is imported.
bool IsBFloat16(const py::detail::PyArrayDescr_Proxy* descr) {
  if (descr->kind != 'V' || descr->typeobj == nullptr) return false;
  const char* const name = reinterpret_cast<PyTypeObject*>(descr->typeobj)->tp_name;
  const char* const dot = std::strrchr(name, '.');
  return std::strcmp(dot == nullptr ? name : dot + 1, "bfloat16") == 0;
}

std::optional<DType> NumpyDType(const py::detail::PyArrayDescr_Proxy* descr) {
  if (descr->byteorder == '>') return std::nullopt;
  switch (descr->type_num) {
    case Numpy::NPY_FLOAT_: return DType::kFloat32;
    case Numpy::NPY_DOUBLE_: return DType::kFloat64;
    case kNumpyHalf: return DType::kFloat16;
    case Numpy::NPY_BOOL_: return DType::kBool;
    case Numpy::NPY_BYTE_: return DType::kInt8;
    case Numpy::NPY_SHORT_: return DType::kInt16;
    case Numpy::NPY_INT_: return DType::kInt32;
    case Numpy::NPY_LONG_: return sizeof(long) == 8 ? DType::kInt64 : DType::kInt32;  // NOLINT
    case Numpy::NPY_LONGLONG_: return DType::kInt64;
    case Numpy::NPY_UBYTE_: return DType::kUInt8;
    case Numpy::NPY_USHORT_: return DType::kUInt16;
    case Numpy::NPY_UINT_: return DType::kUInt32;
    case Numpy::NPY_ULONG_: return sizeof(long) == 8 ? DType::kUInt64 : DType::kUInt32;  // NOLINT
    case Numpy::NPY_ULONGLONG_: return DType::kUInt64;
    case Numpy::NPY_CFLOAT_: return DType::kComplex64;
    case Numpy::NPY_CDOUBLE_: return DType::kComplex128;
    default: break;
  }
  return IsBFloat16(descr) ? std::optional<DType>(DType::kBFloat16) : std::nullopt;
}

std::string TypeName(py::handle object) {
  return py::str(py::type::of(object).attr("__name__")).cast<std::string>();
}

// "float32", or "bfloat16 or float32".
std::string AcceptedDTypes(const Variable& variable) {
  const DType center = CenterDType(variable.dtype);
  const std::string own = DTypeName(variable.dtype);
  return center == variable.dtype ? own : own + " or " + DTypeName(center);
}

}  // namespace

uint32_t CheckVariable(const Layout& layout, uint64_t number) {
  if (number >= layout.variables().size()) {
    ThrowIfError(InvalidArgumentError("the segment has " +
                                      std::to_string(layout.variables().size()) +
                                      " variables, there is no variable " +
                                      std::to_string(number) + " [SMB-E073]"));
  }
  return static_cast<uint32_t>(number);
}

Buffers::Buffers(const Layout& layout, py::handle arrays, BufferAccess access)
    : layout_(layout) {
  const auto sequence = py::reinterpret_steal<py::object>(PySequence_Fast(arrays.ptr(), ""));
  if (!sequence) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    ThrowIfError(InvalidArgumentError("arrays must be a sequence, one for each variable, got " +
                                      TypeName(arrays) + " [SMB-E250]"));
  }
  // First all of them: looking at a tensor runs Python, which may change the sequence.
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
  PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
  objects_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    objects_.push_back(py::reinterpret_borrow<py::object>(items[i]));
  }
  if (count != layout.variables().size()) {
    ThrowIfError(InvalidArgumentError("the segment has " +
                                      std::to_string(layout.variables().size()) +
                                      " variables, got " + std::to_string(count) + " arrays"
                                      " [SMB-E251]"));
  }
  spans_.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    Add(i, 0, /*whole=*/true, objects_[i].ptr(), access);
  }
}

Buffers::Buffers(const Layout& layout, uint64_t variable, uint64_t first, py::handle array,
                 BufferAccess access)
    : layout_(layout), objects_{py::reinterpret_borrow<py::object>(array)} {
  Add(CheckVariable(layout, variable), first, /*whole=*/false, array.ptr(), access);
}

void Buffers::Add(uint32_t number, uint64_t first, bool whole, PyObject* object,
                  BufferAccess access) {
  const Variable& variable = layout_.variables()[number];
  const Array array = Find(object, variable, whole);
  const bool own = array.dtype == variable.dtype;
  const bool wide = !own && array.dtype == CenterDType(variable.dtype);
  if (!(own || wide) || !array.usable_in_place ||
      (whole && array.num_elements != variable.num_elements)) {
    const std::string got =
        array.tensor == nullptr
            ? py::str(py::handle(object).attr("dtype")).cast<std::string>()
            : TypeName(object) + ", " + array.tensor->DTypeText();
    ThrowIfError(InvalidArgumentError(
        Title(whole) + " must be C-contiguous " + AcceptedDTypes(variable) + " like variable " +
        variable.ToString() + ", got " + got + " of " + std::to_string(array.num_elements) +
        " elements" + (array.usable_in_place ? "" : ", not C-contiguous and aligned") +
        " [SMB-E252]"));
  }
  if (access == BufferAccess::kWrite && !array.writeable) {
    ThrowIfError(InvalidArgumentError(
        Title(whole) + " is read-only, and would be overwritten with variable " +
        variable.ToString() +
        (array.tensor == nullptr ? ""
                                 : ": pass a numpy array that shares the memory of this " +
                                       TypeName(object)) +
        " [SMB-E253]"));
  }
  spans_.push_back({number, first, array.num_elements, array.data, wide});
}

Buffers::Array Buffers::Find(PyObject* object, const Variable& variable, bool whole) {
  if (PyObject_TypeCheck(object, Numpy::get().PyArray_Type_)) {
    const py::detail::PyArray_Proxy* const proxy = py::detail::array_proxy(object);
    uint64_t num_elements = 1;
    for (int i = 0; i < proxy->nd; ++i) {
      num_elements *= static_cast<uint64_t>(proxy->dimensions[i]);
    }
    return {proxy->data, NumpyDType(py::detail::array_descriptor_proxy(proxy->descr)),
            num_elements, (proxy->flags & kUsableInPlace) == kUsableInPlace,
            (proxy->flags & Numpy::NPY_ARRAY_WRITEABLE_) != 0, nullptr};
  }
  if (!DLPackTensor::IsOffered(object)) {
    ThrowIfError(InvalidArgumentError(
        Title(whole) + " must be C-contiguous " + AcceptedDTypes(variable) + " like variable " +
        variable.ToString() + ", in a numpy array or a tensor with __dlpack__, got " +
        TypeName(object) + " [SMB-E252]"));
  }
  std::string why_not;
  std::unique_ptr<DLPackTensor> tensor = DLPackTensor::Take(object, &why_not);
  if (tensor == nullptr) {
    ThrowIfError(InvalidArgumentError(Title(whole) + ", a " + TypeName(object) +
                                      ", cannot be used as variable " + variable.ToString() +
                                      ": " + why_not + " [SMB-E254]"));
  }
  tensors_.push_back(std::move(tensor));
  const DLPackTensor& taken = *tensors_.back();
  return {taken.data(), taken.dtype(), taken.num_elements(), taken.usable_in_place(),
          taken.writeable(), &taken};
}

std::string Buffers::Title(bool whole) const {
  return whole ? "array " + std::to_string(spans_.size()) : "the array";
}

std::vector<ConstSpan> Buffers::ConstSpans() const {
  std::vector<ConstSpan> spans;
  spans.reserve(spans_.size());
  for (const Span& span : spans_) {
    spans.push_back({span.variable, span.first, span.count, span.data, span.wide});
  }
  return spans;
}

std::vector<ConstSpan> Buffers::AveragedSpans() const {
  std::vector<ConstSpan> spans;
  spans.reserve(spans_.size());
  for (const Span& span : spans_) {
    if (!IsAveraged(layout_.variables()[span.variable].dtype)) continue;
    spans.push_back({span.variable, span.first, span.count, span.data, span.wide});
  }
  return spans;
}

std::vector<void*> Buffers::AveragedPointers() const {
  std::vector<void*> pointers;
  pointers.reserve(spans_.size());
  for (const Span& span : spans_) {
    if (IsAveraged(layout_.variables()[span.variable].dtype)) pointers.push_back(span.data);
  }
  return pointers;
}

}  // namespace tf_smb
