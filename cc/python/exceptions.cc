#include "cc/python/exceptions.h"

#include <exception>
#include <utility>

namespace py = pybind11;

namespace tf_smb {
namespace {

class StatusException : public std::exception {
 public:
  explicit StatusException(Status status) : status_(std::move(status)) {}
  const char* what() const noexcept override { return status_.message().c_str(); }
  const Status& status() const { return status_; }

 private:
  const Status status_;
};

// The one map from codes to exceptions is tf_smb.errors.from_status.
void Translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const StatusException& exception) {
    const Status& status = exception.status();
    const py::object error =
        py::module_::import("tf_smb.errors")
            .attr("from_status")(StatusCodeName(status.code()), status.message(),
                                 FailureScopeName(status.scope()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

}  // namespace

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw StatusException(status);
}

void RegisterExceptions() { py::register_exception_translator(&Translate); }

}  // namespace tf_smb
