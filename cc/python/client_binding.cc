// The classes tf_smb._smb.Server and tf_smb._smb.Client.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/client/client.h"
#include "cc/common/clock.h"
#include "cc/python/exceptions.h"
#include "cc/python/module.h"
#include "cc/python/py_segment.h"
#include "cc/server/server.h"

namespace py = pybind11;

namespace tf_smb {
namespace {

// Name, shape and name of the dtype.
using VariableSpec = std::tuple<std::string, std::vector<int64_t>, std::string>;

OnExisting ParseOnExisting(const std::string& text) {
  if (text == "fail") return OnExisting::kFail;
  if (text == "resume") return OnExisting::kResume;
  if (text == "replace") return OnExisting::kReplace;
  ThrowIfError(InvalidArgumentError("on_existing must be 'fail', 'resume' or 'replace', got '" +
                                    text + "' [SMB-E263]"));
  return OnExisting::kFail;
}

py::list ToList(const std::vector<SegmentSummary>& summaries) {
  py::list list;
  for (const SegmentSummary& summary : summaries) {
    py::dict dict;
    dict["name"] = summary.name;
    dict["job_id"] = summary.job_id;
    dict["center_bytes"] = summary.center_bytes;
    dict["live_members"] = summary.live_members;
    list.append(dict);
  }
  return list;
}

Layout MakeLayout(const std::vector<VariableSpec>& specs) {
  std::vector<Variable> variables;
  for (const auto& [name, shape, dtype_name] : specs) {
    const std::optional<DType> dtype = DTypeFromName(dtype_name);
    if (!dtype.has_value()) {
      ThrowIfError(InvalidArgumentError("variable '" + name + "' has dtype " + dtype_name +
                                        "; a segment can hold " + AllDTypeNames() + " [SMB-E264]"));
    }
    Variable variable;
    variable.name = name;
    variable.dtype = *dtype;
    variable.shape = shape;
    variables.push_back(std::move(variable));
  }
  return ValueOrThrow(Layout::Create(std::move(variables)));
}

std::unique_ptr<Server> StartServer(const std::string& address, double lease_s,
                                    const std::string& directory) {
  ServerOptions options;
  options.address = address;
  options.lease_s = lease_s;
  options.directory = directory;
  return WithoutGil([&] { return ValueOrThrow(Server::Start(options)); });
}

std::unique_ptr<Client> Connect(const std::string& address, double timeout_s) {
  return WithoutGil(
      [&] { return ValueOrThrow(Client::Connect(address, Deadline::After(timeout_s))); });
}

std::unique_ptr<PySegment> Open(Client& client, const std::string& name,
                                const std::string& job_id, uint32_t num_workers,
                                const std::string& on_existing,
                                const std::vector<VariableSpec>& variables, bool sparse,
                                int num_threads, double timeout_s) {
  OpenRequest request;
  request.segment_name = name;
  request.job_id = job_id;
  request.num_workers = num_workers;
  request.on_existing = ParseOnExisting(on_existing);
  request.layout = MakeLayout(variables);
  request.sparse = sparse;
  return std::make_unique<PySegment>(WithoutGil([&] {
    return ValueOrThrow(client.Open(request, num_threads, Deadline::After(timeout_s)));
  }));
}

std::unique_ptr<PySegment> Attach(Client& client, const std::string& name, int num_threads,
                                  double timeout_s) {
  return std::make_unique<PySegment>(WithoutGil([&] {
    return ValueOrThrow(client.Attach(name, num_threads, Deadline::After(timeout_s)));
  }));
}

void Free(Client& client, const std::string& name, double timeout_s) {
  WithoutGil([&] { ThrowIfError(client.Free(name, Deadline::After(timeout_s))); });
}

}  // namespace

void DefineServer(py::module_* module) {
  py::class_<Server>(*module, "Server")
      .def(py::init(&StartServer), py::arg("address"), py::arg("lease_s"), py::arg("directory"))
      .def_property_readonly("address", &Server::address)
      .def_property_readonly("refused_files", &Server::refused_files)
      .def("list",
           [](Server& server) { return ToList(WithoutGil([&] { return server.List(); })); })
      .def("mark_worker_absent", &Server::MarkWorkerAbsent, py::arg("worker_index"),
           py::call_guard<py::gil_scoped_release>());
}

void DefineClient(py::module_* module) {
  py::class_<Client>(*module, "Client")
      .def(py::init(&Connect), py::arg("address"), py::arg("timeout_s"))
      .def("open", &Open, py::arg("name"), py::arg("job_id"), py::arg("num_workers"),
           py::arg("on_existing"), py::arg("variables"), py::arg("sparse"),
           py::arg("num_threads"), py::arg("timeout_s"))
      .def("attach", &Attach, py::arg("name"), py::arg("num_threads"), py::arg("timeout_s"))
      .def("free", &Free, py::arg("name"), py::arg("timeout_s"))
      .def(
          "list",
          [](Client& client, double timeout_s) {
            return ToList(WithoutGil(
                [&] { return ValueOrThrow(client.List(Deadline::After(timeout_s))); }));
          },
          py::arg("timeout_s"));
}

}  // namespace tf_smb
