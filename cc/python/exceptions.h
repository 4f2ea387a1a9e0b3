// From a Status of the core to an exception of Python, in one place.
#ifndef TF_SMB_CC_PYTHON_EXCEPTIONS_H_
#define TF_SMB_CC_PYTHON_EXCEPTIONS_H_

#include <pybind11/pybind11.h>

#include <utility>

#include "cc/common/status.h"

namespace tf_smb {

// With or without the GIL. The exception becomes one of tf_smb.errors.
void ThrowIfError(const Status& status);

template <typename T>
T ValueOrThrow(Result<T> result) {
  ThrowIfError(result.status());
  return std::move(result).value();
}

// Runs body() while other Python threads may run. For everything that can wait: for
// memory, for a mutex, for another process.
template <typename Body>
auto WithoutGil(Body body) {
  const pybind11::gil_scoped_release release;
  return body();
}

// Once, when the module is made.
void RegisterExceptions();

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_EXCEPTIONS_H_
