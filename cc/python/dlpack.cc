#include "cc/python/dlpack.h"

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace tf_smb {

// --- The binary interface, by the names of dlpack.h ----------------------------

namespace {

constexpr int32_t kCpu = 1;  // DLDeviceType
constexpr uint32_t kMajorVersion = 1;
constexpr uint64_t kReadOnlyFlag = 1;

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kComplex = 5,
  kBool = 6,
};

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

}  // namespace

struct DLPackTensor::Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: C-contiguous
  uint64_t byte_offset;
};

namespace {

// DLManagedTensor and DLManagedTensorVersioned.
template <typename TensorType>
struct PlainManaged {
  static constexpr const char* kName = "dltensor";
  static constexpr const char* kUsedName = "used_dltensor";
  TensorType tensor;
  void* context;
  void (*deleter)(PlainManaged*);

  bool IsReadable() const { return true; }
  // It cannot say; JAX's and TensorFlow's are not.
  bool IsWriteable() const { return false; }
};

template <typename TensorType>
struct VersionedManaged {
  static constexpr const char* kName = "dltensor_versioned";
  static constexpr const char* kUsedName = "used_dltensor_versioned";
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(VersionedManaged*);
  uint64_t flags;
  TensorType tensor;

  bool IsReadable() const { return major == kMajorVersion; }
  bool IsWriteable() const { return (flags & kReadOnlyFlag) == 0; }
};

std::optional<DType> ToDType(const DataType& type) {
  struct Entry {
    uint8_t code;
    uint8_t bits;
    DType dtype;
  };
  static constexpr Entry kEntries[] = {
      {kFloat, 32, DType::kFloat32},      {kFloat, 64, DType::kFloat64},
      {kFloat, 16, DType::kFloat16},      {kBFloat, 16, DType::kBFloat16},
      {kBool, 8, DType::kBool},           {kInt, 8, DType::kInt8},
      {kInt, 16, DType::kInt16},          {kInt, 32, DType::kInt32},
      {kInt, 64, DType::kInt64},          {kUInt, 8, DType::kUInt8},
      {kUInt, 16, DType::kUInt16},        {kUInt, 32, DType::kUInt32},
      {kUInt, 64, DType::kUInt64},        {kComplex, 64, DType::kComplex64},
      {kComplex, 128, DType::kComplex128},
  };
  if (type.lanes != 1) return std::nullopt;
  for (const Entry& entry : kEntries) {
    if (entry.code == type.code && entry.bits == type.bits) return entry.dtype;
  }
  return std::nullopt;
}

bool IsCContiguous(int32_t ndim, const int64_t* shape, const int64_t* strides) {
  if (strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

// Versioned if the object can, which older ones do not know the argument for.
py::object MakeCapsule(py::handle object) {
  try {
    return object.attr("__dlpack__")(py::arg("max_version") = py::make_tuple(kMajorVersion, 0));
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  return object.attr("__dlpack__")();
}

std::string OnAnotherDevice(int32_t type) {
  return "it is on a device of DLPack's type " + std::to_string(type) +
         ", not in the CPU's memory (type 1): copy it there first";
}

}  // namespace

// --- The consumer ----------------------------------------------------------------

template <typename Managed>
class DLPackTensor::Owner : public DLPackTensor {
 public:
  static std::unique_ptr<DLPackTensor> Take(PyObject* capsule, std::string* why_not) {
    auto* const managed =
        static_cast<Managed*>(PyCapsule_GetPointer(capsule, Managed::kName));
    if (managed == nullptr) throw py::error_already_set();
    // What is not taken remains the capsule's, which then deletes it.
    if (!managed->IsReadable()) {
      *why_not = "its DLPack capsule is of another version than " + std::to_string(kMajorVersion);
      return nullptr;
    }
    if (managed->tensor.device.type != kCpu) {
      *why_not = OnAnotherDevice(managed->tensor.device.type);
      return nullptr;
    }
    if (PyCapsule_SetName(capsule, Managed::kUsedName) != 0) throw py::error_already_set();
    return std::unique_ptr<DLPackTensor>(new Owner(managed));
  }
  ~Owner() override {
    if (managed_->deleter != nullptr) managed_->deleter(managed_);
  }

 private:
  explicit Owner(Managed* managed) : managed_(managed) {
    Describe(managed->tensor);
    writeable_ = managed->IsWriteable();
  }
  Managed* const managed_;
};

bool DLPackTensor::IsOffered(py::handle object) { return py::hasattr(object, "__dlpack__"); }

std::unique_ptr<DLPackTensor> DLPackTensor::Take(py::handle object, std::string* why_not) {
  try {
    if (py::hasattr(object, "__dlpack_device__")) {
      const py::object device = object.attr("__dlpack_device__")();
      const auto type = py::int_(device[py::int_(0)]).cast<int32_t>();
      if (type != kCpu) {
        *why_not = OnAnotherDevice(type);
        return nullptr;
      }
    }
    const py::object capsule = MakeCapsule(object);
    if (PyCapsule_IsValid(capsule.ptr(), VersionedManaged<Tensor>::kName)) {
      return Owner<VersionedManaged<Tensor>>::Take(capsule.ptr(), why_not);
    }
    if (PyCapsule_IsValid(capsule.ptr(), PlainManaged<Tensor>::kName)) {
      return Owner<PlainManaged<Tensor>>::Take(capsule.ptr(), why_not);
    }
    *why_not = "its __dlpack__() gave no DLPack capsule";
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // Ctrl-C
    *why_not = "its __dlpack__() raised " +
               py::str(error.type().attr("__name__")).cast<std::string>() + ": " +
               py::str(error.value()).cast<std::string>();
  }
  return nullptr;
}

void DLPackTensor::Describe(const Tensor& tensor) {
  // Null for an empty one, and arithmetic on it would not be defined.
  data_ = tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  dtype_ = ToDType(tensor.dtype);
  type_code_ = tensor.dtype.code;
  type_bits_ = tensor.dtype.bits;
  num_elements_ = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i) {
    num_elements_ *= static_cast<uint64_t>(tensor.shape[i]);
  }
  const uint64_t alignment =
      dtype_.has_value() ? std::min<uint64_t>(ElementBytes(*dtype_), alignof(double)) : 1;
  usable_in_place_ =
      num_elements_ == 0 || (IsCContiguous(tensor.ndim, tensor.shape, tensor.strides) &&
                             reinterpret_cast<uintptr_t>(data_) % alignment == 0);
}

std::string DLPackTensor::DTypeText() const {
  if (dtype_.has_value()) return DTypeName(*dtype_);
  return "DLPack type " + std::to_string(type_code_) + " of " + std::to_string(type_bits_) +
         " bits";
}

}  // namespace tf_smb
