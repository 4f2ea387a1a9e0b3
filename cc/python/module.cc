// tf_smb._smb: the core, for Python. Thin: converts arguments, gives up the GIL
// around every call that can wait, turns a Status into an exception in one place.
// The public, documented classes are in tf_smb/*.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/bench/memory_limit.h"
#include "cc/box/exchange_kernel.h"
#include "cc/client/attached_segment.h"
#include "cc/client/client.h"
#include "cc/client/segment_registry.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/server/server.h"
#include "cc/transport/registry.h"

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

void ThrowIfError(const Status& status) {
  if (!status.ok()) throw StatusException(status);
}

template <typename T>
T ValueOrThrow(Result<T> result) {
  ThrowIfError(result.status());
  return std::move(result).value();
}

// The one map from codes to exceptions is tf_smb.errors.from_status.
void TranslateException(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const StatusException& exception) {
    const py::object error = py::module_::import("tf_smb.errors")
                                 .attr("from_status")(StatusCodeName(exception.status().code()),
                                                      exception.status().message());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

constexpr int kInPlace = py::array::c_style | py::detail::npy_api::NPY_ARRAY_ALIGNED_;

bool UsableInPlace(const py::array& array) { return (array.flags() & kInPlace) == kInPlace; }

std::string Describe(const py::object& object) {
  if (!py::isinstance<py::array>(object)) {
    return py::str(py::type::of(object).attr("__name__")).cast<std::string>();
  }
  const auto array = py::reinterpret_borrow<py::array>(object);
  return py::str(array.dtype()).cast<std::string>() + " of " + std::to_string(array.size()) +
         " elements" + (UsableInPlace(array) ? "" : ", not C-contiguous and aligned");
}

// Checks that `arrays` are what the layout says, before any pointer is taken.
void CheckArrays(const Layout& layout, const std::vector<py::object>& arrays, bool writeable) {
  if (arrays.size() != layout.variables().size()) {
    ThrowIfError(InvalidArgumentError("the segment has " +
                                      std::to_string(layout.variables().size()) +
                                      " variables, got " + std::to_string(arrays.size()) +
                                      " arrays"));
  }
  for (size_t i = 0; i < arrays.size(); ++i) {
    const Variable& variable = layout.variables()[i];
    const auto array = py::reinterpret_borrow<py::array>(arrays[i]);
    // By equal types, not one type object: an array that was pickled has its own.
    const bool fits = py::isinstance<py::array_t<float>>(arrays[i]) &&
                      static_cast<uint64_t>(array.size()) == variable.num_elements &&
                      UsableInPlace(array);
    if (!fits) {
      ThrowIfError(InvalidArgumentError(
          "array " + std::to_string(i) + " must be C-contiguous float32 like variable " +
          variable.ToString() + ", got " + Describe(arrays[i])));
    }
    if (writeable && !array.writeable()) {
      ThrowIfError(InvalidArgumentError("array " + std::to_string(i) + " is read-only"));
    }
  }
}

std::vector<const float*> ConstPointers(const Layout& layout,
                                        const std::vector<py::object>& arrays) {
  CheckArrays(layout, arrays, /*writeable=*/false);
  std::vector<const float*> pointers;
  for (const py::object& array : arrays) {
    pointers.push_back(
        static_cast<const float*>(py::reinterpret_borrow<py::array>(array).data()));
  }
  return pointers;
}

std::vector<float*> MutablePointers(const Layout& layout,
                                    const std::vector<py::object>& arrays) {
  CheckArrays(layout, arrays, /*writeable=*/true);
  std::vector<float*> pointers;
  for (const py::object& array : arrays) {
    pointers.push_back(
        static_cast<float*>(py::reinterpret_borrow<py::array>(array).mutable_data()));
  }
  return pointers;
}

OnExisting ParseOnExisting(const std::string& text) {
  if (text == "fail") return OnExisting::kFail;
  if (text == "resume") return OnExisting::kResume;
  if (text == "replace") return OnExisting::kReplace;
  ThrowIfError(InvalidArgumentError("on_existing must be 'fail', 'resume' or 'replace', got '" +
                                    text + "'"));
  return OnExisting::kFail;
}

MoveKind ParseMoveKind(const std::string& text) {
  if (text == "elastic") return MoveKind::kElastic;
  if (text == "delta") return MoveKind::kDelta;
  ThrowIfError(InvalidArgumentError("a rule kind is 'elastic' or 'delta', got '" + text + "'"));
  return MoveKind::kElastic;
}

const char* StateName(MemberState state) {
  switch (state) {
    case MemberState::kFree: return "free";
    case MemberState::kLive: return "live";
    case MemberState::kLeft: return "left";
    case MemberState::kDead: return "dead";
  }
  return "damaged";
}

const char* OutcomeName(ExchangeOutcome outcome) {
  switch (outcome) {
    case ExchangeOutcome::kMoved: return "moved";
    case ExchangeOutcome::kUnchanged: return "unchanged";
    case ExchangeOutcome::kSkipped: return "skipped";
  }
  return "unknown";
}

py::dict ToDict(const MemberInfo& member) {
  py::dict dict;
  dict["worker_index"] = member.worker_index;
  dict["state"] = StateName(member.state);
  dict["process_id"] = member.process_id;
  dict["incarnation"] = member.incarnation;
  dict["steps"] = member.steps;
  dict["exchanges"] = member.exchanges;
  dict["arrived"] = member.arrived;
  dict["finished"] = member.finished;
  dict["training"] = member.training;
  return dict;
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

py::dict ToDict(const ExchangeStats& stats) {
  py::dict dict;
  dict["exchanges"] = stats.exchanges;
  dict["skipped_exchanges"] = stats.skipped_exchanges;
  dict["skipped_chunks"] = stats.skipped_chunks;
  dict["times_fenced"] = stats.times_fenced;
  dict["exchange_s"] = stats.exchange_s;
  dict["last_staleness"] = stats.last_staleness;
  dict["last_rate"] = stats.last_rate;
  dict["last_num_live"] = stats.last_num_live;
  return dict;
}

// An attached segment with the number that graphs know it by.
class PySegment {
 public:
  explicit PySegment(std::shared_ptr<AttachedSegment> segment)
      : segment_(std::move(segment)), handle_(RegisterSegment(segment_)) {}
  ~PySegment() {
    UnregisterSegment(handle_);
    py::gil_scoped_release release;
    segment_.reset();
  }
  PySegment(const PySegment&) = delete;
  PySegment& operator=(const PySegment&) = delete;

  int64_t handle() const { return handle_; }
  AttachedSegment* operator->() const { return segment_.get(); }
  SegmentControl* control() const {
    ThrowIfError(segment_->CheckProcess());
    return segment_->control();
  }
  const Layout& layout() const { return control()->layout(); }
  MemberId member() const { return ValueOrThrow(segment_->member()); }

 private:
  std::shared_ptr<AttachedSegment> segment_;
  const int64_t handle_;
};

OpenRequest MakeOpenRequest(std::string name, std::string job_id, uint32_t num_workers,
                            const std::string& on_existing,
                            const std::vector<std::pair<std::string, std::vector<int64_t>>>& specs) {
  OpenRequest request;
  request.segment_name = std::move(name);
  request.job_id = std::move(job_id);
  request.num_workers = num_workers;
  request.on_existing = ParseOnExisting(on_existing);
  std::vector<Variable> variables;
  for (const auto& [variable_name, shape] : specs) {
    Variable variable;
    variable.name = variable_name;
    variable.shape = shape;
    variables.push_back(std::move(variable));
  }
  request.layout = ValueOrThrow(Layout::Create(std::move(variables)));
  return request;
}

void DefineServer(py::module_* module) {
  py::class_<Server>(*module, "Server")
      .def(py::init([](const std::string& address, double lease_s) {
             return ValueOrThrow(Server::Start({address, lease_s}));
           }),
           py::arg("address"), py::arg("lease_s"))
      .def_property_readonly("address", &Server::address)
      .def("list", [](Server& server) { return ToList(server.List()); })
      .def("mark_worker_absent", &Server::MarkWorkerAbsent, py::arg("worker_index"),
           py::call_guard<py::gil_scoped_release>());
}

void DefineClient(py::module_* module) {
  py::class_<Client>(*module, "Client")
      .def(py::init([](const std::string& address, double timeout_s) {
             py::gil_scoped_release release;
             return ValueOrThrow(Client::Connect(address, Deadline::After(timeout_s)));
           }),
           py::arg("address"), py::arg("timeout_s"))
      .def(
          "open",
          [](Client& client, std::string name, std::string job_id, uint32_t num_workers,
             const std::string& on_existing,
             const std::vector<std::pair<std::string, std::vector<int64_t>>>& variables,
             int num_threads, double timeout_s) {
            const OpenRequest request = MakeOpenRequest(std::move(name), std::move(job_id),
                                                        num_workers, on_existing, variables);
            py::gil_scoped_release release;
            return std::make_unique<PySegment>(ValueOrThrow(
                client.Open(request, num_threads, Deadline::After(timeout_s))));
          },
          py::arg("name"), py::arg("job_id"), py::arg("num_workers"), py::arg("on_existing"),
          py::arg("variables"), py::arg("num_threads"), py::arg("timeout_s"))
      .def(
          "attach",
          [](Client& client, const std::string& name, int num_threads, double timeout_s) {
            py::gil_scoped_release release;
            return std::make_unique<PySegment>(
                ValueOrThrow(client.Attach(name, num_threads, Deadline::After(timeout_s))));
          },
          py::arg("name"), py::arg("num_threads"), py::arg("timeout_s"))
      .def(
          "free",
          [](Client& client, const std::string& name, double timeout_s) {
            py::gil_scoped_release release;
            ThrowIfError(client.Free(name, Deadline::After(timeout_s)));
          },
          py::arg("name"), py::arg("timeout_s"))
      .def(
          "list",
          [](Client& client, double timeout_s) {
            return ToList(ValueOrThrow(client.List(Deadline::After(timeout_s))));
          },
          py::arg("timeout_s"));
}

void DefineSegment(py::module_* module) {
  py::class_<PySegment> segment(*module, "Segment");
  segment.def_property_readonly("handle", &PySegment::handle)
      .def_property_readonly("name", [](PySegment& s) { return s.control()->name(); })
      .def_property_readonly("job_id", [](PySegment& s) { return s.control()->job_id(); })
      .def_property_readonly("num_workers", [](PySegment& s) { return s.control()->num_workers(); })
      .def_property_readonly("lease_s", [](PySegment& s) { return s.control()->lease_s(); })
      .def_property_readonly("version", [](PySegment& s) { return s.control()->version(); })
      .def_property_readonly("created", [](PySegment& s) { return s->created(); })
      .def_property_readonly("seeded", [](PySegment& s) { return s.control()->seeded(); })
      .def_property_readonly("joined", [](PySegment& s) { return s->joined(); })
      .def_property_readonly("worker_index",
                             [](PySegment& s) { return ValueOrThrow(s->worker_index()); })
      .def_property_readonly("incarnation", [](PySegment& s) { return s.member().incarnation; })
      .def_property_readonly("num_live", [](PySegment& s) { return s.control()->CountLive(); })
      .def_property_readonly("variables", [](PySegment& s) {
        py::list list;
        for (const Variable& variable : s.layout().variables()) {
          list.append(py::make_tuple(variable.name, py::tuple(py::cast(variable.shape))));
        }
        return list;
      });

  // Members.
  segment
      .def(
          "join",
          [](PySegment& s, std::optional<uint32_t> worker_index) {
            py::gil_scoped_release release;
            ThrowIfError(s->Join(worker_index));
          },
          py::arg("worker_index"))
      .def("leave", [](PySegment& s) { s->Leave(); }, py::call_guard<py::gil_scoped_release>())
      .def("leave_unless_last",
           [](PySegment& s) { return s.control()->LeaveUnlessLast(s.member()); })
      .def("set_training",
           [](PySegment& s, bool training) { s.control()->SetTraining(s.member(), training); })
      .def("members",
           [](PySegment& s) {
             py::list list;
             for (const MemberInfo& member : s.control()->Members()) list.append(ToDict(member));
             return list;
           })
      .def("mark_absent", [](PySegment& s, uint32_t index) { s.control()->MarkAbsent(index); })
      .def("is_absent", [](PySegment& s, uint32_t index) { return s.control()->IsAbsent(index); })
      .def("arrive", [](PySegment& s) { return s.control()->Arrive(s.member()); })
      .def("try_close_meeting",
           [](PySegment& s, uint64_t meeting) { return s.control()->TryCloseMeeting(meeting); })
      .def_property_readonly("fewest_steps", [](PySegment& s) { return s.control()->FewestSteps(); })
      .def("finish_meeting",
           [](PySegment& s, uint64_t meeting) { s.control()->FinishMeeting(s.member(), meeting); })
      .def("meeting_finished",
           [](PySegment& s, uint64_t meeting) { return s.control()->MeetingFinished(meeting); })
      .def_property_readonly("changes", [](PySegment& s) { return s.control()->changes(); })
      .def(
          "wait_for_change",
          [](PySegment& s, uint32_t seen, double timeout_s) {
            py::gil_scoped_release release;
            s.control()->WaitForChange(seen, static_cast<int64_t>(timeout_s * kNanosPerSecond));
          },
          py::arg("seen"), py::arg("timeout_s"));

  // Weights.
  segment
      .def(
          "set_rule",
          [](PySegment& s, const std::string& kind, float rate, bool per_worker) {
            ThrowIfError(s->SetRule({ParseMoveKind(kind), rate, per_worker}));
          },
          py::arg("kind"), py::arg("rate"), py::arg("per_worker"))
      .def(
          "try_seed",
          [](PySegment& s, const std::vector<py::object>& arrays, double timeout_s) {
            const auto pointers = ConstPointers(s.layout(), arrays);
            py::gil_scoped_release release;
            return ValueOrThrow(s->TrySeed(pointers, Deadline::After(timeout_s)));
          },
          py::arg("arrays"), py::arg("timeout_s"))
      .def(
          "read",
          [](PySegment& s, const std::vector<py::object>& arrays, double timeout_s) {
            const auto pointers = MutablePointers(s.layout(), arrays);
            py::gil_scoped_release release;
            ThrowIfError(s->Read(pointers, Deadline::After(timeout_s)));
          },
          py::arg("arrays"), py::arg("timeout_s"))
      .def(
          "write",
          [](PySegment& s, const std::vector<py::object>& arrays, double timeout_s) {
            const auto pointers = ConstPointers(s.layout(), arrays);
            py::gil_scoped_release release;
            ThrowIfError(s->Write(pointers, Deadline::After(timeout_s)));
          },
          py::arg("arrays"), py::arg("timeout_s"))
      .def(
          "rebase",
          [](PySegment& s, const std::vector<py::object>& arrays) {
            const auto pointers = ConstPointers(s.layout(), arrays);
            py::gil_scoped_release release;
            ThrowIfError(s->Rebase(pointers));
          },
          py::arg("arrays"))
      .def(
          "exchange",
          [](PySegment& s, const std::vector<py::object>& arrays, uint64_t steps) {
            const auto out = MutablePointers(s.layout(), arrays);
            const auto local = ConstPointers(s.layout(), arrays);
            py::gil_scoped_release release;
            return OutcomeName(
                ValueOrThrow(s->Exchange(local, out, MoveOutput::kValue, steps)));
          },
          py::arg("arrays"), py::arg("steps"))
      .def("check_arrays",
           [](PySegment& s, const std::vector<py::object>& arrays, bool writeable) {
             CheckArrays(s.layout(), arrays, writeable);
           },
           py::arg("arrays"), py::arg("writeable"))
      .def("stats", [](PySegment& s) { return ToDict(s->stats()); })
      .def("raise_last_error", [](PySegment& s) { ThrowIfError(s->last_error()); });
}

void DefineTools(py::module_* module) {
  module->def("kernel_instruction_set", &KernelInstructionSet);
  module->def("transports", [] {
    py::list list;
    for (Transport* transport : Transports()) {
      const Viability viability = transport->IsViable();
      list.append(py::make_tuple(transport->scheme(), viability.viable, viability.reason));
    }
    return list;
  });
  module->def("available_cores", &AvailableCores);
  module->def(
      "memory_limit_pass",
      [](float rate, py::array_t<float, py::array::c_style> a,
         py::array_t<float, py::array::c_style> b) {
        if (a.size() != b.size()) {
          ThrowIfError(InvalidArgumentError("both arrays must have the same size"));
        }
        float* const a_data = a.mutable_data();
        float* const b_data = b.mutable_data();
        const auto count = static_cast<size_t>(a.size());
        py::gil_scoped_release release;
        MemoryLimitPass(rate, a_data, b_data, count);
      },
      py::arg("rate"), py::arg("a").noconvert(), py::arg("b").noconvert());
  module->def("raise_status", [](int code, const std::string& message) {
    ThrowIfError(Status(static_cast<StatusCode>(code), message));
  });
}

}  // namespace

PYBIND11_MODULE(_smb, module) {
  module.doc() = "The core of tf_smb; use the classes of the package tf_smb instead.";
  py::register_exception_translator(&TranslateException);
  DefineServer(&module);
  DefineClient(&module);
  DefineSegment(&module);
  DefineTools(&module);
}

}  // namespace tf_smb
