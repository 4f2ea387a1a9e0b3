// The class tf_smb._smb.Segment.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/client/attached_segment.h"
#include "cc/common/clock.h"
#include "cc/python/buffers.h"
#include "cc/python/exceptions.h"
#include "cc/python/module.h"
#include "cc/python/py_segment.h"
#include "cc/python/python_wait.h"

namespace py = pybind11;

namespace tf_smb {
namespace {

MoveKind ParseMoveKind(const std::string& text) {
  if (text == "elastic") return MoveKind::kElastic;
  if (text == "delta") return MoveKind::kDelta;
  ThrowIfError(InvalidArgumentError("a rule kind is 'elastic' or 'delta', got '" + text + "'"
                                    " [SMB-E261]"));
  return MoveKind::kElastic;
}

ScheduleUnit ParseUnit(const std::string& text) {
  if (text == "step") return ScheduleUnit::kSteps;
  if (text == "epoch") return ScheduleUnit::kEpochs;
  ThrowIfError(InvalidArgumentError("the unit of a schedule is 'step' or 'epoch', got '" + text +
                                    "' [SMB-E265]"));
  return ScheduleUnit::kSteps;
}

// begin, kind, rate, per_worker, atomic, synchronous, period.
using PhaseTuple = std::tuple<uint64_t, std::string, double, bool, bool, bool, uint64_t>;

FiniteCheck ParseFiniteCheck(const std::string& text) {
  if (text == "before") return FiniteCheck::kBefore;
  if (text == "during") return FiniteCheck::kDuring;
  ThrowIfError(
      InvalidArgumentError("a finite check is 'before' or 'during', got '" + text + "'"
                           " [SMB-E262]"));
  return FiniteCheck::kBefore;
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
    case ExchangeOutcome::kReplaced: return "replaced";
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
  dict["epoch"] = member.epoch;
  dict["batch"] = member.batch;
  dict["phase"] = member.phase;
  dict["exchanges"] = member.exchanges;
  dict["arrived"] = member.arrived;
  dict["finished"] = member.finished;
  dict["training"] = member.training;
  return dict;
}

py::dict ToDict(const ExchangeChange& change) {
  py::dict dict;
  dict["steps"] = change.steps;
  dict["phase"] = change.phase;
  dict["period"] = change.period;
  dict["rate"] = change.rate;
  dict["num_live"] = change.num_live;
  return dict;
}

py::dict ToDict(const ExchangeStats& stats) {
  py::dict dict;
  py::list changes;
  for (const ExchangeChange& change : stats.changes) changes.append(ToDict(change));
  dict["exchanges"] = stats.exchanges;
  dict["skipped_exchanges"] = stats.skipped_exchanges;
  dict["skipped_chunks"] = stats.skipped_chunks;
  dict["times_fenced"] = stats.times_fenced;
  dict["rounds"] = stats.rounds;
  dict["moved_bytes"] = stats.moved_bytes;
  dict["exchange_s"] = stats.exchange_s;
  dict["waiting_s"] = stats.waiting_s;
  dict["last_staleness"] = stats.last_staleness;
  dict["last_rate"] = stats.last_rate;
  dict["last_num_live"] = stats.last_num_live;
  dict["staleness_histogram"] = py::list(py::cast(stats.staleness_histogram));
  dict["changes"] = changes;
  dict["changes_forgotten"] = stats.changes_forgotten;
  return dict;
}

// body(control), without the GIL: over a network the control answers by messages, and over
// shared memory behind a mutex.
template <typename Body>
auto Control(const PySegment& s, Body body) {
  const auto segment = s.Get();
  return WithoutGil([&] { return body(segment->control()); });
}

// body(control, member).
template <typename Body>
auto AsMember(const PySegment& s, Body body) {
  const auto segment = s.Get();
  return WithoutGil(
      [&] { return body(segment->control(), ValueOrThrow(segment->member())); });
}

py::list Variables(const PySegment& s) {
  const auto segment = s.Get();
  py::list list;
  for (const Variable& variable : segment->layout().variables()) {
    list.append(py::make_tuple(variable.name, py::tuple(py::cast(variable.shape)),
                               DTypeName(variable.dtype)));
  }
  return list;
}

py::list Members(const PySegment& s) {
  py::list list;
  for (const MemberInfo& member : Control(s, [](auto* c) { return c->Members(); })) {
    list.append(ToDict(member));
  }
  return list;
}

// --- Weights -----------------------------------------------------------------

bool TrySeed(const PySegment& s, py::handle arrays, double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kRead);
  return WithoutGil([&] {
    return ValueOrThrow(segment->TrySeed(buffers.ConstSpans(), Deadline::After(timeout_s)));
  });
}

void ReadInto(AttachedSegment* segment, const Buffers& buffers, double timeout_s) {
  WithoutGil([&] {
    ThrowIfError(segment->Read(buffers.spans(), Deadline::After(timeout_s)));
  });
}

void WriteFrom(AttachedSegment* segment, const Buffers& buffers, double timeout_s) {
  WithoutGil([&] {
    ThrowIfError(segment->Write(buffers.ConstSpans(), Deadline::After(timeout_s)));
  });
}

void Read(const PySegment& s, py::handle arrays, double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kWrite);
  ReadInto(segment.get(), buffers, timeout_s);
}

void ReadSlice(const PySegment& s, uint64_t variable, uint64_t start, py::handle array,
               double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), variable, start, array, BufferAccess::kWrite);
  ReadInto(segment.get(), buffers, timeout_s);
}

void Write(const PySegment& s, py::handle arrays, double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kRead);
  WriteFrom(segment.get(), buffers, timeout_s);
}

void WriteSlice(const PySegment& s, uint64_t variable, uint64_t start, py::handle array,
                double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), variable, start, array, BufferAccess::kRead);
  WriteFrom(segment.get(), buffers, timeout_s);
}

void Accumulate(const PySegment& s, py::handle arrays, double scale, double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kRead);
  WithoutGil([&] {
    ThrowIfError(
        segment->Accumulate(buffers.AveragedSpans(), scale, Deadline::After(timeout_s)));
  });
}

void AccumulateSlice(const PySegment& s, uint64_t variable, uint64_t start, py::handle array,
                     double scale, double timeout_s) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), variable, start, array, BufferAccess::kRead);
  WithoutGil([&] {
    ThrowIfError(segment->Accumulate(buffers.ConstSpans(), scale, Deadline::After(timeout_s)));
  });
}

// The dtype, if the elements are there: before anybody makes an array for them.
const char* SliceDType(const PySegment& s, uint64_t variable, uint64_t start, uint64_t count) {
  const auto segment = s.Get();
  const uint32_t number = CheckVariable(segment->layout(), variable);
  ThrowIfError(CheckSpans(segment->layout(), std::vector<Span>{{number, start, count}}));
  return DTypeName(segment->layout().variables()[number].dtype);
}

void Axpy(const PySegment& s, double scale, const PySegment& source, double timeout_s) {
  const auto segment = s.Get();
  const auto other = source.Get();
  WithoutGil([&] {
    ThrowIfError(segment->Axpy(scale, other.get(), Deadline::After(timeout_s)));
  });
}

void Rebase(const PySegment& s, py::handle arrays) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kRead);
  WithoutGil([&] { ThrowIfError(segment->Rebase(buffers.ConstSpans())); });
}

const char* Exchange(const PySegment& s, py::handle arrays, uint64_t steps, uint64_t batches,
                     py::object announce) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kWrite);
  PythonWait wait(segment->round_timeout_s(), std::move(announce));
  const Result<ExchangeOutcome> outcome = wait.Run([&](const WaitOptions& options) {
    return segment->ExchangeScheduled(buffers.AveragedSpans(), buffers.AveragedPointers(),
                                      MoveOutput::kValue, steps, batches, options);
  });
  wait.ThrowIfInterrupted();
  return OutcomeName(ValueOrThrow(outcome));
}

void CheckArrays(const PySegment& s, py::handle arrays, bool writeable) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays,
                        writeable ? BufferAccess::kWrite : BufferAccess::kRead);
}

// --- The schedule ------------------------------------------------------------

void SetSchedule(const PySegment& s, const std::vector<PhaseTuple>& phases,
                 const std::string& unit, uint64_t first_position) {
  const auto segment = s.Get();
  std::vector<Phase> parsed;
  for (const auto& [begin, kind, rate, per_worker, atomic, synchronous, period] : phases) {
    parsed.push_back(
        {begin, {ParseMoveKind(kind), rate, per_worker, atomic, synchronous}, period});
  }
  const Schedule schedule = ValueOrThrow(Schedule::Create(std::move(parsed), ParseUnit(unit)));
  WithoutGil([&] { ThrowIfError(segment->SetSchedule(schedule, first_position)); });
}

bool IsDue(const PySegment& s, uint64_t steps, uint64_t batches) {
  const auto segment = s.Get();
  return WithoutGil([&] { return ValueOrThrow(segment->IsDue(steps, batches)); });
}

void BeginEpoch(const PySegment& s, uint64_t epoch, uint64_t batches) {
  const auto segment = s.Get();
  WithoutGil([&] { ThrowIfError(segment->BeginEpoch(epoch, batches)); });
}

void SetPeriod(const PySegment& s, uint64_t period) {
  const auto segment = s.Get();
  WithoutGil([&] { ThrowIfError(segment->SetPeriod(period)); });
}

void SetStatistics(const PySegment& s, const std::vector<bool>& statistics) {
  const auto segment = s.Get();
  WithoutGil([&] { ThrowIfError(segment->SetStatistics(statistics)); });
}

// --- Each other --------------------------------------------------------------

py::tuple Average(const PySegment& s, py::handle arrays, double weight, uint64_t steps,
                  double timeout_s, py::object announce) {
  const auto segment = s.Get();
  const Buffers buffers(segment->layout(), arrays, BufferAccess::kWrite);
  PythonWait wait(timeout_s, std::move(announce));
  const Result<RoundResult> result = wait.Run([&](const WaitOptions& options) {
    return segment->Average(buffers.AveragedSpans(), buffers.AveragedPointers(), weight, steps,
                            options);
  });
  wait.ThrowIfInterrupted();
  ThrowIfError(result.status());
  return py::make_tuple(result->round, result->missing);
}

void Barrier(const PySegment& s, const std::vector<uint32_t>& workers, double timeout_s,
             py::object announce) {
  const auto segment = s.Get();
  PythonWait wait(timeout_s, std::move(announce));
  const Status status = wait.Run(
      [&](const WaitOptions& options) { return segment->Barrier(workers, options); });
  wait.ThrowIfInterrupted();
  ThrowIfError(status);
}

uint64_t Lock(const PySegment& s, double lease_s, double timeout_s, py::object announce) {
  const auto segment = s.Get();
  PythonWait wait(timeout_s, std::move(announce));
  const Result<uint64_t> token = wait.Run(
      [&](const WaitOptions& options) { return segment->Lock(lease_s, options); });
  if (token.ok() && wait.interrupted()) {
    // Granted in the last moment: nobody would ever give it back.
    static_cast<void>(WithoutGil([&] { return segment->Unlock(*token); }));
  }
  wait.ThrowIfInterrupted();
  return ValueOrThrow(token);
}

void Unlock(const PySegment& s, uint64_t token) {
  const auto segment = s.Get();
  WithoutGil([&] { ThrowIfError(segment->Unlock(token)); });
}

uint64_t WaitForVersion(const PySegment& s, uint64_t version, double timeout_s) {
  const auto segment = s.Get();
  PythonWait wait(timeout_s, py::none());
  const Result<uint64_t> now = wait.Run(
      [&](const WaitOptions& options) { return segment->WaitForVersion(version, options); });
  wait.ThrowIfInterrupted();
  return ValueOrThrow(now);
}

// --- The class -----------------------------------------------------------------

void DefineProperties(py::class_<PySegment>* segment) {
  segment->def_property_readonly("handle", &PySegment::handle)
      .def_property_readonly(
          "name", [](PySegment& s) { return s.Get()->control()->name(); })
      .def_property_readonly(
          "job_id", [](PySegment& s) { return s.Get()->control()->job_id(); })
      .def_property_readonly(
          "num_workers", [](PySegment& s) { return s.Get()->control()->num_workers(); })
      .def_property_readonly(
          "lease_s", [](PySegment& s) { return s.Get()->control()->lease_s(); })
      .def_property_readonly("created", [](PySegment& s) { return s.Get()->created(); })
      .def_property_readonly(
          "center_bytes", [](PySegment& s) { return s.Get()->layout().size_bytes(); })
      .def_property_readonly("num_chunks",
                             [](PySegment& s) {
                               const uint64_t size_bytes = s.Get()->layout().size_bytes();
                               return (size_bytes + kChunkBytes - 1) / kChunkBytes;
                             })
      .def_property_readonly("variables", &Variables)
      .def_property_readonly(
          "version",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->version(); }); })
      .def_property_readonly(
          "seeded", [](PySegment& s) { return Control(s, [](auto* c) { return c->seeded(); }); })
      .def_property_readonly(
          "num_live",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->CountLive(); }); })
      .def_property_readonly(
          "rounds_closed",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->rounds_closed(); }); })
      .def_property_readonly(
          "lock_holder",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->LockHolder(); }); })
      .def_property_readonly("joined",
                             [](PySegment& s) { return s.GetInAnyProcess()->joined(); })
      .def_property_readonly("worker_index",
                             [](PySegment& s) { return ValueOrThrow(s.Get()->worker_index()); })
      .def_property_readonly("incarnation", [](PySegment& s) {
        return ValueOrThrow(s.Get()->member()).incarnation;
      });
}

void DefineMembers(py::class_<PySegment>* segment) {
  segment
      ->def(
          "join",
          [](PySegment& s, std::optional<uint32_t> worker_index) {
            const auto segment = s.Get();
            WithoutGil([&] { ThrowIfError(segment->Join(worker_index)); });
          },
          py::arg("worker_index"))
      .def("leave",
           [](PySegment& s) {
             const auto segment = s.GetInAnyProcess();
             WithoutGil([&] { segment->Leave(); });
           })
      .def("detach", &PySegment::Detach)
      .def("leave_unless_last",
           [](PySegment& s) {
             return AsMember(s, [](auto* c, auto member) { return c->LeaveUnlessLast(member); });
           })
      .def(
          "set_training",
          [](PySegment& s, bool training) {
            AsMember(s, [&](auto* c, auto member) { c->SetTraining(member, training); });
          },
          py::arg("training"))
      .def("members", &Members)
      .def(
          "mark_absent",
          [](PySegment& s, uint32_t worker_index) {
            Control(s, [&](auto* c) { c->MarkAbsent(worker_index); });
          },
          py::arg("worker_index"))
      .def(
          "is_absent",
          [](PySegment& s, uint32_t worker_index) {
            return Control(s, [&](auto* c) { return c->IsAbsent(worker_index); });
          },
          py::arg("worker_index"))
      .def("arrive",
           [](PySegment& s) {
             return AsMember(s, [](auto* c, auto member) { return c->Arrive(member); });
           })
      .def(
          "try_close_meeting",
          [](PySegment& s, uint64_t meeting) {
            return Control(s, [&](auto* c) { return c->TryCloseMeeting(meeting); });
          },
          py::arg("meeting"))
      .def_property_readonly(
          "fewest_steps",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->FewestSteps(); }); })
      .def(
          "finish_meeting",
          [](PySegment& s, uint64_t meeting) {
            AsMember(s, [&](auto* c, auto member) { c->FinishMeeting(member, meeting); });
          },
          py::arg("meeting"))
      .def(
          "meeting_finished",
          [](PySegment& s, uint64_t meeting) {
            return Control(s, [&](auto* c) { return c->MeetingFinished(meeting); });
          },
          py::arg("meeting"))
      .def_property_readonly(
          "changes",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->changes(); }); })
      .def(
          "wait_for_change",
          [](PySegment& s, uint32_t seen, double timeout_s) {
            Control(s, [&](auto* c) {
              c->WaitForChange(seen, static_cast<int64_t>(timeout_s * kNanosPerSecond));
            });
          },
          py::arg("seen"), py::arg("timeout_s"))
      .def("barrier", &Barrier, py::arg("workers"), py::arg("timeout_s"), py::arg("announce"))
      .def("lock", &Lock, py::arg("lease_s"), py::arg("timeout_s"), py::arg("announce"))
      .def("unlock", &Unlock, py::arg("token"))
      .def("wait_for_version", &WaitForVersion, py::arg("version"), py::arg("timeout_s"));
}

void DefineSchedule(py::class_<PySegment>* segment) {
  segment
      ->def("set_schedule", &SetSchedule, py::arg("phases"), py::arg("unit"),
            py::arg("first_position"))
      .def("is_due", &IsDue, py::arg("steps"), py::arg("batches"))
      .def("begin_epoch", &BeginEpoch, py::arg("epoch"), py::arg("batches"))
      .def("set_period", &SetPeriod, py::arg("period"))
      .def("set_statistics", &SetStatistics, py::arg("statistics"))
      .def(
          "set_round_timeout",
          [](PySegment& s, double seconds) { s.Get()->SetRoundTimeout(seconds); },
          py::arg("seconds"))
      .def_property_readonly(
          "center_phase",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->phase(); }); })
      .def_property_readonly("phase", [](PySegment& s) { return s.Get()->phase(); })
      .def_property_readonly("period", [](PySegment& s) { return s.Get()->period(); });
}

// What members tell each other.
void DefineWords(py::class_<PySegment>* segment) {
  segment
      ->def(
          "post_notice",
          [](PySegment& s, const std::string& text) {
            return AsMember(s, [&](auto* c, auto member) {
              return ValueOrThrow(c->PostNotice(member, text));
            });
          },
          py::arg("text"))
      .def("notice",
           [](PySegment& s) {
             const Notice notice = Control(s, [](auto* c) { return c->LastNotice(); });
             return py::make_tuple(notice.number, notice.text);
           })
      .def("request_stop",
           [](PySegment& s) {
             AsMember(s, [](auto* c, auto member) { c->RequestStop(member); });
           })
      .def_property_readonly(
          "stop_requested",
          [](PySegment& s) { return Control(s, [](auto* c) { return c->stop_requested(); }); })
      .def(
          "publish_steps",
          [](PySegment& s, uint64_t steps) {
            AsMember(s, [&](auto* c, auto member) { c->PublishSteps(member, steps); });
          },
          py::arg("steps"));
}

// Whatever takes the lock of exchanges gives up the GIL first: who holds that lock may be
// waiting for the GIL, to look for Ctrl-C.
void DefineWeights(py::class_<PySegment>* segment) {
  segment
      ->def(
          "set_rule",
          [](PySegment& s, const std::string& kind, double rate, bool per_worker, bool atomic,
             bool synchronous) {
            const auto segment = s.Get();
            const ExchangeRule rule{ParseMoveKind(kind), rate, per_worker, atomic, synchronous};
            WithoutGil([&] { ThrowIfError(segment->SetRule(rule)); });
          },
          py::arg("kind"), py::arg("rate"), py::arg("per_worker"), py::arg("atomic"),
          py::arg("synchronous"))
      .def(
          "set_finite_check",
          [](PySegment& s, const std::string& when) {
            const auto segment = s.Get();
            const FiniteCheck check = ParseFiniteCheck(when);
            WithoutGil([&] { ThrowIfError(segment->SetFiniteCheck(check)); });
          },
          py::arg("when"))
      .def("try_seed", &TrySeed, py::arg("arrays"), py::arg("timeout_s"))
      .def("read", &Read, py::arg("arrays"), py::arg("timeout_s"))
      .def("read_slice", &ReadSlice, py::arg("variable"), py::arg("start"), py::arg("array"),
           py::arg("timeout_s"))
      .def("write", &Write, py::arg("arrays"), py::arg("timeout_s"))
      .def("write_slice", &WriteSlice, py::arg("variable"), py::arg("start"), py::arg("array"),
           py::arg("timeout_s"))
      .def("accumulate", &Accumulate, py::arg("arrays"), py::arg("scale"),
           py::arg("timeout_s"))
      .def("accumulate_slice", &AccumulateSlice, py::arg("variable"), py::arg("start"),
           py::arg("array"), py::arg("scale"), py::arg("timeout_s"))
      .def("slice_dtype", &SliceDType, py::arg("variable"), py::arg("start"), py::arg("count"))
      .def("axpy", &Axpy, py::arg("scale"), py::arg("source"), py::arg("timeout_s"))
      .def("rebase", &Rebase, py::arg("arrays"))
      .def("exchange", &Exchange, py::arg("arrays"), py::arg("steps"), py::arg("batches"),
           py::arg("announce"))
      .def("average", &Average, py::arg("arrays"), py::arg("weight"), py::arg("steps"),
           py::arg("timeout_s"), py::arg("announce"))
      .def("check_arrays", &CheckArrays, py::arg("arrays"), py::arg("writeable"))
      .def("stats",
           [](PySegment& s) {
             const auto segment = s.GetInAnyProcess();
             return ToDict(WithoutGil([&] { return segment->stats(); }));
           })
      .def("raise_last_error", [](PySegment& s) {
        const auto segment = s.GetInAnyProcess();
        WithoutGil([&] { ThrowIfError(segment->last_error()); });
      });
}

}  // namespace

void DefineSegment(py::module_* module) {
  py::class_<PySegment> segment(*module, "Segment");
  DefineProperties(&segment);
  DefineMembers(&segment);
  DefineWeights(&segment);
  DefineSchedule(&segment);
  DefineWords(&segment);
}

}  // namespace tf_smb
