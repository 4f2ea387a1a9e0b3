// A wait of the core that Python can interrupt: Ctrl-C, and whatever else a signal handler
// or the caller's `announce` raises.
#ifndef TF_SMB_CC_PYTHON_PYTHON_WAIT_H_
#define TF_SMB_CC_PYTHON_PYTHON_WAIT_H_

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <utility>

#include "cc/client/waiting.h"
#include "cc/python/exceptions.h"

namespace tf_smb {

// Made and destroyed with the GIL held.
class PythonWait {
 public:
  // `announce`: called with a line of text; or None.
  PythonWait(double timeout_s, pybind11::object announce);
  PythonWait(const PythonWait&) = delete;
  PythonWait& operator=(const PythonWait&) = delete;

  // Runs body(options) without the GIL, and returns what it returns.
  template <typename Body>
  auto Run(Body body) {
    return WithoutGil([&] { return body(options_); });
  }
  bool interrupted() const { return raised_.has_value(); }
  // After Run: throws what Python raised meanwhile. It comes before the error that the
  // core made of it.
  void ThrowIfInterrupted();

 private:
  Status Poll();
  void Announce(const std::string& line);

  const pybind11::object announce_;
  WaitOptions options_;
  std::optional<pybind11::error_already_set> raised_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_PYTHON_PYTHON_WAIT_H_
