#include "cc/python/bench_bindings.h"

#include <pybind11/numpy.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cc/bench/futex_meetings.h"
#include "cc/bench/memory_loops.h"
#include "cc/box/exchange_kernel.h"
#include "cc/common/clock.h"
#include "cc/common/status.h"
#include "cc/python/exceptions.h"
#include "cc/wire/dtype.h"

namespace py = pybind11;

namespace tf_smb {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
size_t SharedSize(const Array<T>& a, const Array<T>& b) {
  if (a.size() != b.size()) {
    ThrowIfError(InvalidArgumentError("both arrays must have the same size, got " +
                                      std::to_string(a.size()) + " and " +
                                      std::to_string(b.size()) + " [SMB-E451]"));
  }
  return static_cast<size_t>(a.size());
}

void RunMove(float rate, Array<float> a, Array<float> b) {
  const size_t count = SharedSize(a, b);
  float* const a_data = a.mutable_data();
  float* const b_data = b.mutable_data();
  WithoutGil([&] { MoveLoop(rate, a_data, b_data, count); });
}

void RunCopy(const Array<uint8_t>& from, Array<uint8_t> to) {
  const size_t size_bytes = SharedSize(from, to);
  const uint8_t* const from_data = from.data();
  uint8_t* const to_data = to.mutable_data();
  WithoutGil([&] { CopyLoop(from_data, to_data, size_bytes); });
}

void RunAdd(float scale, const Array<float>& x, Array<float> g) {
  const size_t count = SharedSize(x, g);
  const float* const x_data = x.data();
  float* const g_data = g.mutable_data();
  WithoutGil([&] { AddLoop(scale, x_data, g_data, count); });
}

bool RunAllFinite(const std::string& dtype_name, const Array<uint8_t>& bytes) {
  const std::optional<DType> dtype = DTypeFromName(dtype_name);
  if (!dtype.has_value()) {
    ThrowIfError(InvalidArgumentError("dtype must be one of " + AllDTypeNames() + ", got " +
                                      dtype_name + " [SMB-E452]"));
  }
  const uint8_t* const data = bytes.data();
  const size_t count = static_cast<size_t>(bytes.size()) / ElementBytes(*dtype);
  return WithoutGil([&] { return AllFinite(*dtype, data, count); });
}

FutexMeeting* Meeting(Array<uint32_t>* words) {
  if (static_cast<size_t>(words->nbytes()) < sizeof(FutexMeeting)) {
    ThrowIfError(InvalidArgumentError("a meeting needs " + std::to_string(sizeof(FutexMeeting)) +
                                      " bytes, got " + std::to_string(words->nbytes()) +
                                      " [SMB-E453]"));
  }
  return reinterpret_cast<FutexMeeting*>(words->mutable_data());
}

void RunBarrier(Array<uint32_t> words, uint32_t workers, double timeout_s) {
  FutexMeeting* const meeting = Meeting(&words);
  WithoutGil([&] { ThrowIfError(FutexBarrier(meeting, workers, Deadline::After(timeout_s))); });
}

double RunRoundTrip(Array<uint32_t> words, double pause_s, double timeout_s) {
  FutexMeeting* const meeting = Meeting(&words);
  const auto pause_nanos = static_cast<int64_t>(pause_s * kNanosPerSecond);
  const int64_t nanos = WithoutGil([&] {
    return ValueOrThrow(FutexRoundTrip(meeting, pause_nanos, Deadline::After(timeout_s)));
  });
  return static_cast<double>(nanos) / kNanosPerSecond;
}

void RunAnswer(Array<uint32_t> words, double timeout_s) {
  FutexMeeting* const meeting = Meeting(&words);
  WithoutGil([&] { ThrowIfError(FutexAnswer(meeting, Deadline::After(timeout_s))); });
}

}  // namespace

void DefineBench(py::module_* module) {
  module->def("move_loop", &RunMove, py::arg("rate"), py::arg("a").noconvert(),
              py::arg("b").noconvert());
  module->def("copy_loop", &RunCopy, py::arg("source").noconvert(), py::arg("target").noconvert());
  module->def("add_loop", &RunAdd, py::arg("scale"), py::arg("x").noconvert(),
              py::arg("g").noconvert());
  module->def("all_finite", &RunAllFinite, py::arg("dtype"), py::arg("bytes").noconvert());
  module->def("futex_barrier", &RunBarrier, py::arg("words").noconvert(), py::arg("workers"),
              py::arg("timeout_s"));
  module->def("futex_round_trip", &RunRoundTrip, py::arg("words").noconvert(), py::arg("pause_s"),
              py::arg("timeout_s"));
  module->def("futex_answer", &RunAnswer, py::arg("words").noconvert(), py::arg("timeout_s"));
}

}  // namespace tf_smb
