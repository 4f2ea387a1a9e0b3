// What belongs to no segment: what this machine offers, and what tests need.
#include <pybind11/pybind11.h>

#include <string>

#include "cc/box/exchange_kernel.h"
#include "cc/common/status.h"
#include "cc/common/thread_pool.h"
#include "cc/python/exceptions.h"
#include "cc/python/module.h"
#include "cc/transport/registry.h"

namespace py = pybind11;

namespace tf_smb {
namespace {

py::list Names(const Capabilities& capabilities) {
  py::list names;
  if (capabilities.shared_memory) names.append("shared memory");
  if (capabilities.one_sided_read) names.append("one-sided read");
  if (capabilities.one_sided_write) names.append("one-sided write");
  if (capabilities.registration) names.append("registered memory");
  if (capabilities.remote) names.append("other hosts");
  return names;
}

py::list ListTransports() {
  py::list list;
  for (Transport* const transport : Transports()) {
    const Viability viability = transport->IsViable();
    list.append(py::make_tuple(transport->scheme(), viability.viable, viability.reason,
                               Names(transport->capabilities())));
  }
  return list;
}

void RaiseStatus(int code, const std::string& message, int scope) {
  ThrowIfError(
      Status(static_cast<StatusCode>(code), message, static_cast<FailureScope>(scope)));
}

}  // namespace

void DefineTools(py::module_* module) {
  module->def("kernel_instruction_set", &KernelInstructionSet);
  module->def("transports", &ListTransports);
  module->def("available_cores", &AvailableCores);
  module->def("raise_status", &RaiseStatus, py::arg("code"), py::arg("message"),
              py::arg("scope") = 0);
}

}  // namespace tf_smb
