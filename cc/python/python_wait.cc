#include "cc/python/python_wait.h"

namespace py = pybind11;

namespace tf_smb {

PythonWait::PythonWait(double timeout_s, py::object announce) : announce_(std::move(announce)) {
  options_.timeout_s = timeout_s;
  options_.poll = [this] { return Poll(); };
  if (!announce_.is_none()) {
    options_.announce = [this](const std::string& line) { Announce(line); };
  }
}

Status PythonWait::Poll() {
  if (!raised_.has_value()) {
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) raised_.emplace();
  }
  return raised_.has_value() ? FailedPreconditionError("interrupted [SMB-E260]") : Status::Ok();
}

void PythonWait::Announce(const std::string& line) {
  if (raised_.has_value()) return;
  const py::gil_scoped_acquire acquire;
  try {
    announce_(line);
  } catch (const py::error_already_set& error) {
    raised_.emplace(error);  // the next Poll ends the wait
  }
}

void PythonWait::ThrowIfInterrupted() {
  if (raised_.has_value()) throw py::error_already_set(*raised_);
}

}  // namespace tf_smb
