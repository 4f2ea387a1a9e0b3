// Reading, writing and updating a center: against plain oracles, by many processes at
// once, and by processes that are killed and stopped at every step.
#include "cc/box/segment_data.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

constexpr auto kChunkFloats = static_cast<int64_t>(kChunkBytes / sizeof(float));
constexpr DType kAveraged[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                               DType::kBFloat16};

// Three variables over four chunks, one of them empty, none aligned with the chunks.
Segment* Make(const std::vector<std::vector<int64_t>>& shapes = {{kChunkFloats + 100}, {0}, {7},
                                                                  {2 * kChunkFloats + 3}},
              DType dtype = DType::kFloat32) {
  return Keep(Segment::Create(OptionsOf(LayoutOf(shapes, dtype))));
}

// --- Worker's arrays -------------------------------------------------------------

float FromHalf(uint16_t bits) {  // finite ones
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float value = exponent == 0
                          ? std::ldexp(static_cast<float>(fraction), -24)
                          : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return bits >> 15 != 0 ? -value : value;
}

float FromBFloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// `value` must be one that the dtype holds exactly.
void PutValue(DType dtype, double value, char* at) {
  const auto single = static_cast<float>(value);
  if (dtype == DType::kFloat32) {
    std::memcpy(at, &single, sizeof(single));
  } else if (dtype == DType::kFloat64) {
    std::memcpy(at, &value, sizeof(value));
  } else if (dtype == DType::kBFloat16) {
    uint32_t bits;
    std::memcpy(&bits, &single, sizeof(bits));
    const auto half = static_cast<uint16_t>(bits >> 16);
    std::memcpy(at, &half, sizeof(half));
  } else {
    ASSERT_EQ(dtype, DType::kFloat16);
    for (uint32_t bits = 0; bits < 1u << 16; ++bits) {
      if ((bits >> 10 & 31) == 31 || FromHalf(static_cast<uint16_t>(bits)) != single) continue;
      const auto half = static_cast<uint16_t>(bits);
      std::memcpy(at, &half, sizeof(half));
      return;
    }
    FAIL() << value;
  }
}

double GetValue(DType dtype, const char* at) {
  if (dtype == DType::kFloat32) return *reinterpret_cast<const float*>(at);
  if (dtype == DType::kFloat64) return *reinterpret_cast<const double*>(at);
  const uint16_t half = *reinterpret_cast<const uint16_t*>(at);
  return dtype == DType::kFloat16 ? FromHalf(half) : FromBFloat16(half);
}

// One array for each variable, in its own dtype or in the center's.
struct Arrays {
  explicit Arrays(const Segment& segment, double value = 0.0, bool wide = false)
      : layout(segment.layout()), wide(wide) {
    for (const Variable& variable : layout.variables()) {
      values.emplace_back(variable.num_elements * ElementBytes(DTypeOf(variable)));
    }
    if (value != 0.0) Fill(value);
  }
  Arrays(const Arrays& other) = default;

  DType DTypeOf(const Variable& variable) const {
    return wide ? CenterDType(variable.dtype) : variable.dtype;
  }
  void Fill(double value) {
    for (size_t v = 0; v < values.size(); ++v) {
      const DType dtype = DTypeOf(layout.variables()[v]);
      if (values[v].empty()) continue;
      const uint64_t bytes = ElementBytes(dtype);
      PutValue(dtype, value, values[v].data());
      for (uint64_t at = bytes; at < values[v].size(); at += bytes) {
        std::memcpy(values[v].data() + at, values[v].data(), bytes);
      }
    }
  }
  // Any bytes, but of the floating-point types no NaN and no Inf.
  void FillRandom(std::mt19937_64* random) {
    for (size_t v = 0; v < values.size(); ++v) {
      const DType dtype = DTypeOf(layout.variables()[v]);
      const uint64_t bytes = ElementBytes(dtype);
      for (uint64_t at = 0; at < values[v].size(); at += bytes) {
        if (dtype == DType::kFloat32) {
          const float value = static_cast<float>((*random)() % 2000) / 8 - 100;
          std::memcpy(&values[v][at], &value, sizeof(value));
        } else if (dtype == DType::kFloat64) {
          const double value = static_cast<double>((*random)() % 2000) / 8 - 100;
          std::memcpy(&values[v][at], &value, sizeof(value));
        } else if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) {
          const auto value = static_cast<uint16_t>((*random)() & 0xbbff);
          std::memcpy(&values[v][at], &value, sizeof(value));
        } else {
          const uint64_t value = (*random)();
          for (uint64_t i = 0; i < bytes; ++i) {
            values[v][at + i] = static_cast<char>(value >> (i % 8 * 8));
          }
        }
      }
    }
  }
  std::vector<Span> spans() {
    std::vector<Span> result;
    for (uint32_t v = 0; v < values.size(); ++v) {
      result.push_back({v, 0, layout.variables()[v].num_elements, values[v].data(), wide});
    }
    return result;
  }
  std::vector<ConstSpan> const_spans() const {
    std::vector<ConstSpan> result;
    for (uint32_t v = 0; v < values.size(); ++v) {
      result.push_back({v, 0, layout.variables()[v].num_elements, values[v].data(), wide});
    }
    return result;
  }
  std::vector<void*> pointers() {
    std::vector<void*> result;
    for (std::vector<char>& v : values) result.push_back(v.data());
    return result;
  }
  double at(size_t variable, uint64_t element) const {
    const DType dtype = DTypeOf(layout.variables()[variable]);
    return GetValue(dtype, values[variable].data() + element * ElementBytes(dtype));
  }
  bool AllEqual(double value) const {
    for (size_t v = 0; v < values.size(); ++v) {
      for (uint64_t i = 0; i < layout.variables()[v].num_elements; ++i) {
        if (at(v, i) != value) return false;
      }
    }
    return true;
  }

  const Layout layout;
  const bool wide;
  std::vector<std::vector<char>> values;
};

Arrays Center(Segment* segment, bool wide = false) {
  Arrays arrays(*segment, 0.0, wide);
  const Status status = ReadCenter(segment, arrays.spans(), Long(), nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return arrays;
}

void SetCenter(Segment* segment, double value) {
  ASSERT_TRUE(WriteCenter(segment, Arrays(*segment, value).const_spans(), Long(), nullptr).ok());
}

UpdateRequest RequestOf(MoveKind kind, double rate, const Arrays& local, Arrays* out,
                        MoveOutput output = MoveOutput::kValue) {
  UpdateRequest request;
  request.move.kind = kind;
  request.move.rate = rate;
  request.move.output = output;
  request.local = local.const_spans();
  if (out != nullptr) request.out = out->pointers();
  request.busy_chunk_timeout_s = kLongSeconds;
  return request;
}

UpdateReport Update(Segment* segment, const UpdateRequest& request, ThreadPool* pool = nullptr) {
  const Result<UpdateReport> report = UpdateCenter(segment, request, pool);
  EXPECT_TRUE(report.ok()) << report.status().message();
  return report.ok() ? *report : UpdateReport();
}

// --- Reading and writing ---------------------------------------------------------

// Every dtype in every shape, and beside each other in one segment.
std::vector<Variable> VariablesOfEveryDType() {
  std::vector<Variable> variables;
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{}, {0}, {1}, {3, 5}, {77777}, {2, 0, 3}, {131, 1009}}) {
    for (int number = 1; number <= 15; ++number) {
      variables.push_back(VariableOf(shape, static_cast<DType>(number)));
    }
  }
  return variables;
}

TEST(ReadWriteTest, EveryDTypeWrittenIsRead) {
  Segment* const segment =
      Keep(Segment::Create(OptionsOf(*Layout::Create(VariablesOfEveryDType()))));
  Segment* const other = MapAgain(*segment);
  ThreadPool pool(3);
  std::mt19937_64 random(1);
  for (ThreadPool* const threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
    Arrays written(*segment);
    written.FillRandom(&random);
    const uint64_t version = segment->version();
    ASSERT_TRUE(WriteCenter(segment, written.const_spans(), Long(), threads).ok());
    EXPECT_EQ(segment->version(), version + 1);
    Arrays read(*segment);
    ASSERT_TRUE(ReadCenter(other, read.spans(), Long(), threads).ok());
    EXPECT_EQ(read.values, written.values);
    // In the center: the bytes themselves, and of half precision the same as float32.
    const Arrays wide = Center(other, /*wide=*/true);
    for (size_t v = 0; v < wide.values.size(); ++v) {
      const Variable& variable = segment->layout().variables()[v];
      if (wide.values[v].empty()) continue;
      ASSERT_EQ(std::memcmp(segment->center() + variable.offset_bytes, wide.values[v].data(),
                            wide.values[v].size()),
                0);
      for (uint64_t i = 0; i < variable.num_elements; ++i) {
        if (variable.element_bytes() == ElementBytes(variable.dtype)) break;
        ASSERT_EQ(wide.at(v, i), written.at(v, i));
      }
      if (variable.element_bytes() == ElementBytes(variable.dtype)) {
        ASSERT_EQ(wide.values[v], written.values[v]);
      }
    }
  }
}

TEST(ReadWriteTest, WideWritesKeepMoreThanHalfPrecisionHolds) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    Segment* const segment = Make({{1000}}, dtype);
    Arrays wide(*segment, 1.0 + 1.0 / 4096, /*wide=*/true);  // between two halves
    ASSERT_TRUE(WriteCenter(segment, wide.const_spans(), Long(), nullptr).ok());
    EXPECT_TRUE(Center(segment, /*wide=*/true).AllEqual(1.0 + 1.0 / 4096));
    EXPECT_TRUE(Center(segment).AllEqual(1.0));  // to nearest
  }
}

// Random parts of random variables, against a copy of it all.
TEST(ReadWriteTest, PartsAgainstACopy) {
  Segment* const segment =
      Keep(Segment::Create(OptionsOf(*Layout::Create(VariablesOfEveryDType()))));
  const std::vector<Variable>& variables = segment->layout().variables();
  std::mt19937_64 random(2);
  Arrays model(*segment);
  model.FillRandom(&random);
  ASSERT_TRUE(WriteCenter(segment, model.const_spans(), Long(), nullptr).ok());
  for (int round = 0; round < 30; ++round) {
    Arrays fresh(*segment);
    fresh.FillRandom(&random);
    std::vector<ConstSpan> written;
    std::vector<Span> read;
    Arrays target(*segment);
    Arrays expected(*segment);
    for (uint32_t v = 0; v < variables.size(); ++v) {
      const uint64_t bytes = ElementBytes(variables[v].dtype), size = variables[v].num_elements;
      const uint64_t first = random() % (size + 1), count = random() % (size - first + 1);
      if (random() % 4 == 0) {
        written.push_back({v, first, count, fresh.values[v].data()});
        if (count > 0) {
          std::memcpy(&model.values[v][first * bytes], fresh.values[v].data(), count * bytes);
        }
      }
      const uint64_t from = random() % (size + 1), length = random() % (size - from + 1);
      if (random() % 4 != 0) continue;
      read.push_back({v, from, length, target.values[v].data()});
    }
    ASSERT_TRUE(WriteCenter(segment, written, Long(), nullptr).ok());
    for (const Span& span : read) {
      const uint64_t bytes = ElementBytes(variables[span.variable].dtype);
      if (span.count == 0) continue;
      std::memcpy(expected.values[span.variable].data(),
                  &model.values[span.variable][span.first * bytes], span.count * bytes);
    }
    ASSERT_TRUE(ReadCenter(segment, read, Long(), nullptr).ok());
    ASSERT_EQ(target.values, expected.values) << round;
  }
  EXPECT_EQ(Center(segment).values, model.values);
}

TEST(ReadWriteTest, VersionsOfChunksAndSegment) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  SetCenter(segment, 1.0);
  EXPECT_EQ(segment->version(), 1u);
  Arrays x(*segment, 2.0);
  // Only the small one, which lies in chunk 1.
  ASSERT_TRUE(WriteCenter(segment, {{2, 0, 7, x.values[2].data()}}, Long(), nullptr,
                          /*advance_version=*/false)
                  .ok());
  EXPECT_EQ(segment->version(), 1u);
  const uint64_t versions[] = {1, 2, 1, 1};
  for (uint64_t c = 0; c < 4; ++c) EXPECT_EQ(raw.chunk(c)->version.load(), versions[c]) << c;
}

TEST(ReadWriteTest, NothingIsFine) {
  Segment* const segment = Make();
  EXPECT_TRUE(ReadCenter(segment, {}, Long(), nullptr).ok());
  EXPECT_TRUE(WriteCenter(segment, {}, Long(), nullptr).ok());
  EXPECT_TRUE(WriteCenter(segment, {{1, 0, 0, nullptr}, {3, 5, 0, nullptr}}, Long(), nullptr).ok());
  Segment* const empty = Make({{0}, {3, 0}});
  ThreadPool pool(2);
  EXPECT_TRUE(ReadCenter(empty, Arrays(*empty).spans(), Long(), &pool).ok());
  Arrays x(*empty);
  UpdateRequest request = RequestOf(MoveKind::kElastic, 0.5, x, &x);
  request.first_chunk = 5;
  const UpdateReport report = Update(empty, request, &pool);
  EXPECT_EQ(report.chunks_moved, 0u);
  EXPECT_EQ(report.version_after, report.version_before + 1);
}

TEST(SpansTest, BadOnesAreRefusedInOneSentence) {
  Segment* const segment = Make();
  char memory[64] = {};
  const std::pair<std::vector<ConstSpan>, std::string> bad[] = {
      {{{4, 0, 0, memory}}, "the segment has 4 variables, there is no variable 4"},
      {{{~0u, 0, 0, memory}}, "the segment has 4 variables, there is no variable 4294967295"},
      {{{2, 0, 1, memory}, {0, 0, 1, memory}},
       "variable 'v0' float32[65636] comes after a later one, or twice"},
      {{{2, 0, 1, memory}, {2, 1, 1, memory}},
       "variable 'v2' float32[7] comes after a later one, or twice"},
      {{{2, 0, 8, memory}}, "elements 0 and 8 from there are not within 'v2' float32[7]"},
      {{{2, 7, 1, memory}}, "elements 7 and 1 from there are not within 'v2' float32[7]"},
      {{{2, 8, 0, memory}}, "elements 8 and 0 from there are not within 'v2' float32[7]"},
      {{{2, 1, ~uint64_t{0}, memory}},
       "elements 1 and 18446744073709551615 from there are not within 'v2' float32[7]"},
      {{{1, 0, 1, memory}}, "elements 0 and 1 from there are not within 'v1' float32[0]"},
  };
  for (const auto& [spans, text] : bad) {
    std::vector<Span> targets;
    for (const ConstSpan& span : spans) {
      targets.push_back({span.variable, span.first, span.count, memory});
    }
    UpdateRequest request;
    request.move.kind = MoveKind::kCopy;
    request.local = spans;
    for (const Status& status :
         {CheckSpans(segment->layout(), spans), CheckSpans(segment->layout(), targets),
          WriteCenter(segment, spans, Long(), nullptr),
          ReadCenter(segment, targets, Long(), nullptr),
          UpdateCenter(segment, request, nullptr).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(WithoutAnchor(status.message()), text);
    }
  }
  EXPECT_EQ(segment->version(), 0u);
}

// --- Huge ones -------------------------------------------------------------------

TEST(HugeTest, LastElementsOfSparseSegments) {
  const std::pair<int64_t, DType> sizes[] = {{(1LL << 31) + 3, DType::kFloat32},
                                             {(8LL << 30) + 5, DType::kUInt8},
                                             {(1LL << 30) + 1, DType::kFloat64},
                                             {(1LL << 31) + 1, DType::kBFloat16}};
  for (const auto& [signed_size, dtype] : sizes) {
    const auto size = static_cast<uint64_t>(signed_size);
    SegmentOptions options =
        OptionsOf(*Layout::Create({VariableOf({signed_size}, dtype), VariableOf({2}, dtype)}));
    options.sparse = true;
    const Result<std::unique_ptr<Segment>> segment = Segment::Create(options);
    ASSERT_TRUE(segment.ok()) << segment.status().message();
    const uint64_t bytes = ElementBytes(dtype);
    for (const uint64_t first : {size - 3, uint64_t{1} << 29, uint64_t{0}}) {
      std::vector<char> written(3 * bytes), read(3 * bytes);
      if (IsAveraged(dtype)) {
        for (int i = 0; i < 3; ++i) PutValue(dtype, i + 2, &written[i * bytes]);
      } else {
        written = {5, 6, 7};
      }
      ASSERT_TRUE(
          WriteCenter(segment->get(), {{0, first, 3, written.data()}}, Long(), nullptr).ok());
      ASSERT_TRUE(ReadCenter(segment->get(), {{0, first, 3, read.data()}}, Long(), nullptr).ok());
      EXPECT_EQ(read, written);
      if (!IsAveraged(dtype)) continue;
      UpdateRequest request;
      request.move.kind = MoveKind::kAccumulate;
      request.move.rate = 2.0;
      request.local = {{0, first, 3, written.data()}};
      EXPECT_EQ(Update(segment->get(), request).chunks_skipped, 0u);
      ASSERT_TRUE(ReadCenter(segment->get(), {{0, first, 3, read.data()}}, Long(), nullptr).ok());
      for (int i = 0; i < 3; ++i) EXPECT_EQ(GetValue(dtype, &read[i * bytes]), 3 * (i + 2));
    }
    // Its neighbour, which comes after all that, has none of it.
    std::vector<char> neighbour(2 * bytes, 'x');
    ASSERT_TRUE(ReadCenter(segment->get(), {{1, 0, 2, neighbour.data()}}, Long(), nullptr).ok());
    EXPECT_EQ(neighbour, std::vector<char>(2 * bytes));
  }
}

// --- Updates ---------------------------------------------------------------------

TEST(UpdateTest, EveryMoveReachesEveryElementOfEveryDType) {
  ThreadPool pool(3);
  for (const DType dtype : kAveraged) {
    for (ThreadPool* const threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
      for (const uint64_t first_chunk : {0u, 1u, 3u, 1000u}) {
        Segment* const segment = Make({{kChunkFloats + 100}, {0}, {7}, {}}, dtype);
        const auto make = [&](MoveKind kind, double rate, const Arrays& local, Arrays* out,
                              MoveOutput output) {
          UpdateRequest request = RequestOf(kind, rate, local, out, output);
          request.first_chunk = first_chunk;
          return request;
        };
        SetCenter(segment, 8.0);
        Arrays x(*segment, 4.0), out(*segment, -1.0);
        const UpdateReport report = Update(
            segment, make(MoveKind::kElastic, 0.25, x, &out, MoveOutput::kValue), threads);
        EXPECT_EQ(report.chunks_moved, segment->num_chunks());
        EXPECT_EQ(report.chunks_skipped, 0u);
        EXPECT_EQ(report.version_before, 1u);
        EXPECT_EQ(report.version_after, 2u);
        EXPECT_TRUE(out.AllEqual(5.0));
        EXPECT_TRUE(x.AllEqual(4.0));
        EXPECT_TRUE(Center(segment).AllEqual(7.0));

        Update(segment, make(MoveKind::kElastic, 0.5, x, &out, MoveOutput::kDelta), threads);
        EXPECT_TRUE(out.AllEqual(-1.5));
        EXPECT_TRUE(Center(segment).AllEqual(5.5));

        std::vector<char> last(segment->layout().size_bytes());
        for (const Variable& variable : segment->layout().variables()) {
          for (uint64_t i = 0; i < variable.num_elements; ++i) {
            PutValue(CenterDType(dtype), 2.0,
                     &last[variable.offset_bytes + i * variable.element_bytes()]);
          }
        }
        UpdateRequest delta = make(MoveKind::kDelta, 0.5, x, &x, MoveOutput::kValue);
        delta.last = last.data();
        Update(segment, delta, threads);
        EXPECT_TRUE(x.AllEqual(6.5));  // in place
        EXPECT_TRUE(Center(segment).AllEqual(6.5));
        for (const Variable& variable : segment->layout().variables()) {
          for (uint64_t i = 0; i < variable.num_elements; ++i) {
            ASSERT_EQ(GetValue(CenterDType(dtype),
                               &last[variable.offset_bytes + i * variable.element_bytes()]),
                      6.5);
          }
        }

        Arrays copied(*segment, 9.0), untouched(*segment, 3.0);
        Update(segment, make(MoveKind::kCopy, 1.0, copied, &untouched, MoveOutput::kDelta),
               threads);
        EXPECT_TRUE(untouched.AllEqual(3.0));
        EXPECT_TRUE(Center(segment).AllEqual(9.0));

        Arrays center(*segment, 0.0, /*wide=*/true);  // of the center's dtype
        Update(segment, make(MoveKind::kAccumulate, -0.5, x, &center, MoveOutput::kValue),
               threads);
        EXPECT_TRUE(center.AllEqual(5.75));
        EXPECT_TRUE(Center(segment, /*wide=*/true).AllEqual(5.75));
        Update(segment, make(MoveKind::kAccumulate, 2.0, x, nullptr, MoveOutput::kValue), threads);
        EXPECT_TRUE(Center(segment, /*wide=*/true).AllEqual(18.75));
      }
    }
  }
}

// Parts of variables, with values that round: the plain formula, bit for bit.
TEST(UpdateTest, PartsAgainstThePlainFormula) {
  Segment* const segment = Make();
  const std::vector<Variable>& variables = segment->layout().variables();
  std::mt19937_64 random(3);
  std::uniform_real_distribution<float> values(-3.0f, 3.0f);
  std::vector<std::vector<float>> model;
  std::vector<ConstSpan> all;
  for (uint32_t v = 0; v < variables.size(); ++v) {
    model.emplace_back(variables[v].num_elements);
    for (float& value : model.back()) value = values(random);
    all.push_back({v, 0, variables[v].num_elements, model.back().data()});
  }
  ASSERT_TRUE(WriteCenter(segment, all, Long(), nullptr).ok());
  for (int round = 0; round < 60; ++round) {
    const float rate = static_cast<float>(1 + random() % 100) / 100;
    const bool accumulate = round % 3 == 0, delta = round % 3 == 1;
    std::vector<std::vector<float>> x(variables.size()), out(variables.size());
    std::vector<float> last(segment->layout().size_bytes() / sizeof(float));
    for (float& value : last) value = values(random);
    UpdateRequest request;
    request.move.kind = accumulate ? MoveKind::kAccumulate
                                   : delta ? MoveKind::kDelta : MoveKind::kElastic;
    request.move.rate = rate;
    request.last = last.data();
    const std::vector<float> last_before = last;
    for (uint32_t v = 0; v < variables.size(); ++v) {
      if (random() % 3 == 0) continue;
      const uint64_t size = variables[v].num_elements;
      const uint64_t first = random() % (size + 1), count = random() % (size - first + 1);
      x[v].resize(count);
      out[v].resize(count);
      for (float& value : x[v]) value = values(random);
      request.local.push_back({v, first, count, x[v].data()});
      request.out.push_back(out[v].data());
    }
    Update(segment, request);
    for (const ConstSpan& span : request.local) {
      for (uint64_t i = 0; i < span.count; ++i) {
        float& g = model[span.variable][span.first + i];
        const float value = x[span.variable][i];
        const uint64_t at = variables[span.variable].offset_bytes / sizeof(float) + span.first + i;
        float expected;
        if (accumulate) {
          g = expected = g + rate * value;
        } else if (delta) {
          g = expected = g + rate * (value - last_before[at]);
          ASSERT_EQ(last[at], g);
        } else {
          const float moved = rate * (value - g);
          expected = value - moved;
          g = g + moved;
        }
        ASSERT_EQ(out[span.variable][i], expected) << round;
      }
    }
  }
  std::vector<std::vector<float>> read = model;
  std::vector<Span> targets;
  for (uint32_t v = 0; v < variables.size(); ++v) {
    std::fill(read[v].begin(), read[v].end(), 0.0f);
    targets.push_back({v, 0, variables[v].num_elements, read[v].data()});
  }
  ASSERT_TRUE(ReadCenter(segment, targets, Long(), nullptr).ok());
  EXPECT_EQ(read, model);
}

// Larger than the caches: what is only written goes past them.
TEST(UpdateTest, LargeSegments) {
  Segment* const segment = Make({{5 << 19}, {3}});
  ThreadPool pool(2);
  Arrays x(*segment, 4.0), out(*segment, -1.0);
  Update(segment, RequestOf(MoveKind::kCopy, 1.0, x, &out, MoveOutput::kDelta), &pool);
  EXPECT_TRUE(Center(segment).AllEqual(4.0));
  x.Fill(6.0);
  Update(segment, RequestOf(MoveKind::kElastic, 0.5, x, &out, MoveOutput::kDelta), &pool);
  EXPECT_TRUE(out.AllEqual(1.0));
  std::vector<float> last(segment->layout().size_bytes() / sizeof(float), 2.0f);
  UpdateRequest delta = RequestOf(MoveKind::kDelta, 0.5, x, &out, MoveOutput::kDelta);
  delta.last = last.data();
  Update(segment, delta, &pool);
  EXPECT_TRUE(out.AllEqual(-1.0));
  EXPECT_TRUE(Center(segment).AllEqual(7.0));
  EXPECT_EQ(last[0], 7.0f);
}

TEST(UpdateTest, PaddingStaysZero) {
  Segment* const segment = Make({{3}, {5}});
  Arrays x(*segment, 4.0);
  Update(segment, RequestOf(MoveKind::kElastic, 1.0, x, &x));
  Update(segment, RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr));
  const auto* const center = reinterpret_cast<const float*>(segment->center());
  for (uint64_t i = 3; i < 16; ++i) EXPECT_EQ(center[i], 0.0f);
  EXPECT_EQ(center[16], 4.0f);
}

TEST(UpdateTest, AccumulateLeavesTheRestOfItsChunks) {
  Segment* const segment = Make({{100}, {100}, {100}});
  SetCenter(segment, 3.0);
  std::vector<float> x(10, 1.0f), center(10);
  UpdateRequest request;
  request.move.kind = MoveKind::kAccumulate;
  request.move.rate = 1.0;
  request.local = {{1, 20, 10, x.data()}};
  request.out = {center.data()};
  Update(segment, request);
  EXPECT_EQ(center, std::vector<float>(10, 4.0f));
  const Arrays all = Center(segment);
  for (uint64_t i = 0; i < 100; ++i) {
    ASSERT_EQ(all.at(0, i), 3.0);
    ASSERT_EQ(all.at(1, i), i >= 20 && i < 30 ? 4.0 : 3.0);
    ASSERT_EQ(all.at(2, i), 3.0);
  }
}

TEST(UpdateTest, WhatIsNotAveragedIsRefusedByName) {
  for (int number = 5; number <= 15; ++number) {
    const auto dtype = static_cast<DType>(number);
    Segment* const segment = Make({{3}, {2}}, dtype);
    Arrays x(*segment);
    const Status status =
        UpdateCenter(segment, RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr), nullptr).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(std::string("variable 'v0' ") + DTypeName(dtype) +
                                    "[3] can be read and written, but not averaged"),
              std::string::npos)
        << status.message();
  }
}

TEST(UpdateTest, RequestsThatAreNoneAreRefused) {
  Segment* const segment = Make({{3}});
  Arrays x(*segment, 1.0);
  std::vector<UpdateRequest> bad;
  for (const int kind : {0, 5, 6, 255}) {
    bad.push_back(RequestOf(static_cast<MoveKind>(kind), 0.5, x, &x));
  }
  bad.push_back(RequestOf(MoveKind::kElastic, 0.5, x, nullptr));
  bad.push_back(RequestOf(MoveKind::kDelta, 0.5, x, &x));  // without `last`
  bad.push_back(RequestOf(MoveKind::kAccumulate, 0.5, x, &x));
  bad.back().out.push_back(nullptr);
  for (const double weight : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                              std::numeric_limits<double>::quiet_NaN()}) {
    bad.push_back(RequestOf(MoveKind::kElastic, 0.5, x, &x));
    bad.back().round = RoundShare{1, weight};
  }
  for (const UpdateRequest& request : bad) {
    const Status status = UpdateCenter(segment, request, nullptr).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_FALSE(status.message().empty());
  }
  EXPECT_EQ(segment->version(), 0u);
}

TEST(UpdateTest, NothingThatIsNotFiniteReachesTheCenter) {
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity()}) {
    for (const MoveKind kind : {MoveKind::kElastic, MoveKind::kAccumulate}) {
      Segment* const segment = Make();
      SetCenter(segment, 1.0);
      Arrays x(*segment, 2.0), out(*segment);
      PutValue(DType::kFloat32, bad, &x.values[3][4 * (kChunkFloats + 5)]);
      const UpdateReport report = Update(segment, RequestOf(kind, 0.5, x, &out));
      EXPECT_EQ(report.non_finite_variable, 3u);
      const Arrays center = Center(segment);
      for (size_t v = 0; v < center.values.size(); ++v) {
        for (uint64_t i = 0; i < segment->layout().variables()[v].num_elements; ++i) {
          ASSERT_TRUE(std::isfinite(center.at(v, i)));
        }
      }
      EXPECT_EQ(center.at(3, kChunkFloats + 5), 1.0);
    }
  }
}

// The sum is what is not finite: all of that chunk stays as it was.
TEST(UpdateTest, AccumulateThatOverflowsLeavesItsChunk) {
  Segment* const segment = Make({{10}});
  SetCenter(segment, std::numeric_limits<float>::max());
  Arrays x(*segment, std::numeric_limits<float>::max());
  const UpdateReport report = Update(segment, RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr));
  EXPECT_EQ(report.non_finite_variable, 0u);
  EXPECT_EQ(report.chunks_moved, 0u);
  EXPECT_TRUE(Center(segment).AllEqual(std::numeric_limits<float>::max()));
}

// --- Many processes --------------------------------------------------------------

// Sums of whole numbers are exact: not one of them may be lost, or counted twice.
void ExpectExactSums(MoveKind kind) {
  constexpr int kProcesses = 4, kRounds = 30;
  Segment* const segment = Make();
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      Arrays x(*own);
      std::vector<char> last(own->layout().size_bytes());
      for (int i = 0; i < kRounds; ++i) {
        for (uint32_t v = 0; v < x.values.size(); ++v) {
          for (uint64_t e = 0; e < own->layout().variables()[v].num_elements; ++e) {
            const double before = kind == MoveKind::kDelta ? x.at(v, e) : 0.0;
            PutValue(DType::kFloat32, before + p + 1, &x.values[v][e * sizeof(float)]);
          }
        }
        UpdateRequest request = RequestOf(kind, 1.0, x, kind == MoveKind::kDelta ? &x : nullptr);
        request.last = last.data();
        request.first_chunk = static_cast<uint64_t>(p);
        if (Update(own, request).chunks_skipped != 0) return 1;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_TRUE(Center(segment).AllEqual(kRounds * (1 + 2 + 3 + 4)));
  EXPECT_EQ(segment->version(), static_cast<uint64_t>(kProcesses * kRounds));
}

TEST(ProcessesTest, DeltasAddUpExactly) { ExpectExactSums(MoveKind::kDelta); }
TEST(ProcessesTest, AccumulatesAddUpExactly) { ExpectExactSums(MoveKind::kAccumulate); }

// d = (x - g) / 2 with few enough halvings is exact: the sum of x and g stays.
TEST(ProcessesTest, ElasticMovesConserveTheSum) {
  constexpr int kProcesses = 4, kRounds = 4;  // 16 halvings of multiples of 2^12 below 2^20
  Segment* const segment = Make();
  double* const results = NewShared<double[kProcesses]>()[0];
  SetCenter(segment, 7 * 4096.0);
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      Arrays x(*own, (p * 31 - 40) * 4096.0);
      for (int i = 0; i < kRounds; ++i) Update(own, RequestOf(MoveKind::kElastic, 0.5, x, &x));
      results[p] = x.at(3, kChunkFloats);  // one element: its chunk has one order
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  double sum = Center(segment).at(3, kChunkFloats), expected = 7 * 4096.0;
  for (int p = 0; p < kProcesses; ++p) {
    sum += results[p];
    expected += (p * 31 - 40) * 4096.0;
  }
  EXPECT_EQ(sum, expected);
}

// --- Rounds ----------------------------------------------------------------------

UpdateRequest ShareOf(const Arrays& x, uint64_t round, double weight, Arrays* out = nullptr) {
  UpdateRequest request = RequestOf(MoveKind::kElastic, 0.0, x, out);
  request.round = RoundShare{round, weight};
  return request;
}

TEST(RoundDataTest, CenterBecomesTheWeightedMean) {
  for (const DType dtype : kAveraged) {
    Segment* const segment = Make({{kChunkFloats + 100}, {0}, {7}}, dtype);
    const RawSegment raw(segment->fd());
    const MemberId a = *segment->Join(0), b = *segment->Join(1);
    SetCenter(segment, 100.0);  // what was there does not count
    Arrays low(*segment, 2.0), high(*segment, 10.0), mean(*segment, 0.0, /*wide=*/true);
    ASSERT_EQ(*segment->EnterRound(a), 1u);
    Update(segment, ShareOf(low, 1, 3.0));
    EXPECT_TRUE(Center(segment).AllEqual(2.0));
    Update(segment, ShareOf(high, 1, 1.0, &mean));
    EXPECT_TRUE(Center(segment).AllEqual(4.0));
    EXPECT_TRUE(mean.AllEqual(4.0));
    for (uint64_t c = 0; c < segment->num_chunks(); ++c) {
      EXPECT_EQ(raw.chunk(c)->round.load(), 1u);
      EXPECT_EQ(raw.chunk(c)->weight.load(), 4.0);
      EXPECT_EQ(raw.chunk(c)->pending.load(), 0u);
    }
    segment->FinishShare(a, 1, false);
    segment->FinishShare(b, 1, false);
    ASSERT_TRUE(segment->TryCloseRound(1, false));
    const Result<UpdateReport> late = UpdateCenter(segment, ShareOf(high, 1, 1.0), nullptr);
    EXPECT_EQ(late.status().code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(WithoutAnchor(late.status().message()),
              "round 1 of segment 'run/0' was closed before this worker's share was in");
    const Result<UpdateReport> early = UpdateCenter(segment, ShareOf(high, 2, 1.0), nullptr);
    EXPECT_EQ(early.status().code(), StatusCode::kFailedPrecondition);
    EXPECT_TRUE(Center(segment).AllEqual(4.0));
    segment->FinishRound(a, 1);
    segment->FinishRound(b, 1);
    ASSERT_EQ(*segment->EnterRound(b), 2u);
    Update(segment, ShareOf(high, 2, 0.5));
    EXPECT_TRUE(Center(segment).AllEqual(10.0));
  }
}

TEST(RoundDataTest, DamagedWeightIsDataLoss) {
  for (const double damaged : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                               std::numeric_limits<double>::infinity()}) {
    Segment* const segment = Make({{7}});
    const RawSegment raw(segment->fd());
    ASSERT_EQ(*segment->EnterRound(*segment->Join(0)), 1u);
    Update(segment, ShareOf(Arrays(*segment, 2.0), 1, 1.0));
    raw.chunk(0)->weight.store(damaged);
    const Status status =
        UpdateCenter(segment, ShareOf(Arrays(*segment, 2.0), 1, 1.0), nullptr).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_EQ(status.scope(), FailureScope::kServer);
  }
}

// Real members, each with another weight, round for round: all read the same mean, and it
// is the right one.
TEST(RoundDataTest, ProcessesAgreeOnEveryMean) {
  constexpr uint32_t kProcesses = 3;
  constexpr uint64_t kRounds = 40;
  Segment* const segment = Make();
  struct Shared {
    std::atomic<uint32_t> joined;
    float means[kProcesses][kRounds][3];
  };
  Shared* const shared = NewShared<Shared>();
  const auto value_of = [](uint32_t p, uint64_t round) {
    return static_cast<double>(round * 10 + p * p);
  };
  std::vector<pid_t> children;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      const MemberId member = *own->Join(p);
      shared->joined.fetch_add(1);
      if (!WaitUntil([&] { return shared->joined.load() == kProcesses; })) return 1;
      Arrays x(*own);
      for (uint64_t i = 0; i < kRounds; ++i) {
        x.Fill(value_of(p, i));
        uint64_t round = 0;
        if (!WaitUntil([&] { return (round = *own->EnterRound(member)) != 0; })) return 2;
        if (round != i + 1) return 3;
        UpdateRequest share = ShareOf(x, round, p + 1.0);
        share.first_chunk = p;
        if (Update(own, share).chunks_skipped != 0) return 4;
        own->FinishShare(member, round, false);
        if (!WaitUntil([&] { return own->TryCloseRound(round, false); })) return 5;
        const Arrays mean = Center(own);
        shared->means[p][i][0] = static_cast<float>(mean.at(0, 0));
        shared->means[p][i][1] = static_cast<float>(mean.at(2, 6));
        shared->means[p][i][2] = static_cast<float>(mean.at(3, 2 * kChunkFloats + 2));
        own->FinishRound(member, round);
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  for (uint64_t i = 0; i < kRounds; ++i) {
    double mean = 0.0;
    for (uint32_t p = 0; p < kProcesses; ++p) mean += (p + 1) * value_of(p, i) / 6.0;
    for (int at = 0; at < 3; ++at) {
      EXPECT_NEAR(shared->means[0][i][at], mean, 1e-6 * (mean + 1));
      for (uint32_t p = 1; p < kProcesses; ++p) {
        EXPECT_EQ(shared->means[p][i][at], shared->means[0][i][at]);
      }
    }
  }
}

// Five members that come in any order add their shares in that of their indexes: whoever
// came first, the same weights give the same bits.
TEST(RoundDataTest, TheOrderOfArrivalChangesNoBit) {
  constexpr uint32_t kProcesses = 5;
  constexpr uint64_t kRounds = 20;
  Segment* const segment = Make();
  std::vector<MemberId> members;
  std::vector<Arrays> values;
  std::mt19937 random(7);
  std::uniform_real_distribution<double> number(-1.0, 1.0);
  std::vector<double> weights;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    members.push_back(*segment->Join(p));
    values.emplace_back(*segment, number(random));
    weights.push_back(1.0 + number(random) * 0.9);
  }
  const auto run = [&](const std::vector<uint32_t>& arrivals, uint64_t round, bool in_turn) {
    std::vector<uint32_t> waiting = arrivals;
    for (const uint32_t p : arrivals) EXPECT_EQ(*segment->EnterRound(members[p]), round);
    while (!waiting.empty()) {
      const auto next = std::find_if(waiting.begin(), waiting.end(), [&](uint32_t p) {
        return !in_turn || segment->IsTurn(members[p], round);
      });
      EXPECT_NE(next, waiting.end());
      if (next == waiting.end()) break;
      Update(segment, ShareOf(values[*next], round, weights[*next]));
      segment->FinishShare(members[*next], round, false);
      waiting.erase(next);
    }
    EXPECT_TRUE(segment->TryCloseRound(round, false));
    const Arrays center = Center(segment);
    for (const MemberId& member : members) segment->FinishRound(member, round);
    return std::make_pair(center.at(0, 0), center.at(3, 2 * kChunkFloats + 2));
  };
  std::vector<uint32_t> arrivals(kProcesses);
  std::iota(arrivals.begin(), arrivals.end(), 0);
  const auto expected = run(arrivals, 1, true);
  for (uint64_t round = 2; round <= kRounds; ++round) {
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    EXPECT_EQ(run(arrivals, round, true), expected) << round;
  }
  // Without turns the order would show.
  bool differs = false;
  for (uint64_t round = kRounds + 1; round <= 2 * kRounds; ++round) {
    std::shuffle(arrivals.begin(), arrivals.end(), random);
    differs = differs || run(arrivals, round, false) != expected;
  }
  EXPECT_TRUE(differs);
}

// A member that dies with its share in some of the chunks: the mean there has it, the
// others' have not, and the round goes on.
TEST(RoundDataTest, DeathWhileSharing) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  const pid_t child = SpawnMember(*segment, 1, [](Segment* own, MemberId member) {
    if (!WaitUntil([&] { return own->IsOpenRound(1); })) _exit(1);
    if (*own->EnterRound(member) != 1) _exit(2);
    Arrays x(*own, 8.0);
    UpdateRequest share = ShareOf(x, 1, 1.0);
    share.local.resize(1);  // v0: chunk 0 and the first 100 elements of chunk 1
    Update(own, share);
    raise(SIGSTOP);
  });
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  WaitStopped(child);
  Arrays x(*segment, 4.0);
  Update(segment, ShareOf(x, 1, 1.0));
  segment->FinishShare(a, 1, false);
  EXPECT_FALSE(segment->TryCloseRound(1, false));
  EXPECT_EQ(segment->MissingInRound(), (std::vector<uint32_t>{1}));
  Kill(child);
  EXPECT_TRUE(segment->TryCloseRound(1, false));
  const Arrays mean = Center(segment);
  EXPECT_EQ(mean.at(0, 0), 6.0);
  EXPECT_EQ(mean.at(3, 2 * kChunkFloats), 4.0);
}

// --- Axpy ------------------------------------------------------------------------

TEST(AxpyTest, AddsEveryElementOfEveryDType) {
  for (const DType dtype : kAveraged) {
    Segment* const target = Make({{kChunkFloats + 100}, {0}, {7}, {}}, dtype);
    Segment* const source = Make({{kChunkFloats + 100}, {0}, {7}, {}}, dtype);
    SetCenter(target, 1.0);
    SetCenter(source, 8.0);
    ASSERT_TRUE(Axpy(target, 0.25, source, Long()).ok());
    EXPECT_TRUE(Center(target).AllEqual(3.0));
    EXPECT_TRUE(Center(source).AllEqual(8.0));
    EXPECT_EQ(target->version(), 2u);
    EXPECT_EQ(source->version(), 1u);
    ASSERT_TRUE(Axpy(target, 1.0, target, Long()).ok());  // itself
    EXPECT_TRUE(Center(target).AllEqual(6.0));
    ASSERT_TRUE(Axpy(target, -1.0, target, Long()).ok());
    EXPECT_TRUE(Center(target).AllEqual(0.0));
  }
}

TEST(AxpyTest, LeavesWhatIsNotAveraged) {
  const Layout layout = *Layout::Create({VariableOf({3}, DType::kInt32), VariableOf({3}),
                                         VariableOf({5}, DType::kBool)});
  Segment* const target = Keep(Segment::Create(OptionsOf(layout)));
  Segment* const source = Keep(Segment::Create(OptionsOf(layout)));
  const int32_t counts[3] = {7, 8, 9};
  const float ones[3] = {1, 1, 1};
  ASSERT_TRUE(WriteCenter(target, {{0, 0, 3, counts}}, Long(), nullptr).ok());
  ASSERT_TRUE(WriteCenter(source, {{0, 0, 3, counts}, {1, 0, 3, ones}}, Long(), nullptr).ok());
  ASSERT_TRUE(Axpy(target, 5.0, source, Long()).ok());
  int32_t read[3];
  float values[3];
  ASSERT_TRUE(ReadCenter(target, {{0, 0, 3, read}, {1, 0, 3, values}}, Long(), nullptr).ok());
  EXPECT_EQ(read[2], 9);
  EXPECT_EQ(values[2], 5.0f);
}

TEST(AxpyTest, RefusesWhatCannotBe) {
  Segment* const target = Make({{3}});
  EXPECT_EQ(Axpy(target, 1.0, Make({{4}}), Long()).code(), StatusCode::kFailedPrecondition);
  SetCenter(target, 1.0);
  for (const double scale : {std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
    const Status status = Axpy(target, scale, target, Long());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("NaN or Inf in variable 'v0' float32[3]"), std::string::npos);
  }
  EXPECT_TRUE(Center(target).AllEqual(1.0));
}

// Each other's way at once: none of them holds two locks.
TEST(AxpyTest, BothWaysAtOnceDoNotBlock) {
  Segment* const one = Make();
  Segment* const two = Make();
  SetCenter(one, 1.0);
  std::vector<pid_t> children;
  for (const bool forth : {true, false}) {
    children.push_back(Spawn([&] {
      Segment* const a = MapAgain(*one);
      Segment* const b = MapAgain(*two);
      for (int i = 0; i < 50; ++i) {
        if (!Axpy(forth ? a : b, 0.0, forth ? b : a, Long()).ok()) return 1;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_TRUE(Center(one).AllEqual(1.0));
}

// --- Death at every step -----------------------------------------------------------

// A child that maps the segment, runs `body` and is killed.
void DieAfter(const Segment& segment, const std::function<void(Segment*)>& body) {
  const pid_t child = Spawn([&] {
    body(MapAgain(segment));
    raise(SIGSTOP);
    return 1;
  });
  WaitStopped(child);
  Kill(child);
}

// The number of a leased side buffer of `own`.
uint32_t NumberOf(const Segment& own, const Segment::SideLease& side) {
  const RawSegment raw(own.fd());
  const SegmentHeader* const header = raw.header();
  const char* const first = own.center() - (header->center_offset - header->side_data_offset);
  return static_cast<uint32_t>(static_cast<uint64_t>(side.data() - first) / header->side_bytes);
}

// What Publish does, up to some point in it: `copied` bytes of the new contents, all 7.
void PublishInPart(Segment* own, uint64_t index, const Segment::SideLease& side, uint64_t copied) {
  const RawSegment raw(own->fd());
  const uint32_t number = NumberOf(*own, side);
  std::vector<float> next(kChunkFloats, 7.0f);
  std::memcpy(side.data(), next.data(), own->chunk_bytes(index));
  raw.side(number)->chunk.store(index);
  raw.side(number)->round.store(5);
  raw.side(number)->weight.store(2.5);
  raw.chunk(index)->pending.store(number + 1);
  std::memcpy(own->center() + index * kChunkBytes, side.data(), copied);
}

void ExpectPublished(Segment* segment, uint64_t index) {
  const RawSegment raw(segment->fd());
  EXPECT_EQ(raw.chunk(index)->pending.load(), 0u);
  EXPECT_EQ(raw.chunk(index)->round.load(), 5u);
  EXPECT_EQ(raw.chunk(index)->weight.load(), 2.5);
  const auto* const center =
      reinterpret_cast<const float*>(segment->center() + index * kChunkBytes);
  for (uint64_t i = 0; i < segment->chunk_bytes(index) / sizeof(float); ++i) {
    ASSERT_EQ(center[i], 7.0f) << i;
  }
}

TEST(DeathTest, UnderAChunkLockStopsNobody) {
  Segment* const segment = Make();
  DieAfter(*segment, [](Segment* own) { own->LockChunk(1, Long()); });
  Arrays x(*segment, 2.0);
  const UpdateReport report = Update(segment, RequestOf(MoveKind::kElastic, 0.5, x, &x));
  EXPECT_EQ(report.chunks_moved, segment->num_chunks());
  EXPECT_EQ(report.chunks_skipped, 0u);
  EXPECT_TRUE(Center(segment).AllEqual(1.0));
}

// Whole in the side buffer, and from nothing to all of it in the center: the next one to
// lock the chunk completes it.
TEST(DeathTest, BetweenPendingAndTheEndOfTheCopyIsCompleted) {
  for (const uint64_t copied : {uint64_t{0}, uint64_t{4}, kChunkBytes / 2, kChunkBytes}) {
    for (const bool try_lock : {false, true}) {
      Segment* const segment = Make();
      SetCenter(segment, 3.0);
      DieAfter(*segment, [copied](Segment* own) {
        own->LockChunk(1, Long());
        const Segment::SideLease side = std::move(own->LeaseSide(Long())).value();
        PublishInPart(own, 1, side, copied);
        raise(SIGSTOP);  // before the lease ends: killed here
      });
      const uint64_t version = segment->version();
      const uint64_t chunk_version = segment->chunk(1)->version.load();
      const LockOutcome outcome =
          try_lock ? segment->TryLockChunk(1) : segment->LockChunk(1, Long());
      EXPECT_EQ(outcome, LockOutcome::kLockedAfterDeath);
      ExpectPublished(segment, 1);
      segment->UnlockChunk(1);
      EXPECT_EQ(segment->version(), version + 1);
      EXPECT_EQ(segment->chunk(1)->version.load(), chunk_version + 1);
      EXPECT_EQ(segment->TryLockChunk(1), LockOutcome::kLocked);
      segment->UnlockChunk(1);
    }
  }
}

// Whoever completes it may die of it too.
TEST(DeathTest, OfTheOneThatCompletes) {
  Segment* const segment = Make();
  DieAfter(*segment, [](Segment* own) {
    own->LockChunk(1, Long());
    const Segment::SideLease side = std::move(own->LeaseSide(Long())).value();
    PublishInPart(own, 1, side, 100);
    raise(SIGSTOP);
  });
  for (int i = 0; i < 3; ++i) {
    DieAfter(*segment, [](Segment* own) {
      const RawSegment raw(own->fd());
      if (raw.chunk(1)->mutex.TryLock() != LockOutcome::kLockedAfterDeath) _exit(1);
      raise(SIGSTOP);  // before it is unmapped
    });
  }
  EXPECT_EQ(segment->TryLockChunk(1), LockOutcome::kLockedAfterDeath);
  ExpectPublished(segment, 1);
  segment->UnlockChunk(1);
}

// The side buffer is wanted before the chunk is: it is not given away unread.
TEST(DeathTest, SideBufferIsKeptUntilItsChunkIsComplete) {
  Segment* const segment = Make();
  DieAfter(*segment, [](Segment* own) {
    own->LockChunk(1, Long());
    const Segment::SideLease side = std::move(own->LeaseSide(Long())).value();
    PublishInPart(own, 1, side, 100);
    raise(SIGSTOP);
  });
  std::vector<Segment::SideLease> all;
  for (uint64_t i = 0; i < segment->num_chunks(); ++i) {  // as many sides as chunks
    Result<Segment::SideLease> side = segment->LeaseSide(Long());
    ASSERT_TRUE(side.ok()) << side.status().message();
    std::memset(side->data(), 0x55, kChunkBytes);
    all.push_back(std::move(side).value());
  }
  EXPECT_EQ(segment->LeaseSide(Deadline::After(0)).status().code(),
            StatusCode::kDeadlineExceeded);
  ExpectPublished(segment, 1);
  EXPECT_EQ(segment->TryLockChunk(1), LockOutcome::kLocked);
  segment->UnlockChunk(1);
}

// Its chunk is locked by a process that is stopped: this buffer is nobody's until then.
TEST(DeathTest, SideBufferOfALockedChunkIsPassedOver) {
  Segment* const segment = Make();
  DieAfter(*segment, [](Segment* own) {
    own->LockChunk(1, Long());
    const Segment::SideLease side = std::move(own->LeaseSide(Long())).value();
    PublishInPart(own, 1, side, 0);
    raise(SIGSTOP);
  });
  const pid_t holder = Spawn([&] {
    const RawSegment raw(segment->fd());
    if (!Holds(raw.chunk(1)->mutex.TryLock())) return 1;  // without completing it
    raise(SIGSTOP);
    return 0;
  });
  WaitStopped(holder);
  std::vector<Segment::SideLease> all;
  for (uint64_t i = 0; i + 1 < segment->num_chunks(); ++i) {
    all.push_back(std::move(segment->LeaseSide(Long())).value());
  }
  const Status status = segment->LeaseSide(Deadline::After(0.05)).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("all 4 side buffers of segment 'run/0' stayed in use"),
            std::string::npos);
  Kill(holder);
  EXPECT_TRUE(segment->LeaseSide(Long()).ok());
  ExpectPublished(segment, 1);
}

TEST(DeathTest, HoldingASideBufferWithNothingInIt) {
  Segment* const segment = Make();
  SetCenter(segment, 3.0);
  DieAfter(*segment, [](Segment* own) {
    own->LockChunk(1, Long());
    std::vector<Segment::SideLease> sides;
    for (uint64_t i = 0; i < own->num_chunks(); ++i) {
      sides.push_back(std::move(own->LeaseSide(Long())).value());
      std::memset(sides.back().data(), 0x55, kChunkBytes);
    }
    raise(SIGSTOP);
  });
  Arrays x(*segment, 2.0);
  EXPECT_EQ(Update(segment, RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr)).chunks_moved, 4u);
  EXPECT_TRUE(Center(segment).AllEqual(5.0));
}

// It changed the center and died before it could say so: the version says so for it.
TEST(DeathTest, BetweenCenterAndVersionIsCounted) {
  Segment* const segment = Make();
  SetCenter(segment, 3.0);
  DieAfter(*segment, [](Segment* own) {
    own->LockChunk(1, Long());
    std::memset(own->center() + kChunkBytes, 0, 1000);
  });
  const uint64_t version = segment->version(), of_chunk = segment->chunk(1)->version.load();
  Center(segment);
  EXPECT_EQ(segment->version(), version + 1);
  EXPECT_EQ(segment->chunk(1)->version.load(), of_chunk + 1);
  Center(segment);
  EXPECT_EQ(segment->version(), version + 1);  // once
}

// Whatever `pending` says, nothing is copied that is not of this chunk.
TEST(DeathTest, NonsenseInPendingIsNotFollowed) {
  for (const uint32_t pending : {2u, 5u, 1000u, ~0u}) {
    Segment* const segment = Make();
    SetCenter(segment, 3.0);
    DieAfter(*segment, [pending](Segment* own) {
      own->LockChunk(1, Long());
      own->chunk(1)->pending.store(pending);
    });
    EXPECT_TRUE(Center(segment).AllEqual(3.0));
    Arrays x(*segment, 2.0);
    EXPECT_EQ(Update(segment, RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr)).chunks_moved, 4u);
    EXPECT_TRUE(Center(segment).AllEqual(5.0));
  }
}

TEST(DeathTest, ManyInTheMiddleOfMovesLeaveALegalCenter) {
  Segment* const segment = Make();
  for (int round = 0; round < 10; ++round) {
    const pid_t child = Spawn([&] {
      Segment* const own = MapAgain(*segment);
      Arrays x(*own, 1.0);
      for (;;) Update(own, RequestOf(MoveKind::kElastic, 0.5, x, &x));
      return 0;
    });
    usleep(3000 + 700 * round);
    Kill(child);
    Arrays x(*segment);
    const UpdateReport report = Update(segment, RequestOf(MoveKind::kElastic, 0.25, x, &x));
    EXPECT_EQ(report.chunks_moved, segment->num_chunks());
    const Arrays center = Center(segment);
    for (const size_t v : {0, 2, 3}) {
      for (uint64_t i = 0; i < segment->layout().variables()[v].num_elements; ++i) {
        ASSERT_TRUE(center.at(v, i) >= 0.0 && center.at(v, i) <= 1.0);  // moved, or not
      }
    }
  }
}

// As fast as they can, killed at any moment: each chunk has all of an accumulate or nothing
// of it, and none is lost that was reported.
TEST(DeathTest, RandomKillsNeitherTearNorLoseAccumulates) {
  constexpr int kProcesses = 4, kKills = 40;
  constexpr unsigned kSeed = 20240607;
  RecordProperty("seed", static_cast<int>(kSeed));
  struct Shared {
    std::atomic<uint64_t> completed;
    std::atomic<uint64_t> failed;
    std::atomic<int64_t> longest_nanos;
    std::atomic<bool> stopping;
  };
  Shared* const shared = NewShared<Shared>();
  Segment* const segment = Make({{8 * kChunkFloats}});
  const auto spawn = [&](int p) {
    return Spawn([&, p] {
      Result<std::unique_ptr<Segment>> own = Segment::Map(Duplicate(segment->fd()));
      const Arrays x(**own, 1.0);
      UpdateRequest request = RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr);
      request.first_chunk = static_cast<uint64_t>(p) * 2;
      while (!shared->stopping.load()) {
        const int64_t before = MonotonicNanos();
        const Result<UpdateReport> report = UpdateCenter(own->get(), request, nullptr);
        const bool whole = report.ok() && report->chunks_skipped == 0 && report->chunks_moved == 8;
        (whole ? shared->completed : shared->failed).fetch_add(1);
        const int64_t nanos = MonotonicNanos() - before;
        int64_t longest = shared->longest_nanos.load();
        while (nanos > longest && !shared->longest_nanos.compare_exchange_weak(longest, nanos)) {}
      }
      return 0;
    });
  };
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) children.push_back(spawn(p));
  std::mt19937 random(kSeed);
  for (int kill_number = 0; kill_number < kKills; ++kill_number) {
    const uint64_t before = shared->completed.load();
    usleep(static_cast<useconds_t>(5000 + random() % 40000));
    ASSERT_TRUE(WaitUntil([&] { return shared->completed.load() > before; }));
    const size_t victim = random() % kProcesses;
    Kill(children[victim]);
    children[victim] = spawn(static_cast<int>(victim));
  }
  usleep(20000);
  shared->stopping.store(true);
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  for (uint64_t c = 0; c < 8; ++c) {
    const LockOutcome outcome = segment->LockChunk(c, Deadline::After(0));
    ASSERT_TRUE(Holds(outcome)) << "chunk " << c << " stayed locked";
    const auto* const center = reinterpret_cast<const float*>(segment->center() + c * kChunkBytes);
    const float sum = center[0];
    for (int64_t i = 0; i < kChunkFloats; ++i) {
      ASSERT_EQ(center[i], sum) << "chunk " << c << " is torn";
    }
    EXPECT_EQ(sum, std::floor(sum));
    EXPECT_GE(sum, static_cast<float>(shared->completed.load())) << "chunk " << c;
    EXPECT_LE(sum, static_cast<float>(shared->completed.load() + kKills)) << "chunk " << c;
    EXPECT_EQ(segment->chunk(c)->pending.load(), 0u);
    segment->UnlockChunk(c);
  }
  EXPECT_GE(shared->completed.load(), static_cast<uint64_t>(kKills));
  EXPECT_EQ(shared->failed.load(), 0u);
  // Nobody waited for a dead one: less than the lease that is usual, and a second.
  EXPECT_LT(shared->longest_nanos.load(), 11 * kNanosPerSecond);
  // All side buffers are there again.
  std::vector<Segment::SideLease> all;
  for (int i = 0; i < 8; ++i) {
    Result<Segment::SideLease> side = segment->LeaseSide(Deadline::After(1.0));
    ASSERT_TRUE(side.ok()) << side.status().message();
    all.push_back(std::move(side).value());
  }
}

// --- Stopped holders -----------------------------------------------------------------

// Chunk 1: v0 from kChunkFloats, v2, and v3's first.
class StoppedHolderTest : public testing::Test {
 protected:
  void SetUp() override {
    SetCenter(segment_, 8.0);
    holder_ = Spawn([this] {
      Segment* const own = MapAgain(*segment_);
      if (own->LockChunk(1, Long()) != LockOutcome::kLocked) return 1;
      raise(SIGSTOP);
      own->UnlockChunk(1);
      return 0;
    });
    WaitStopped(holder_);
  }
  void TearDown() override {
    if (holder_ >= 0) Kill(holder_);
  }
  void Continue() {
    kill(holder_, SIGCONT);
    EXPECT_EQ(WaitExit(holder_), 0);
    holder_ = -1;
  }
  bool InChunk1(size_t variable, uint64_t element) const {
    const uint64_t at = segment_->layout().variables()[variable].offset_bytes + element * 4;
    return at / kChunkBytes == 1;
  }
  void Expect(const Arrays& arrays, double moved, double skipped) const {
    for (size_t v = 0; v < arrays.values.size(); ++v) {
      for (uint64_t i = 0; i < arrays.layout.variables()[v].num_elements; ++i) {
        ASSERT_EQ(arrays.at(v, i), InChunk1(v, i) ? skipped : moved) << v << " " << i;
      }
    }
  }
  // Without the lock, which its owner will not give up.
  void ExpectCenter(double moved, double skipped) const {
    for (const Variable& variable : segment_->layout().variables()) {
      const auto v = static_cast<size_t>(&variable - segment_->layout().variables().data());
      const auto* const center =
          reinterpret_cast<const float*>(segment_->center() + variable.offset_bytes);
      for (uint64_t i = 0; i < variable.num_elements; ++i) {
        ASSERT_EQ(center[i], InChunk1(v, i) ? skipped : moved);
      }
    }
  }
  UpdateReport Move(UpdateRequest request, ThreadPool* pool = nullptr) {
    request.busy_chunk_timeout_s = 0.05;
    return Update(segment_, request, pool);
  }

  Segment* const segment_ = Make();
  pid_t holder_ = -1;
};

TEST_F(StoppedHolderTest, SkippedChunkSaysThatNothingMoved) {
  Arrays x(*segment_, 4.0), out(*segment_, -1.0);
  UpdateReport report = Move(RequestOf(MoveKind::kElastic, 0.25, x, &out));
  EXPECT_EQ(report.chunks_skipped, 1u);
  EXPECT_EQ(report.chunks_moved, segment_->num_chunks() - 1);
  Expect(out, 5.0, 4.0);
  ExpectCenter(7.0, 8.0);

  ThreadPool pool(3);
  report = Move(RequestOf(MoveKind::kElastic, 0.5, x, &out, MoveOutput::kDelta), &pool);
  EXPECT_EQ(report.chunks_skipped, 1u);
  Expect(out, -1.5, 0.0);
  ExpectCenter(5.5, 8.0);

  Move(RequestOf(MoveKind::kElastic, 0.5, x, &x));
  Expect(x, 4.75, 4.0);  // in place
}

TEST_F(StoppedHolderTest, SkippedProgressIsMadeUpLater) {
  Arrays x(*segment_, 9.0);
  std::vector<float> last(segment_->layout().size_bytes() / sizeof(float), 8.0f);
  UpdateRequest request = RequestOf(MoveKind::kDelta, 1.0, x, &x);
  request.last = last.data();
  ASSERT_EQ(Move(request).chunks_skipped, 1u);
  ExpectCenter(9.0, 8.0);
  Continue();
  ASSERT_EQ(Move(request).chunks_skipped, 0u);
  ExpectCenter(9.0, 9.0);
}

TEST_F(StoppedHolderTest, SkippedAccumulateIsCounted) {
  Arrays x(*segment_, 1.0);
  const UpdateReport report = Move(RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr));
  EXPECT_EQ(report.chunks_skipped, 1u);
  EXPECT_EQ(report.chunks_moved, 3u);
  ExpectCenter(9.0, 8.0);
  Continue();
  ExpectCenter(9.0, 8.0);  // nothing comes late
  EXPECT_EQ(Move(RequestOf(MoveKind::kAccumulate, 1.0, x, nullptr)).chunks_skipped, 0u);
  ExpectCenter(10.0, 9.0);
}

TEST_F(StoppedHolderTest, SkippedShareIsCounted) {
  ASSERT_EQ(*segment_->EnterRound(*segment_->Join(0)), 1u);
  Arrays x(*segment_, 4.0), mean(*segment_, -1.0);
  const UpdateReport report = Move(ShareOf(x, 1, 1.0, &mean));
  EXPECT_EQ(report.chunks_skipped, 1u);
  Expect(mean, 4.0, -1.0);
  ExpectCenter(4.0, 8.0);
}

TEST_F(StoppedHolderTest, ReadingNamesTheChunk) {
  Arrays x(*segment_);
  ThreadPool pool(3);
  for (ThreadPool* const threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
    const Status read = ReadCenter(segment_, x.spans(), Deadline::After(0.05), threads);
    EXPECT_EQ(read.code(), StatusCode::kDeadlineExceeded);
    EXPECT_EQ(WithoutAnchor(read.message()),
              "chunk 1 of segment 'run/0' stayed locked: the worker that holds it is stopped");
    EXPECT_EQ(WriteCenter(segment_, x.const_spans(), Deadline::After(0.05), threads).code(),
              StatusCode::kDeadlineExceeded);
  }
  EXPECT_EQ(Axpy(segment_, 1.0, segment_, Deadline::After(0.05)).code(),
            StatusCode::kDeadlineExceeded);
}

// What does not lie in the chunk does not wait for it.
TEST_F(StoppedHolderTest, OtherPartsGoOn) {
  std::vector<float> values(100, 1.0f);
  EXPECT_TRUE(ReadCenter(segment_, {{0, 0, 100, values.data()}}, Deadline::After(0), nullptr).ok());
  EXPECT_EQ(values[99], 8.0f);
  EXPECT_FALSE(ReadCenter(segment_, {{2, 0, 1, values.data()}}, Deadline::After(0), nullptr).ok());
}

TEST_F(StoppedHolderTest, ChunkIsWaitedForAtTheEnd) {
  const pid_t waker = Spawn([this] {
    usleep(100'000);
    kill(holder_, SIGCONT);
    return 0;
  });
  Arrays x(*segment_, 4.0);
  const UpdateReport report = Update(segment_, RequestOf(MoveKind::kElastic, 0.25, x, &x));
  EXPECT_EQ(report.chunks_moved, segment_->num_chunks());
  EXPECT_TRUE(x.AllEqual(5.0));
  EXPECT_EQ(WaitExit(waker), 0);
  EXPECT_EQ(WaitExit(holder_), 0);
  holder_ = -1;
}

}  // namespace
}  // namespace tf_smb
