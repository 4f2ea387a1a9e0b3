// What every transport does, whatever lies between client and server: one suite, run for
// each. A new transport adds itself to Setups(), below.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cc/box/exchange_kernel.h"
#include "cc/box/segment_data.h"
#include "cc/client/client.h"
#include "cc/server/server.h"
#include "cc/transport/registry.h"

namespace tf_smb {
namespace {

constexpr double kLongSeconds = 60.0;
constexpr double kShortSeconds = 0.05;
// Of members that are to lapse; one that renews must not, however slow the machine.
constexpr double kLeaseSeconds = 1.0;

Deadline Long() { return Deadline::After(kLongSeconds); }
Deadline Short() { return Deadline::After(kShortSeconds); }

struct Setup {
  std::string scheme;
  // An address that nobody listens at.
  std::function<std::string()> new_address;
  bool reaches_other_processes;
};

std::string NewName(const std::string& scheme) {
  static std::atomic<int> count{0};
  return scheme + "://contract-" + std::to_string(getpid()) + "-" + std::to_string(++count);
}

std::vector<Setup> Setups() {
  return {{"shm", [] { return NewName("shm"); }, true},
          {"loopback", [] { return NewName("loopback"); }, false}};
}

bool WaitUntil(const std::function<bool()>& condition) {
  const Deadline deadline = Long();
  while (!condition()) {
    if (deadline.Expired()) return false;
    usleep(1000);
  }
  return true;
}

// Holds the lock of a chunk, on a thread of its own, as a stopped worker would.
class ChunkHolder {
 public:
  ChunkHolder(std::shared_ptr<Segment> segment, uint64_t chunk)
      : segment_(std::move(segment)), thread_([this, chunk] {
          ASSERT_TRUE(Holds(segment_->LockChunk(chunk, Long())));
          held_.store(true);
          while (!released_.load()) usleep(1000);
          segment_->UnlockChunk(chunk);
        }) {
    EXPECT_TRUE(WaitUntil([this] { return held_.load(); }));
  }
  ~ChunkHolder() { Release(); }
  void Release() {
    released_.store(true);
    if (thread_.joinable()) thread_.join();
  }

 private:
  const std::shared_ptr<Segment> segment_;
  std::atomic<bool> held_{false};
  std::atomic<bool> released_{false};
  std::thread thread_;
};

// Also of nothing, from nowhere.
void Copy(char* to, const char* from, uint64_t size_bytes) { std::copy_n(from, size_bytes, to); }

Variable VariableOf(const std::string& name, DType dtype, std::vector<int64_t> shape) {
  Variable variable;
  variable.name = name;
  variable.dtype = dtype;
  variable.shape = std::move(shape);
  return variable;
}

Layout LayoutOf(std::vector<Variable> variables) {
  return std::move(Layout::Create(std::move(variables))).value();
}

// Odd sizes: nothing, one, a few, and several chunks.
Layout LayoutOfAllSizes(DType dtype) {
  return LayoutOf({VariableOf("scalar", dtype, {}), VariableOf("empty", dtype, {3, 0}),
                   VariableOf("one", dtype, {1}), VariableOf("odd", dtype, {3, 5}),
                   VariableOf("large", dtype, {23333, 3}), VariableOf("last", dtype, {7})});
}

Layout SmallLayout() {
  return LayoutOf({VariableOf("a", DType::kFloat32, {4}), VariableOf("b", DType::kFloat32, {5})});
}

// Memory for the values of some variables, each in the owner's dtype or the center's.
struct Values {
  explicit Values(const Layout& layout, bool wide = false) : wide(wide) {
    for (const Variable& variable : layout.variables()) {
      const DType dtype = wide ? CenterDType(variable.dtype) : variable.dtype;
      data.emplace_back(variable.num_elements * ElementBytes(dtype));
    }
  }
  std::vector<Span> Whole(const Layout& layout) {
    std::vector<Span> spans;
    for (uint32_t v = 0; v < data.size(); ++v) {
      spans.push_back({v, 0, layout.variables()[v].num_elements, data[v].data(), wide});
    }
    return spans;
  }
  std::vector<ConstSpan> WholeConst(const Layout& layout) const {
    std::vector<ConstSpan> spans;
    for (uint32_t v = 0; v < data.size(); ++v) {
      spans.push_back({v, 0, layout.variables()[v].num_elements, data[v].data(), wide});
    }
    return spans;
  }
  std::vector<void*> Outs() {
    std::vector<void*> outs;
    for (std::vector<char>& one : data) outs.push_back(one.data());
    return outs;
  }
  bool operator==(const Values& other) const { return data == other.data; }

  bool wide;
  std::vector<std::vector<char>> data;
};

// Finite numbers, where the dtype has others.
void Randomize(const Layout& layout, std::mt19937* random, Values* values) {
  for (uint32_t v = 0; v < values->data.size(); ++v) {
    const DType dtype = layout.variables()[v].dtype;
    std::vector<char>& bytes = values->data[v];
    if (!IsAveraged(dtype)) {
      const int range = dtype == DType::kBool ? 2 : 256;
      for (char& byte : bytes) byte = static_cast<char>((*random)() % range);
      continue;
    }
    std::vector<char> center(layout.variables()[v].size_bytes());
    for (uint64_t i = 0; i < layout.variables()[v].num_elements; ++i) {
      const double value = std::uniform_real_distribution<double>(-4, 4)(*random);
      if (CenterDType(dtype) == DType::kFloat64) {
        std::memcpy(center.data() + i * 8, &value, 8);
      } else {
        const auto narrow = static_cast<float>(value);
        std::memcpy(center.data() + i * 4, &narrow, 4);
      }
    }
    if (values->wide) {
      bytes = center;
    } else {
      FromCenter(dtype, center.data(), bytes.data(), layout.variables()[v].num_elements);
    }
  }
}

class TransportContractTest : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    address_ = GetParam().new_address();
    StartServer(10.0);
    connection_ = Connect();
  }

  Transport* transport() const {
    return std::move(FindTransport(*Address::Parse(address_))).value();
  }
  bool shared_memory() const { return transport()->capabilities().shared_memory; }

  void StartServer(double lease_s) {
    server_.reset();
    ServerOptions options;
    options.address = address_;
    options.lease_s = lease_s;
    Result<std::unique_ptr<Server>> server = Server::Start(options);
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(server).value();
  }

  void Restart(double lease_s) {
    StartServer(lease_s);
    connection_ = Connect();
  }

  std::unique_ptr<Connection> Connect() const { return ConnectTo(address_); }
  std::unique_ptr<Connection> ConnectTo(const std::string& address) const {
    Result<std::unique_ptr<Connection>> connection =
        transport()->Connect(*Address::Parse(address), Long());
    EXPECT_TRUE(connection.ok()) << connection.status().message();
    return std::move(connection).value();
  }

  static OpenRequest RequestFor(const Layout& layout, const std::string& name = "run/0") {
    OpenRequest request;
    request.segment_name = name;
    request.job_id = "job";
    request.num_workers = 3;
    request.layout = layout;
    return request;
  }
  std::unique_ptr<SegmentLink> Open(const Layout& layout, const std::string& name = "run/0") {
    bool created = false;
    Result<std::unique_ptr<SegmentLink>> link =
        connection_->Open(RequestFor(layout, name), &created, Long());
    EXPECT_TRUE(link.ok()) << link.status().message();
    return std::move(link).value();
  }
  std::unique_ptr<SegmentLink> Attach(const std::string& name = "run/0") {
    Result<std::unique_ptr<SegmentLink>> link = connection_->Attach(name, Long());
    EXPECT_TRUE(link.ok()) << link.status().message();
    return std::move(link).value();
  }
  // The server's own.
  std::shared_ptr<Segment> SegmentOf(const std::string& name = "run/0") {
    Request request;
    request.type = MessageType::kAttach;
    request.segment_name = name;
    return server_->Handle(request).segment;
  }

  static Values Center(SegmentLink* link) {
    const Layout& layout = link->control()->layout();
    Values center(layout, /*wide=*/true);
    const Status status = link->Read(center.Whole(layout), Long(), nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return center;
  }
  static void Write(SegmentLink* link, const Values& values) {
    const Status status =
        link->Write(values.WholeConst(link->control()->layout()), Long(), nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  static MemberId Join(SegmentLink* link, uint32_t worker_index) {
    const Result<MemberId> member = link->control()->Join(worker_index);
    EXPECT_TRUE(member.ok()) << member.status().message();
    return member.ok() ? *member : MemberId{};
  }
  static MemberState StateOf(SegmentLink* link, const MemberId& member) {
    for (const MemberInfo& info : link->control()->Members()) {
      if (info.incarnation == member.incarnation) return info.state;
    }
    return MemberState::kFree;
  }

  std::string address_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<Connection> connection_;
};

// --- Addresses, servers, segments ----------------------------------------------------

TEST_P(TransportContractTest, IsViableAndSaysWhatItCanDo) {
  EXPECT_STREQ(transport()->scheme(), GetParam().scheme.c_str());
  const Viability viability = transport()->IsViable();
  EXPECT_TRUE(viability.viable);
  EXPECT_EQ(viability.reason, "");
  const Capabilities capabilities = transport()->capabilities();
  if (capabilities.shared_memory) {
    EXPECT_TRUE(capabilities.one_sided_read);
    EXPECT_TRUE(capabilities.one_sided_write);
    EXPECT_FALSE(capabilities.remote);
  }
}

TEST_P(TransportContractTest, AnAddressHasOneServer) {
  EXPECT_EQ(server_->address(), address_);
  ServerOptions options;
  options.address = address_;
  const Status status = Server::Start(options).status();
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(status.scope(), FailureScope::kCall);
  EXPECT_NE(status.message().find(address_), std::string::npos) << status.message();
  server_.reset();
  EXPECT_TRUE(Server::Start(options).ok());
}

TEST_P(TransportContractTest, NobodyThereIsUnavailableAtTheDeadline) {
  const Address nobody = *Address::Parse(GetParam().new_address());
  for (const double seconds : {0.0, kShortSeconds}) {
    const int64_t before = MonotonicNanos();
    const Status status = transport()->Connect(nobody, Deadline::After(seconds)).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.scope(), FailureScope::kConnection);
    EXPECT_NE(status.message().find(nobody.ToString()), std::string::npos) << status.message();
    EXPECT_GE(MonotonicNanos() - before, static_cast<int64_t>(seconds * 1e9));
  }
}

TEST_P(TransportContractTest, WaitsForAServerToAppear) {
  server_.reset();
  std::thread starter([&] {
    usleep(50'000);
    StartServer(10.0);
  });
  EXPECT_TRUE(Connect()->List(Long()).ok());
  starter.join();
}

TEST_P(TransportContractTest, ConnectsAgainToANewServer) {
  ASSERT_TRUE(connection_->List(Long()).ok());
  server_.reset();
  for (int i = 0; i < 2; ++i) {
    const Status status = connection_->List(Long()).status();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable);
    EXPECT_EQ(status.scope(), FailureScope::kConnection);
  }
  StartServer(10.0);
  EXPECT_TRUE(connection_->List(Long()).ok());
}

TEST_P(TransportContractTest, OpensAttachesListsAndFrees) {
  const Layout layout = SmallLayout();
  bool created = false;
  Result<std::unique_ptr<SegmentLink>> first =
      connection_->Open(RequestFor(layout), &created, Long());
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_TRUE(created);
  Result<std::unique_ptr<SegmentLink>> second =
      Connect()->Open(RequestFor(layout), &created, Long());  // its connection closes at once
  ASSERT_TRUE(second.ok());
  EXPECT_FALSE(created);
  SegmentControl* const control = (*second)->control();
  EXPECT_EQ(control->name(), "run/0");
  EXPECT_EQ(control->job_id(), "job");
  EXPECT_EQ(control->num_workers(), 3u);
  EXPECT_EQ(control->lease_s(), 10.0);
  EXPECT_TRUE(control->layout().CheckSame(layout, "ours").ok());

  const MemberId member = Join(first->get(), 1);
  const Result<std::vector<SegmentSummary>> list = connection_->List(Long());
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->size(), 1u);
  EXPECT_EQ(list->at(0).name, "run/0");
  EXPECT_EQ(list->at(0).job_id, "job");
  EXPECT_EQ(list->at(0).center_bytes, layout.size_bytes());
  EXPECT_EQ(list->at(0).live_members, 1u);
  (*first)->control()->Leave(member);

  EXPECT_TRUE(connection_->Free("run/0", Long()).ok());
  // Those who have it keep it.
  Write(first->get(), Values(layout));
  EXPECT_TRUE(Center(second->get()) == Values(layout, true));
  EXPECT_TRUE(connection_->List(Long())->empty());
}

TEST_P(TransportContractTest, RefusalsAreOfTheCall) {
  Open(SmallLayout());
  bool created = false;
  const Layout other = LayoutOf({VariableOf("a", DType::kFloat64, {4})});
  const std::pair<Status, StatusCode> refusals[] = {
      {connection_->Attach("nobody", Long()).status(), StatusCode::kNotFound},
      {connection_->Free("nobody", Long()), StatusCode::kNotFound},
      {connection_->Open(RequestFor(other), &created, Long()).status(),
       StatusCode::kFailedPrecondition},
  };
  for (const auto& [status, code] : refusals) {
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_EQ(status.scope(), FailureScope::kCall);
    EXPECT_FALSE(status.message().empty());
  }
  EXPECT_TRUE(connection_->List(Long()).ok());
}

TEST_P(TransportContractTest, ManyNamesInOneList) {
  for (int i = 0; i < 40; ++i) Open(SmallLayout(), "s" + std::to_string(i));
  EXPECT_EQ(connection_->List(Long())->size(), 40u);
}

TEST_P(TransportContractTest, RegistersMemory) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values written(layout), read(layout);
  std::mt19937 random(1);
  Randomize(layout, &random, &written);
  {
    Result<std::unique_ptr<MemoryRegion>> region =
        connection_->Register(read.data[0].data(), read.data[0].size());
    ASSERT_TRUE(region.ok()) << region.status().message();
    EXPECT_EQ((*region)->data(), read.data[0].data());
    EXPECT_EQ((*region)->size_bytes(), read.data[0].size());
    Write(link.get(), written);
    ASSERT_TRUE(link->Read(read.Whole(layout), Long(), nullptr).ok());  // one in it, one not
    EXPECT_TRUE(read == written);
  }
  Write(link.get(), Values(layout));
  ASSERT_TRUE(link->Read(read.Whole(layout), Long(), nullptr).ok());
  EXPECT_TRUE(read == Values(layout));
}

// --- Reading and writing -----------------------------------------------------------

TEST_P(TransportContractTest, ReadsWhatWasWrittenInEveryDType) {
  std::mt19937 random(2);
  for (int d = 1; d <= static_cast<int>(DType::kComplex128); ++d) {
    const Layout layout = LayoutOfAllSizes(static_cast<DType>(d));
    const std::unique_ptr<SegmentLink> link = Open(layout, "s" + std::to_string(d));
    Values values(layout), read(layout);
    Randomize(layout, &random, &values);
    Write(link.get(), values);
    ASSERT_TRUE(link->Read(read.Whole(layout), Long(), nullptr).ok());
    EXPECT_TRUE(read == values) << DTypeName(static_cast<DType>(d));
    ThreadPool pool(3);
    Values again(layout);
    ASSERT_TRUE(link->Read(again.Whole(layout), Long(), &pool).ok());
    EXPECT_TRUE(again == values) << DTypeName(static_cast<DType>(d));
    EXPECT_TRUE(connection_->Free("s" + std::to_string(d), Long()).ok());
  }
}

TEST_P(TransportContractTest, ReadsAndWritesPartsAgainstAModel) {
  std::mt19937 random(3);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt64, DType::kUInt8}) {
    const Layout layout = LayoutOfAllSizes(dtype);
    const std::unique_ptr<SegmentLink> link = Open(layout, DTypeName(dtype));
    const uint64_t element = ElementBytes(dtype);
    Values model(layout);
    Write(link.get(), model);
    for (int round = 0; round < 12; ++round) {
      Values source(layout);
      Randomize(layout, &random, &source);
      std::vector<ConstSpan> writes;
      std::vector<Span> reads;
      Values read(layout);
      for (uint32_t v = 0; v < layout.variables().size(); ++v) {
        if (random() % 3 == 0) continue;
        const uint64_t size = layout.variables()[v].num_elements;
        const uint64_t first = random() % (size + 1);
        const uint64_t count = random() % (size - first + 1);
        writes.push_back({v, first, count, source.data[v].data() + first * element, false});
        reads.push_back({v, first, count, read.data[v].data() + first * element, false});
        Copy(model.data[v].data() + first * element, source.data[v].data() + first * element,
             count * element);
      }
      ASSERT_TRUE(link->Write(writes, Long(), nullptr).ok());
      ASSERT_TRUE(link->Read(reads, Long(), nullptr).ok());
      for (const Span& span : reads) {
        const char* const got = read.data[span.variable].data() + span.first * element;
        EXPECT_TRUE(std::equal(got, got + span.count * element,
                               source.data[span.variable].data() + span.first * element));
      }
    }
    Values all(layout);
    ASSERT_TRUE(link->Read(all.Whole(layout), Long(), nullptr).ok());
    EXPECT_TRUE(all == model) << DTypeName(dtype);
  }
}

TEST_P(TransportContractTest, WideSpansAreTheCenterItself) {
  std::mt19937 random(4);
  const Layout layout = LayoutOfAllSizes(DType::kFloat16);
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values center(layout, /*wide=*/true);
  Randomize(layout, &random, &center);
  Write(link.get(), center);
  EXPECT_TRUE(Center(link.get()) == center);
  Values narrow(layout), expected(layout);
  ASSERT_TRUE(link->Read(narrow.Whole(layout), Long(), nullptr).ok());
  for (size_t v = 0; v < center.data.size(); ++v) {
    FromCenter(DType::kFloat16, center.data[v].data(), expected.data[v].data(),
               layout.variables()[v].num_elements);
  }
  EXPECT_TRUE(narrow == expected);
}

TEST_P(TransportContractTest, SpansThatDoNotFitAreRefused) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Write(link.get(), Values(layout));
  std::vector<float> data(16, 1.0f);
  const auto span = [&](uint32_t variable, uint64_t first, uint64_t count) {
    return ConstSpan{variable, first, count, data.data(), false};
  };
  const std::vector<std::vector<ConstSpan>> bad = {{span(2, 0, 1)},
                                                   {span(0, 0, 5)},
                                                   {span(0, 5, 0)},
                                                   {span(0, 1, UINT64_MAX)},
                                                   {span(1, 0, 1), span(0, 0, 1)},
                                                   {span(0, 0, 1), span(0, 1, 1)}};
  for (const std::vector<ConstSpan>& spans : bad) {
    std::vector<Span> reads;
    for (const ConstSpan& one : spans) {
      reads.push_back({one.variable, one.first, one.count, data.data(), false});
    }
    UpdateRequest update;
    update.move.kind = MoveKind::kCopy;
    update.local = spans;
    for (const Status& status : {link->Write(spans, Long(), nullptr),
                                 link->Read(reads, Long(), nullptr),
                                 link->Update(update, nullptr).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_EQ(status.scope(), FailureScope::kCall);
    }
  }
  EXPECT_TRUE(Center(link.get()) == Values(layout, true));
}

TEST_P(TransportContractTest, ALockedChunkIsADeadlineThatNamesIt) {
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat32, {150'000})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values values(layout);
  {
    const ChunkHolder holder(SegmentOf(), 1);
    for (const double seconds : {0.0, kShortSeconds}) {
      const Status read = link->Read(values.Whole(layout), Deadline::After(seconds), nullptr);
      const Status write =
          link->Write(values.WholeConst(layout), Deadline::After(seconds), nullptr);
      for (const Status& status : {read, write}) {
        EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status.message();
        EXPECT_EQ(status.scope(), FailureScope::kCall);
        EXPECT_NE(status.message().find("chunk 1"), std::string::npos) << status.message();
      }
    }
    // Others can be reached.
    EXPECT_TRUE(link->Read({{0, 0, 10, values.data[0].data(), false}}, Short(), nullptr).ok());
  }
  EXPECT_TRUE(link->Read(values.Whole(layout), Long(), nullptr).ok());
}

// --- Updates -----------------------------------------------------------------------

const DType kAveraged[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16};

// A worker's side of a segment and what the center should be, moved by ApplyMove itself.
struct Model {
  explicit Model(const Layout& layout)
      : layout(layout), center(layout, true), x(layout), last(layout, true), out(layout) {}

  void Apply(const Move& move) {
    for (size_t v = 0; v < x.data.size(); ++v) {
      const Variable& variable = layout.variables()[v];
      const bool accumulate = move.kind == MoveKind::kAccumulate;
      const bool ok = ApplyMove(move, variable.dtype, x.data[v].data(), center.data[v].data(),
                                move.kind == MoveKind::kDelta ? last.data[v].data() : nullptr,
                                accumulate ? center.data[v].data() : out.data[v].data(),
                                variable.num_elements);
      EXPECT_TRUE(ok);
    }
  }

  const Layout layout;
  Values center, x, last, out;
};

struct PackedLast {
  explicit PackedLast(const Layout& layout) : layout(layout), bytes(layout.size_bytes()) {}
  void Set(const Values& wide) {
    for (size_t v = 0; v < wide.data.size(); ++v) {
      Copy(bytes.data() + layout.variables()[v].offset_bytes, wide.data[v].data(),
           wide.data[v].size());
    }
  }
  Values Get() const {
    Values wide(layout, true);
    for (size_t v = 0; v < wide.data.size(); ++v) {
      Copy(wide.data[v].data(), bytes.data() + layout.variables()[v].offset_bytes,
           wide.data[v].size());
    }
    return wide;
  }

  const Layout layout;
  std::vector<char> bytes;
};

TEST_P(TransportContractTest, MovesGiveTheBitsOfTheKernel) {
  std::mt19937 random(5);
  for (const DType dtype : kAveraged) {
    const Layout layout = LayoutOfAllSizes(dtype);
    const std::unique_ptr<SegmentLink> link = Open(layout, DTypeName(dtype));
    for (const MoveKind kind : {MoveKind::kElastic, MoveKind::kDelta, MoveKind::kCopy}) {
      for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
        SCOPED_TRACE(std::string(DTypeName(dtype)) + " kind " +
                     std::to_string(static_cast<int>(kind)) + " output " +
                     std::to_string(static_cast<int>(output)));
        Model model(layout);
        Randomize(layout, &random, &model.center);
        Randomize(layout, &random, &model.last);
        Write(link.get(), model.center);
        PackedLast last(layout);
        last.Set(model.last);
        for (int exchange = 0; exchange < 3; ++exchange) {
          Randomize(layout, &random, &model.x);
          Values out(layout);
          UpdateRequest update;
          update.move.kind = kind;
          update.move.rate = 0.3;
          update.move.output = output;
          update.local = model.x.WholeConst(layout);
          if (kind != MoveKind::kCopy) update.out = out.Outs();
          if (kind == MoveKind::kDelta) update.last = last.bytes.data();
          update.first_chunk = static_cast<uint64_t>(exchange);
          const Result<UpdateReport> report = link->Update(update, nullptr);
          ASSERT_TRUE(report.ok()) << report.status().message();
          EXPECT_EQ(report->chunks_skipped, 0u);
          EXPECT_EQ(report->chunks_moved, SegmentOf(DTypeName(dtype))->num_chunks());
          EXPECT_EQ(report->version_after, report->version_before + 1);
          EXPECT_FALSE(report->non_finite_variable.has_value());
          model.Apply(update.move);
          EXPECT_TRUE(Center(link.get()) == model.center);
          if (kind != MoveKind::kCopy) {
            EXPECT_TRUE(out == model.out);
          }
          if (kind == MoveKind::kDelta) {
            EXPECT_TRUE(last.Get() == model.last);
          }
        }
      }
    }
  }
}

TEST_P(TransportContractTest, CopySetsLast) {
  std::mt19937 random(6);
  const Layout layout = LayoutOfAllSizes(DType::kBFloat16);
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values x(layout), expected(layout, true);
  Randomize(layout, &random, &x);
  PackedLast last(layout);
  UpdateRequest update;
  update.move.kind = MoveKind::kCopy;
  update.local = x.WholeConst(layout);
  update.last = last.bytes.data();
  ASSERT_TRUE(link->Update(update, nullptr).ok());
  for (size_t v = 0; v < x.data.size(); ++v) {
    ToCenter(DType::kBFloat16, x.data[v].data(), expected.data[v].data(),
             layout.variables()[v].num_elements);
  }
  EXPECT_TRUE(last.Get() == expected);
  EXPECT_TRUE(Center(link.get()) == expected);
}

TEST_P(TransportContractTest, AccumulatesAndReturnsTheNewCenter) {
  std::mt19937 random(7);
  for (const DType dtype : kAveraged) {
    const Layout layout = LayoutOfAllSizes(dtype);
    const std::unique_ptr<SegmentLink> link = Open(layout, DTypeName(dtype));
    Model model(layout);
    Randomize(layout, &random, &model.center);
    Write(link.get(), model.center);
    for (int i = 0; i < 3; ++i) {
      Randomize(layout, &random, &model.x);
      Values out(layout, /*wide=*/true);
      UpdateRequest update;
      update.move.kind = MoveKind::kAccumulate;
      update.move.rate = -0.7;
      update.local = model.x.WholeConst(layout);
      if (i != 1) update.out = out.Outs();
      const Result<UpdateReport> report = link->Update(update, nullptr);
      ASSERT_TRUE(report.ok()) << report.status().message();
      model.Apply(update.move);
      EXPECT_TRUE(Center(link.get()) == model.center);
      if (i != 1) {
        EXPECT_TRUE(out == model.center);
      }
    }
  }
}

TEST_P(TransportContractTest, UpdatesPartsOnly) {
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat64, {200'000})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values zero(layout);
  Write(link.get(), zero);
  const std::vector<double> ones(90'000, 1.0);
  UpdateRequest update;
  update.move.kind = MoveKind::kAccumulate;
  update.move.rate = 1.0;
  update.local = {{0, 50'001, ones.size(), ones.data(), false}};
  ASSERT_TRUE(link->Update(update, nullptr).ok());
  const Values center = Center(link.get());
  const auto* const values = reinterpret_cast<const double*>(center.data[0].data());
  for (uint64_t i = 0; i < 200'000; ++i) {
    ASSERT_EQ(values[i], i >= 50'001 && i < 140'001 ? 1.0 : 0.0) << i;
  }
}

TEST_P(TransportContractTest, AnUpdateInPartsIsOneVersion) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values values(layout);
  Write(link.get(), values);
  const uint64_t before = link->control()->version();
  UpdateRequest update;
  update.move.kind = MoveKind::kCopy;
  for (uint32_t v = 0; v < 2; ++v) {
    update.local = {values.WholeConst(layout)[v]};
    update.advance_version = v == 1;
    ASSERT_TRUE(link->Update(update, nullptr).ok());
    EXPECT_EQ(link->control()->version(), before + v);
  }
  update.local.clear();
  ASSERT_TRUE(link->Update(update, nullptr).ok());
  EXPECT_EQ(link->control()->version(), before + 2);
}

TEST_P(TransportContractTest, NanStaysOutAndItsVariableIsNamed) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> link = Open(layout);
  const float bad_values[] = {std::numeric_limits<float>::quiet_NaN(),
                              std::numeric_limits<float>::infinity()};
  for (const float bad : bad_values) {
    for (const MoveKind kind :
         {MoveKind::kElastic, MoveKind::kDelta, MoveKind::kAccumulate, MoveKind::kCopy}) {
      SCOPED_TRACE(static_cast<int>(kind));
      Values zero(layout), x(layout), out(layout);
      Write(link.get(), zero);
      for (std::vector<char>& data : x.data) {
        for (size_t i = 0; i < data.size() / 4; ++i) {
          const float value = i == 3 ? 1.0f : 2.0f;
          std::memcpy(data.data() + i * 4, &value, 4);
        }
      }
      std::memcpy(x.data[1].data() + 3 * 4, &bad, 4);
      PackedLast last(layout);
      UpdateRequest update;
      update.move.kind = kind;
      update.move.rate = 0.5;
      update.local = x.WholeConst(layout);
      if (kind == MoveKind::kElastic || kind == MoveKind::kDelta) update.out = out.Outs();
      if (kind == MoveKind::kDelta) update.last = last.bytes.data();
      const Result<UpdateReport> report = link->Update(update, nullptr);
      ASSERT_TRUE(report.ok()) << report.status().message();
      ASSERT_TRUE(report->non_finite_variable.has_value());
      EXPECT_EQ(*report->non_finite_variable, 1u);
      EXPECT_EQ(report->chunks_moved, 0u);
      EXPECT_EQ(report->version_after, report->version_before + 1);
      const Values center = Center(link.get());
      float there;
      std::memcpy(&there, center.data[1].data() + 3 * 4, 4);
      EXPECT_EQ(there, 0.0f);
      for (const std::vector<char>& data : center.data) {
        EXPECT_TRUE(AllFinite(DType::kFloat32, data.data(), data.size() / 4));
      }
    }
  }
}

TEST_P(TransportContractTest, BusyChunkIsSkippedAndMovedLater) {
  std::mt19937 random(8);
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat32, {180'000})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  const uint64_t per_chunk = kChunkBytes / 4;
  for (const MoveKind kind : {MoveKind::kElastic, MoveKind::kDelta}) {
    for (const MoveOutput output : {MoveOutput::kValue, MoveOutput::kDelta}) {
      Model model(layout);
      Randomize(layout, &random, &model.center);
      Randomize(layout, &random, &model.x);
      Write(link.get(), model.center);
      PackedLast last(layout);
      last.Set(model.last);
      Values out(layout);
      Randomize(layout, &random, &out);
      UpdateRequest update;
      update.move.kind = kind;
      update.move.rate = 0.25;
      update.move.output = output;
      update.local = model.x.WholeConst(layout);
      update.out = out.Outs();
      if (kind == MoveKind::kDelta) update.last = last.bytes.data();
      update.busy_chunk_timeout_s = kShortSeconds;
      const Values before = model.center;
      const Values last_before = model.last;
      for (const uint64_t busy : {1u, 2u}) {  // in the middle, and the last
        Write(link.get(), before);
        last.Set(last_before);
        model.center = before;
        model.last = last_before;
        {
          const ChunkHolder holder(SegmentOf(), busy);
          const Result<UpdateReport> report = link->Update(update, nullptr);
          ASSERT_TRUE(report.ok()) << report.status().message();
          EXPECT_EQ(report->chunks_moved, 2u);
          EXPECT_EQ(report->chunks_skipped, 1u);
          EXPECT_EQ(report->version_after, report->version_before + 1);
        }
        model.Apply(update.move);
        const uint64_t begin = busy * per_chunk;
        const uint64_t end = std::min<uint64_t>(begin + per_chunk, 180'000);
        const auto put_back = [&](Values* values, const Values& from) {
          std::memcpy(values->data[0].data() + begin * 4, from.data[0].data() + begin * 4,
                      (end - begin) * 4);
        };
        put_back(&model.center, before);
        put_back(&model.last, last_before);
        put_back(&model.out, output == MoveOutput::kValue ? model.x : Values(layout));
        EXPECT_TRUE(Center(link.get()) == model.center);
        EXPECT_TRUE(out == model.out);
        if (kind == MoveKind::kDelta) {
          EXPECT_TRUE(last.Get() == model.last);
        }

        const Result<UpdateReport> again = link->Update(update, nullptr);
        ASSERT_TRUE(again.ok());
        EXPECT_EQ(again->chunks_moved, 3u);
        model.Apply(update.move);
        EXPECT_TRUE(Center(link.get()) == model.center);
        EXPECT_TRUE(out == model.out);
      }
    }
  }
}

TEST_P(TransportContractTest, ChunkThatComesFreeInTimeIsMoved) {
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat32, {180'000})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  const Values values(layout);
  Write(link.get(), values);
  ChunkHolder holder(SegmentOf(), 0);
  std::thread releaser([&] {
    usleep(100'000);
    holder.Release();
  });
  UpdateRequest update;
  update.move.kind = MoveKind::kAccumulate;
  update.move.rate = 1.0;
  update.local = values.WholeConst(layout);
  update.busy_chunk_timeout_s = kLongSeconds;
  const Result<UpdateReport> report = link->Update(update, nullptr);
  releaser.join();
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->chunks_moved, 3u);
  EXPECT_EQ(report->chunks_skipped, 0u);
}

TEST_P(TransportContractTest, WhatIsNotAveragedIsNotUpdated) {
  const Layout layout = LayoutOf({VariableOf("w", DType::kInt32, {4})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  Values values(layout), out(layout);
  UpdateRequest update;
  update.local = values.WholeConst(layout);
  update.out = out.Outs();
  for (const MoveKind kind : {MoveKind::kElastic, MoveKind::kAccumulate, MoveKind::kCopy}) {
    update.move.kind = kind;
    const Status status = link->Update(update, nullptr).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.scope(), FailureScope::kCall);
    EXPECT_NE(status.message().find("int32"), std::string::npos) << status.message();
  }
}

TEST_P(TransportContractTest, AddsSegments) {
  std::mt19937 random(9);
  for (const DType dtype : kAveraged) {
    const Layout layout = LayoutOfAllSizes(dtype);
    const std::unique_ptr<SegmentLink> target = Open(layout, "target");
    const std::unique_ptr<SegmentLink> source = Open(layout, "source");
    Values a(layout, true), b(layout, true);
    Randomize(layout, &random, &a);
    Randomize(layout, &random, &b);
    Write(target.get(), a);
    Write(source.get(), b);
    const uint64_t before = target->control()->version();
    ASSERT_TRUE(target->Axpy(-0.5, source.get(), Long()).ok());
    EXPECT_EQ(target->control()->version(), before + 1);
    const auto add = [&](double scale, const Values& from) {
      Move move;
      move.kind = MoveKind::kAccumulate;
      move.rate = scale;
      const Values copy = from;
      for (size_t v = 0; v < a.data.size(); ++v) {
        ApplyMove(move, CenterDType(dtype), copy.data[v].data(), a.data[v].data(), nullptr,
                  a.data[v].data(), layout.variables()[v].num_elements);
      }
    };
    add(-0.5, b);
    EXPECT_TRUE(Center(target.get()) == a);
    EXPECT_TRUE(Center(source.get()) == b);
    ASSERT_TRUE(target->Axpy(2.0, target.get(), Long()).ok());
    add(2.0, a);
    EXPECT_TRUE(Center(target.get()) == a);
    EXPECT_TRUE(connection_->Free("target", Long()).ok());
    EXPECT_TRUE(connection_->Free("source", Long()).ok());
  }
}

TEST_P(TransportContractTest, AddsOnlySegmentsOfOneLayoutAndServer) {
  const std::unique_ptr<SegmentLink> target = Open(SmallLayout(), "target");
  const std::unique_ptr<SegmentLink> other =
      Open(LayoutOf({VariableOf("a", DType::kFloat32, {4})}), "other");
  EXPECT_EQ(target->Axpy(1.0, other.get(), Long()).code(), StatusCode::kFailedPrecondition);
  ServerOptions options;
  options.address = GetParam().new_address();
  const std::unique_ptr<Server> second = std::move(Server::Start(options)).value();
  bool created = false;
  const std::unique_ptr<SegmentLink> elsewhere =
      std::move(ConnectTo(options.address)->Open(RequestFor(SmallLayout()), &created, Long()))
          .value();
  const Status status = target->Axpy(1.0, elsewhere.get(), Long());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.scope(), FailureScope::kCall);
}

// --- Members -----------------------------------------------------------------------

TEST_P(TransportContractTest, MembersJoinAndLeave) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  EXPECT_TRUE(a->control()->Members().empty());
  const MemberId first = Join(a.get(), 0);
  const Result<MemberId> taken = b->control()->Join(0);
  EXPECT_EQ(taken.status().code(), StatusCode::kAlreadyExists);
  EXPECT_EQ(taken.status().scope(), FailureScope::kCall);
  EXPECT_EQ(b->control()->Join(5000).status().code(), StatusCode::kInvalidArgument);
  const Result<MemberId> second = b->control()->Join(std::nullopt);
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second->incarnation, first.incarnation);
  EXPECT_EQ(a->control()->CountLive(), 2u);
  a->control()->PublishProgress(first, {16, 2, 5});
  a->control()->PublishSteps(first, 17);
  a->control()->SetTraining(first, true);
  const std::vector<MemberInfo> members = b->control()->Members();
  ASSERT_EQ(members.size(), 2u);
  EXPECT_EQ(members[0].worker_index, 0u);
  EXPECT_EQ(members[0].state, MemberState::kLive);
  EXPECT_EQ(members[0].incarnation, first.incarnation);
  EXPECT_EQ(members[0].steps, 17u);
  EXPECT_EQ(members[0].epoch, 2u);
  EXPECT_EQ(members[0].batch, 5u);
  EXPECT_EQ(members[0].phase, 0u);
  EXPECT_EQ(members[0].exchanges, 1u);
  EXPECT_TRUE(members[0].training);
  EXPECT_NE(members[0].process_id, 0u);
  EXPECT_EQ(members[1].worker_index, 1u);
  EXPECT_FALSE(members[1].training);
  EXPECT_TRUE(a->control()->Renew(first).ok());
  EXPECT_TRUE(a->control()->CheckMember(first).ok());

  a->control()->Leave(first);
  EXPECT_EQ(StateOf(b.get(), first), MemberState::kLeft);
  const Status gone = a->control()->CheckMember(first);
  EXPECT_EQ(gone.code(), StatusCode::kAborted);
  EXPECT_EQ(gone.scope(), FailureScope::kLease);
  const MemberId again = Join(a.get(), 0);
  EXPECT_GT(again.incarnation, second->incarnation);
  a->control()->Leave(again);
  b->control()->Leave(*second);
  EXPECT_EQ(a->control()->CountLive(), 0u);
}

TEST_P(TransportContractTest, OfSeveralThatStopOneStays) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  b->control()->SetTraining(second, true);
  EXPECT_FALSE(b->control()->LeaveUnlessLast(second));
  bool left = false;
  std::thread other([&] { left = a->control()->LeaveUnlessLast(first); });
  other.join();
  EXPECT_TRUE(left);
  EXPECT_EQ(StateOf(b.get(), first), MemberState::kLeft);
  a->control()->Leave(first);
  b->control()->Leave(second);
}

TEST_P(TransportContractTest, AMemberThatStopsRenewingIsFenced) {
  Restart(kLeaseSeconds);
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  EXPECT_EQ(a->control()->lease_s(), kLeaseSeconds);
  const MemberId silent = Join(a.get(), 0);
  const MemberId busy = Join(b.get(), 1);
  EXPECT_TRUE(WaitUntil([&] {
    EXPECT_TRUE(b->control()->Renew(busy).ok());
    return StateOf(b.get(), silent) == MemberState::kDead;
  }));
  EXPECT_EQ(b->control()->CountLive(), 1u);
  for (const Status& status : {a->control()->CheckMember(silent), a->control()->Renew(silent)}) {
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_EQ(status.scope(), FailureScope::kLease);
  }
  a->control()->Leave(silent);
  EXPECT_EQ(StateOf(b.get(), silent), MemberState::kDead);
  const MemberId again = Join(a.get(), 0);
  EXPECT_GT(again.incarnation, silent.incarnation);
  EXPECT_TRUE(a->control()->CheckMember(again).ok());
  a->control()->Leave(again);
  b->control()->Leave(busy);
}

TEST_P(TransportContractTest, AbsentWorkersAreKnownToAll) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  EXPECT_FALSE(b->control()->IsAbsent(2));
  a->control()->MarkAbsent(2);
  EXPECT_TRUE(b->control()->IsAbsent(2));
  EXPECT_FALSE(b->control()->IsAbsent(1));
  server_->MarkWorkerAbsent(1);
  EXPECT_TRUE(b->control()->IsAbsent(1));
}

TEST_P(TransportContractTest, AClientGoneWithoutGoodbyeIsSeenDead) {
  const std::unique_ptr<SegmentLink> watcher = Open(SmallLayout());
  const MemberId here = Join(watcher.get(), 1);
  if (GetParam().reaches_other_processes) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const std::unique_ptr<SegmentLink> link =
          std::move(Connect()->Attach("run/0", Long())).value();
      const bool joined = link->control()->Join(0).ok();
      if (write(ready[1], "x", 1) != 1 || !joined) _exit(1);
      for (;;) pause();
    }
    char byte;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    EXPECT_EQ(watcher->control()->CountLive(), 2u);
    kill(child, SIGKILL);
    EXPECT_EQ(waitpid(child, nullptr, 0), child);
    close(ready[0]);
    close(ready[1]);
  } else {
    const std::unique_ptr<SegmentLink> link = Attach();
    Join(link.get(), 0);
    EXPECT_EQ(watcher->control()->CountLive(), 2u);
  }
  EXPECT_TRUE(WaitUntil([&] {
    const std::vector<MemberInfo> members = watcher->control()->Members();
    return members.size() == 2 && members[0].state == MemberState::kDead;
  }));
  EXPECT_TRUE(watcher->control()->CheckMember(here).ok());
  // Long before its lease is over.
  const MemberId successor = Join(watcher.get(), 0);
  watcher->control()->Leave(successor);
  watcher->control()->Leave(here);
}

// --- Seeding and meetings ------------------------------------------------------------

TEST_P(TransportContractTest, OneSeeds) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  EXPECT_FALSE(a->control()->seeded());
  EXPECT_TRUE(a->control()->BeginSeeding(first));
  EXPECT_FALSE(b->control()->BeginSeeding(second));
  b->control()->FinishSeeding(second);
  EXPECT_FALSE(b->control()->seeded());
  a->control()->Leave(first);  // before it finished
  EXPECT_TRUE(b->control()->BeginSeeding(second));
  b->control()->FinishSeeding(second);
  EXPECT_TRUE(a->control()->seeded());
  EXPECT_FALSE(b->control()->BeginSeeding(second));
  b->control()->Leave(second);
}

TEST_P(TransportContractTest, AMeetingClosesWithTheLast) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  a->control()->SetTraining(first, true);
  b->control()->SetTraining(second, true);
  a->control()->PublishProgress(first, {12, 0, 0});
  b->control()->PublishProgress(second, {9, 0, 0});
  const uint64_t meeting = a->control()->Arrive(first);
  EXPECT_FALSE(a->control()->TryCloseMeeting(meeting));
  EXPECT_EQ(b->control()->Arrive(second), meeting);
  EXPECT_TRUE(b->control()->TryCloseMeeting(meeting));
  EXPECT_TRUE(a->control()->TryCloseMeeting(meeting));
  EXPECT_EQ(a->control()->FewestSteps(), 9u);
  EXPECT_FALSE(a->control()->MeetingFinished(meeting));
  a->control()->FinishMeeting(first, meeting);
  EXPECT_FALSE(a->control()->MeetingFinished(meeting));
  b->control()->FinishMeeting(second, meeting);
  EXPECT_TRUE(a->control()->MeetingFinished(meeting));
  EXPECT_GT(a->control()->Arrive(first), meeting);
  a->control()->Leave(first);
  b->control()->Leave(second);
}

// --- Barriers ----------------------------------------------------------------------

TEST_P(TransportContractTest, ABarrierWaitsForThoseListed) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const std::unique_ptr<SegmentLink> c = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  const MemberId third = Join(c.get(), 2);
  using List = std::vector<uint32_t>;
  const Result<uint64_t> barrier = a->control()->ArriveAtBarrier(first, {0, 1});
  ASSERT_TRUE(barrier.ok()) << barrier.status().message();
  EXPECT_EQ(*a->control()->MissingAtBarrier(first, *barrier), List({1}));
  const Result<uint64_t> other = c->control()->ArriveAtBarrier(third, {0, 1, 2});
  ASSERT_TRUE(other.ok());
  EXPECT_NE(*other, *barrier);
  EXPECT_EQ(*c->control()->MissingAtBarrier(third, *other), List({0, 1}));
  const Result<uint64_t> same = b->control()->ArriveAtBarrier(second, {0, 1});
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(*same, *barrier);
  EXPECT_TRUE(b->control()->MissingAtBarrier(second, *same)->empty());
  EXPECT_TRUE(a->control()->MissingAtBarrier(first, *barrier)->empty());
  EXPECT_FALSE(a->control()->WithdrawFromBarrier(first, *barrier));
  EXPECT_TRUE(c->control()->WithdrawFromBarrier(third, *other));

  // Of those that come not at all, or go: the first is waited for, the second is not.
  const Result<uint64_t> next = a->control()->ArriveAtBarrier(first, {0, 2, 3});
  ASSERT_TRUE(next.ok());
  EXPECT_EQ(*a->control()->MissingAtBarrier(first, *next), List({2, 3}));
  c->control()->Leave(third);
  EXPECT_EQ(*a->control()->MissingAtBarrier(first, *next), List({3}));
  a->control()->MarkAbsent(3);
  EXPECT_TRUE(a->control()->MissingAtBarrier(first, *next)->empty());

  const Status not_in_it = a->control()->ArriveAtBarrier(first, {1, 2}).status();
  EXPECT_EQ(not_in_it.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(a->control()->ArriveAtBarrier(first, {0, 9999}).status().code(),
            StatusCode::kInvalidArgument);
  a->control()->Leave(first);
  EXPECT_EQ(a->control()->ArriveAtBarrier(first, {0}).status().code(), StatusCode::kAborted);
  b->control()->Leave(second);
}

TEST_P(TransportContractTest, ADeadMemberLeavesTheBarrier) {
  Restart(kLeaseSeconds);
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId waiting = Join(a.get(), 0);
  const MemberId silent = Join(b.get(), 1);
  const Result<uint64_t> barrier = a->control()->ArriveAtBarrier(waiting, {0, 1});
  ASSERT_TRUE(barrier.ok());
  EXPECT_EQ(a->control()->MissingAtBarrier(waiting, *barrier)->size(), 1u);
  EXPECT_TRUE(WaitUntil([&] {
    EXPECT_TRUE(a->control()->Renew(waiting).ok());
    return a->control()->MissingAtBarrier(waiting, *barrier)->empty();
  }));
  b->control()->Leave(silent);
  a->control()->Leave(waiting);
}

// --- The lock ----------------------------------------------------------------------

TEST_P(TransportContractTest, TheLockHasOneHolder) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 4);
  const MemberId second = Join(b.get(), 5);
  EXPECT_FALSE(a->control()->LockHolder().has_value());
  const Result<uint64_t> token = a->control()->TryLock(first, 60.0);
  ASSERT_TRUE(token.ok()) << token.status().message();
  EXPECT_GT(*token, 0u);
  EXPECT_EQ(*b->control()->TryLock(second, 60.0), 0u);
  EXPECT_EQ(b->control()->LockHolder(), std::optional<uint32_t>(4));
  EXPECT_FALSE(b->control()->Unlock(second, *token).ok());
  EXPECT_TRUE(a->control()->Unlock(first, *token).ok());
  EXPECT_FALSE(b->control()->LockHolder().has_value());
  const Result<uint64_t> next = b->control()->TryLock(second, 60.0);
  ASSERT_TRUE(next.ok());
  EXPECT_GT(*next, *token);
  b->control()->Leave(second);
  EXPECT_GT(*a->control()->TryLock(first, 60.0), *next);
  EXPECT_EQ(a->control()->TryLock(first, -1.0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(a->control()->TryLock(first, std::nan("")).status().code(),
            StatusCode::kInvalidArgument);
  a->control()->Leave(first);
}

TEST_P(TransportContractTest, TheLockLapses) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  const Result<uint64_t> token = a->control()->TryLock(first, kShortSeconds);
  ASSERT_TRUE(token.ok());
  Result<uint64_t> next = uint64_t{0};
  EXPECT_TRUE(WaitUntil([&] {
    next = b->control()->TryLock(second, 60.0);
    return next.ok() && *next != 0;
  }));
  EXPECT_GT(*next, *token);
  EXPECT_EQ(a->control()->Unlock(first, *token).code(), StatusCode::kAborted);
  EXPECT_EQ(a->control()->LockHolder(), std::optional<uint32_t>(1));
  a->control()->Leave(first);
  b->control()->Leave(second);
}

// --- Rounds ------------------------------------------------------------------------

UpdateRequest ShareOf(const Layout& layout, const Values& values, uint64_t round, double weight) {
  UpdateRequest update;
  update.local = values.WholeConst(layout);
  update.round = RoundShare{round, weight};
  return update;
}

TEST_P(TransportContractTest, ARoundIsTheWeightedMean) {
  std::mt19937 random(10);
  for (const DType dtype : kAveraged) {
    const Layout layout = LayoutOfAllSizes(dtype);
    const std::unique_ptr<SegmentLink> a = Open(layout, DTypeName(dtype));
    const std::unique_ptr<SegmentLink> b = Attach(DTypeName(dtype));
    const MemberId first = Join(a.get(), 0);
    const MemberId second = Join(b.get(), 1);
    Values x(layout), y(layout), mean(layout, true);
    Randomize(layout, &random, &x);
    Randomize(layout, &random, &y);
    for (uint64_t round = 1; round <= 2; ++round) {
      EXPECT_EQ(*a->control()->EnterRound(first), round);
      const uint64_t before = a->control()->version();
      ASSERT_TRUE(a->Update(ShareOf(layout, x, round, 1.5), nullptr).ok());
      a->control()->FinishShare(first, round, false);
      EXPECT_EQ(a->control()->MissingInRound(), std::vector<uint32_t>({1}));
      EXPECT_FALSE(a->control()->TryCloseRound(round, false));
      EXPECT_EQ(*b->control()->EnterRound(second), round);
      ASSERT_TRUE(b->Update(ShareOf(layout, y, round, 0.5), nullptr).ok());
      b->control()->FinishShare(second, round, false);
      EXPECT_EQ(b->control()->version(), before + 2);
      EXPECT_TRUE(b->control()->TryCloseRound(round, false));
      EXPECT_EQ(a->control()->rounds_closed(), round);
      for (size_t v = 0; v < x.data.size(); ++v) {
        const uint64_t size = layout.variables()[v].num_elements;
        Move blend;
        blend.kind = MoveKind::kBlend;
        blend.rate = 0.5 / 2.0;
        ToCenter(dtype, x.data[v].data(), mean.data[v].data(), size);
        ApplyMove(blend, dtype, y.data[v].data(), mean.data[v].data(), nullptr,
                  mean.data[v].data(), size);
      }
      EXPECT_TRUE(Center(a.get()) == mean) << DTypeName(dtype) << " " << round;
      a->control()->FinishRound(first, round);
      EXPECT_EQ(b->control()->MissingInRound(), std::vector<uint32_t>({1}));
      EXPECT_EQ(*a->control()->EnterRound(first), 0u);  // the other still reads
      b->control()->FinishRound(second, round);
      EXPECT_TRUE(b->control()->MissingInRound().empty());
    }
    a->control()->Leave(first);
    b->control()->Leave(second);
  }
}

TEST_P(TransportContractTest, LateInARound) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> a = Open(layout);
  const std::unique_ptr<SegmentLink> b = Attach();
  const std::unique_ptr<SegmentLink> c = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  const Values values(layout);
  EXPECT_EQ(*a->control()->EnterRound(first), 1u);
  const MemberId late = Join(c.get(), 2);
  EXPECT_EQ(*c->control()->EnterRound(late), 0u);
  ASSERT_TRUE(a->Update(ShareOf(layout, values, 1, 1.0), nullptr).ok());
  a->control()->FinishShare(first, 1, false);
  EXPECT_FALSE(a->control()->TryCloseRound(1, false));
  EXPECT_TRUE(a->control()->TryCloseRound(1, /*force=*/true));
  const Status refused = b->Update(ShareOf(layout, values, 1, 1.0), nullptr).status();
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition) << refused.ToString();
  a->control()->FinishRound(first, 1);
  EXPECT_EQ(*c->control()->EnterRound(late), 2u);
  EXPECT_EQ(*b->control()->EnterRound(second), 2u);
  a->control()->Leave(first);
  b->control()->Leave(second);
  c->control()->Leave(late);
}

// Five members that come in any order: whoever came first, the same weights give the same
// bits.
TEST_P(TransportContractTest, SharesAreAddedByIndex) {
  constexpr uint32_t kMembers = 5;
  const Layout layout = LayoutOfAllSizes(DType::kFloat32);
  std::vector<std::unique_ptr<SegmentLink>> links;
  std::vector<MemberId> members;
  std::vector<Values> values;
  std::mt19937 random(11);
  for (uint32_t i = 0; i < kMembers; ++i) {
    links.push_back(i == 0 ? Open(layout) : Attach());
    members.push_back(Join(links[i].get(), i));
    values.emplace_back(layout);
    Randomize(layout, &random, &values.back());
  }
  std::vector<uint32_t> arrivals = {0, 1, 2, 3, 4};
  std::unique_ptr<Values> expected;
  for (uint64_t round = 1; round <= 6; ++round) {
    for (const uint32_t i : arrivals) {
      EXPECT_EQ(*links[i]->control()->EnterRound(members[i]), round);
    }
    std::vector<uint32_t> waiting = arrivals, added;
    while (!waiting.empty()) {
      const auto next = std::find_if(waiting.begin(), waiting.end(), [&](uint32_t i) {
        return links[i]->control()->IsTurn(members[i], round);
      });
      ASSERT_NE(next, waiting.end());
      const uint32_t i = *next;
      waiting.erase(next);
      ASSERT_TRUE(links[i]->Update(ShareOf(layout, values[i], round, 1.0 + i), nullptr).ok());
      links[i]->control()->FinishShare(members[i], round, false);
      added.push_back(i);
    }
    EXPECT_EQ(added, std::vector<uint32_t>({0, 1, 2, 3, 4}));
    ASSERT_TRUE(links[0]->control()->TryCloseRound(round, false));
    const Values mean = Center(links[0].get());
    if (expected == nullptr) expected = std::make_unique<Values>(mean);
    EXPECT_TRUE(mean == *expected) << round;
    for (uint32_t i = 0; i < kMembers; ++i) {
      links[i]->control()->FinishRound(members[i], round);
    }
    std::shuffle(arrivals.begin(), arrivals.end(), random);
  }
  for (uint32_t i = 0; i < kMembers; ++i) links[i]->control()->Leave(members[i]);
}

TEST_P(TransportContractTest, TurnsPassByThoseWhoGo) {
  Restart(kLeaseSeconds);
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const std::unique_ptr<SegmentLink> c = Attach();
  const std::unique_ptr<SegmentLink> d = Attach();
  const MemberId silent = Join(a.get(), 0);
  const MemberId leaver = Join(b.get(), 1);
  const MemberId done = Join(c.get(), 2);
  const MemberId last = Join(d.get(), 3);
  const auto renew = [&] {  // all but the silent one
    EXPECT_TRUE(b->control()->Renew(leaver).ok());
    EXPECT_TRUE(c->control()->Renew(done).ok());
    EXPECT_TRUE(d->control()->Renew(last).ok());
  };
  ASSERT_EQ(*d->control()->EnterRound(last), 1u);
  EXPECT_TRUE(WaitUntil([&] {
    renew();
    return b->control()->IsTurn(leaver, 1);  // the silent one has lapsed
  }));
  EXPECT_FALSE(d->control()->IsTurn(last, 1));
  b->control()->Leave(leaver);
  EXPECT_FALSE(d->control()->IsTurn(last, 1));
  EXPECT_EQ(d->control()->MissingInRound(), std::vector<uint32_t>({2, 3}));
  c->control()->Arrive(done);  // at a meeting, in the middle of the round
  EXPECT_TRUE(d->control()->IsTurn(last, 1));
  d->control()->FinishShare(last, 1, false);
  EXPECT_TRUE(d->control()->TryCloseRound(1, false));
  d->control()->FinishRound(last, 1);
  // Nor is it waited for in the next one.
  EXPECT_EQ(*d->control()->EnterRound(last), 2u);
  EXPECT_EQ(d->control()->MissingInRound(), std::vector<uint32_t>({3}));
  a->control()->Leave(silent);
  c->control()->Leave(done);
  d->control()->Leave(last);
}

// --- The schedule --------------------------------------------------------------------

TEST_P(TransportContractTest, ARoundEndsAPhaseOnce) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  for (uint64_t round = 1; round <= 4; ++round) {  // said by nobody, one, the other, both
    ASSERT_EQ(*a->control()->EnterRound(first), round);
    ASSERT_EQ(*b->control()->EnterRound(second), round);
    const uint64_t before = a->control()->phase();
    const uint64_t says = round - 1;
    a->control()->FinishShare(first, round, (says & 1) != 0);
    b->control()->FinishShare(second, round, (says & 2) != 0);
    EXPECT_EQ(b->control()->phase(), before);
    EXPECT_TRUE(a->control()->TryCloseRound(round, false));
    EXPECT_TRUE(b->control()->TryCloseRound(round, true));
    EXPECT_EQ(b->control()->phase(), before + (says == 0 ? 0 : 1));
    a->control()->FinishRound(first, round);
    b->control()->FinishRound(second, round);
  }
  EXPECT_EQ(a->control()->phase(), 3u);
  ASSERT_EQ(*a->control()->EnterRound(first), 5u);
  a->control()->FinishShare(first, 5, true);
  EXPECT_TRUE(a->control()->TryCloseRound(5, /*force=*/true));
  EXPECT_EQ(a->control()->phase(), 4u);
  a->control()->Leave(first);
  b->control()->Leave(second);
}

TEST_P(TransportContractTest, PhasesWaitForThoseInTraining) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const std::unique_ptr<SegmentLink> c = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  ASSERT_TRUE(a->control()->BeginSeeding(first));
  b->control()->SetFirstPhase(second, 7);  // not the seeder
  EXPECT_EQ(a->control()->phase(), 0u);
  a->control()->SetFirstPhase(first, 2);
  a->control()->FinishSeeding(first);
  EXPECT_EQ(b->control()->phase(), 2u);
  a->control()->SetTraining(first, true);
  b->control()->SetTraining(second, true);
  a->control()->EnterPhase(first, 2);
  EXPECT_FALSE(a->control()->TryEndPhase(first, 2));
  b->control()->EnterPhase(second, 2);
  EXPECT_TRUE(a->control()->TryEndPhase(first, 2));
  EXPECT_TRUE(b->control()->TryEndPhase(second, 2));
  EXPECT_EQ(b->control()->phase(), 3u);
  const MemberId late = Join(c.get(), 2);  // into the present phase
  c->control()->SetTraining(late, true);
  EXPECT_EQ(a->control()->Members().at(2).phase, 3u);
  a->control()->EnterPhase(first, 3);
  EXPECT_FALSE(a->control()->TryEndPhase(first, 3));
  EXPECT_FALSE(a->control()->TryEndPhase(first, 4));
  b->control()->Arrive(second);
  EXPECT_TRUE(a->control()->TryEndPhase(first, 3));
  EXPECT_FALSE(a->control()->TryEndPhase(first, 4));  // the late one is in 3
  c->control()->Leave(late);
  a->control()->EnterPhase(first, 4);
  EXPECT_TRUE(a->control()->TryEndPhase(first, 4));
  EXPECT_EQ(c->control()->phase(), 5u);
  a->control()->Leave(first);
  b->control()->Leave(second);
}

TEST_P(TransportContractTest, AllHaveOneScheduleInWords) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  const std::string words(kMaxTextBytes, 'w');
  EXPECT_EQ(b->control()->AgreeOnSchedule(second, words + "w").status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(*b->control()->AgreeOnSchedule(second, words), words);
  EXPECT_EQ(*a->control()->AgreeOnSchedule(first, "others"), words);
  a->control()->Leave(first);
  EXPECT_EQ(a->control()->AgreeOnSchedule(first, words).status().code(), StatusCode::kAborted);
  b->control()->Leave(second);
}

// --- Words to all --------------------------------------------------------------------

TEST_P(TransportContractTest, NoticesReachAll) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  EXPECT_EQ(a->control()->LastNotice().number, 0u);
  const std::string texts[] = {"one", std::string(kMaxTextBytes, 'x'), "",
                               std::string("with\0zero", 9)};
  uint64_t number = 0;
  for (const std::string& text : texts) {
    SegmentLink* const poster = number % 2 == 0 ? a.get() : b.get();
    const MemberId poster_id = number % 2 == 0 ? first : second;
    EXPECT_EQ(*poster->control()->PostNotice(poster_id, text), number + 1);
    ++number;
    for (SegmentLink* const link : {a.get(), b.get()}) {
      const Notice notice = link->control()->LastNotice();
      EXPECT_EQ(notice.number, number);
      EXPECT_EQ(notice.text, text);
    }
  }
  const Status refused =
      a->control()->PostNotice(first, std::string(kMaxTextBytes + 1, 'x')).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refused.message().find("4097 bytes, more than 4096"), std::string::npos);
  a->control()->Leave(first);
  EXPECT_EQ(a->control()->PostNotice(first, "gone").status().code(), StatusCode::kAborted);
  EXPECT_EQ(b->control()->LastNotice().number, number);
  b->control()->Leave(second);
}

TEST_P(TransportContractTest, AStopHoldsUntilTheMeeting) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const MemberId first = Join(a.get(), 0);
  const MemberId second = Join(b.get(), 1);
  EXPECT_FALSE(b->control()->stop_requested());
  a->control()->RequestStop(first);
  EXPECT_TRUE(b->control()->stop_requested());
  const uint64_t meeting = a->control()->Arrive(first);
  EXPECT_FALSE(a->control()->TryCloseMeeting(meeting));
  EXPECT_TRUE(b->control()->stop_requested());
  EXPECT_EQ(b->control()->Arrive(second), meeting);
  EXPECT_TRUE(b->control()->TryCloseMeeting(meeting));
  EXPECT_FALSE(a->control()->stop_requested());
  a->control()->Leave(first);
  b->control()->Leave(second);
}

// --- Waiting -----------------------------------------------------------------------

TEST_P(TransportContractTest, VersionsCountAndWake) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> a = Open(layout);
  const std::unique_ptr<SegmentLink> b = Attach();
  const uint64_t before = a->control()->version();
  EXPECT_EQ(a->control()->WaitForVersion(before, 60 * kNanosPerSecond), before);
  const int64_t start = MonotonicNanos();
  EXPECT_EQ(a->control()->WaitForVersion(before + 1, kNanosPerSecond / 20), before);
  EXPECT_LT(MonotonicNanos() - start, 5 * kNanosPerSecond);
  std::thread writer([&] {
    usleep(30'000);
    Write(b.get(), Values(layout));
    Write(b.get(), Values(layout));
  });
  const Deadline deadline = Long();
  while (a->control()->WaitForVersion(before + 2, kNanosPerSecond) < before + 2) {
    ASSERT_FALSE(deadline.Expired());
  }
  writer.join();
  EXPECT_EQ(b->control()->version(), before + 2);
  EXPECT_LT(MonotonicNanos() - start, 30 * kNanosPerSecond);
}

TEST_P(TransportContractTest, ChangesWake) {
  const std::unique_ptr<SegmentLink> a = Open(SmallLayout());
  const std::unique_ptr<SegmentLink> b = Attach();
  const uint32_t seen = a->control()->changes();
  a->control()->WaitForChange(seen, kNanosPerSecond / 100);
  std::thread changer([&] {
    usleep(30'000);
    b->control()->MarkAbsent(7);
  });
  const Deadline deadline = Long();
  while (a->control()->changes() == seen) {
    ASSERT_FALSE(deadline.Expired());
    a->control()->WaitForChange(seen, 10 * kNanosPerSecond);
  }
  changer.join();
  EXPECT_TRUE(a->control()->IsAbsent(7));
}

TEST_P(TransportContractTest, RenewalsWaitForNobody) {
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat32, {150'000})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  const MemberId member = Join(link.get(), 0);
  Values values(layout);
  ChunkHolder holder(SegmentOf(), 1);
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    EXPECT_TRUE(link->Read(values.Whole(layout), Long(), nullptr).ok());
    ++done;
  });
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (link->control()->version() < 1) {
        link->control()->WaitForVersion(1, 10 * kNanosPerSecond);
      }
      ++done;
    });
  }
  usleep(20'000);
  const int64_t start = MonotonicNanos();
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(link->control()->Renew(member).ok());
  EXPECT_LT(MonotonicNanos() - start, 3 * kNanosPerSecond);
  EXPECT_EQ(done.load(), 0);
  // Nor does one exchange for another's chunk.
  EXPECT_TRUE(link->Write({{0, 0, 4, "0123456789abcdef", false}}, Long(), nullptr).ok());
  holder.Release();
  for (std::thread& thread : threads) thread.join();
  link->control()->Leave(member);
}

// --- Loss --------------------------------------------------------------------------

TEST_P(TransportContractTest, TheServerGoes) {
  const Layout layout = SmallLayout();
  const std::unique_ptr<SegmentLink> link = Open(layout);
  const MemberId member = Join(link.get(), 0);
  Values values(layout);
  Write(link.get(), values);
  server_.reset();
  EXPECT_EQ(connection_->List(Long()).status().code(), StatusCode::kUnavailable);
  UpdateRequest update;
  update.move.kind = MoveKind::kCopy;
  update.local = values.WholeConst(layout);
  const int64_t start = MonotonicNanos();
  const Status statuses[] = {link->Read(values.Whole(layout), Long(), nullptr),
                             link->Write(values.WholeConst(layout), Long(), nullptr),
                             link->Update(update, nullptr).status(),
                             link->Axpy(1.0, link.get(), Long()),
                             link->control()->Renew(member),
                             link->control()->CheckMember(member)};
  for (const Status& status : statuses) {
    if (shared_memory()) {
      EXPECT_TRUE(status.ok()) << status.message();
    } else {
      EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status.ToString();
      EXPECT_EQ(status.scope(), FailureScope::kConnection);
    }
  }
  // Nothing that says no failure hangs.
  link->control()->WaitForChange(link->control()->changes(), kNanosPerSecond / 100);
  link->control()->WaitForVersion(1000, kNanosPerSecond / 100);
  link->control()->PublishProgress(member, {3, 0, 0});
  link->control()->EnterPhase(member, 0);
  link->control()->LastNotice();
  EXPECT_EQ(link->control()->phase(), 0u);
  EXPECT_FALSE(link->control()->stop_requested());
  EXPECT_EQ(link->control()->PostNotice(member, "n").ok(), shared_memory());
  link->control()->Leave(member);
  EXPECT_LT(MonotonicNanos() - start, 5 * kNanosPerSecond);

  if (shared_memory()) return;
  // A new server knows the old one's links no more.
  StartServer(10.0);
  EXPECT_EQ(link->Read(values.Whole(layout), Long(), nullptr).code(), StatusCode::kUnavailable);
  const std::unique_ptr<SegmentLink> again = Open(layout);
  EXPECT_TRUE(again->Read(values.Whole(layout), Long(), nullptr).ok());
}

TEST_P(TransportContractTest, TheServerEndsWhileOthersWait) {
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat32, {150'000})});
  const std::unique_ptr<SegmentLink> link = Open(layout);
  if (shared_memory()) return;
  Values values(layout);
  ChunkHolder holder(SegmentOf(), 1);
  std::thread reader([&] {
    EXPECT_EQ(link->Read(values.Whole(layout), Long(), nullptr).code(),
              StatusCode::kUnavailable);
  });
  std::thread waiter([&] { link->control()->WaitForVersion(1000, 60 * kNanosPerSecond); });
  usleep(50'000);
  const int64_t start = MonotonicNanos();
  server_.reset();
  reader.join();
  waiter.join();
  EXPECT_LT(MonotonicNanos() - start, 5 * kNanosPerSecond);
}

// --- Many at once ------------------------------------------------------------------

TEST_P(TransportContractTest, SumsStayExactWithManyAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 25;
  const Layout layout = LayoutOf({VariableOf("sum", DType::kFloat64, {70'001}),
                                  VariableOf("mixed", DType::kFloat64, {40'000})});
  const std::unique_ptr<SegmentLink> first = Open(layout);
  Write(first.get(), Values(layout));
  const std::unique_ptr<SegmentLink> shared = Attach();
  std::vector<std::vector<double>> weights(kThreads, std::vector<double>(40'000));
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      // Two with a link of their own, two that share one.
      const std::unique_ptr<SegmentLink> own = t < 2 ? Attach() : nullptr;
      SegmentLink* const link = t < 2 ? own.get() : shared.get();
      std::vector<double>& x = weights[t];
      std::fill(x.begin(), x.end(), t + 1.0);
      const std::vector<double> ones(70'001, 1.0);
      for (int i = 0; i < kRounds; ++i) {
        UpdateRequest add;
        add.move.kind = MoveKind::kAccumulate;
        add.move.rate = t + 1.0;
        add.local = {{0, 0, ones.size(), ones.data(), false}};
        add.busy_chunk_timeout_s = kLongSeconds;
        const Result<UpdateReport> added = link->Update(add, nullptr);
        ASSERT_TRUE(added.ok()) << added.status().message();
        UpdateRequest exchange;
        exchange.move.rate = 0.5;
        exchange.local = {{1, 0, x.size(), x.data(), false}};
        exchange.out = {x.data()};
        exchange.first_chunk = static_cast<uint64_t>(t);
        exchange.busy_chunk_timeout_s = kLongSeconds;
        ASSERT_TRUE(link->Update(exchange, nullptr).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Values center = Center(first.get());
  const auto* const sum = reinterpret_cast<const double*>(center.data[0].data());
  for (int i = 0; i < 70'001; ++i) ASSERT_EQ(sum[i], kRounds * (1.0 + 2.0 + 3.0 + 4.0)) << i;
  const auto* const mixed = reinterpret_cast<const double*>(center.data[1].data());
  for (int i = 0; i < 40'000; ++i) {
    double total = mixed[i];
    for (const std::vector<double>& x : weights) total += x[i];
    ASSERT_NEAR(total, 10.0, 1e-9) << i;
  }
  EXPECT_EQ(first->control()->version(), 1u + kThreads * kRounds * 2);
}

// --- Workers -----------------------------------------------------------------------

// What a worker does with all of it, by the client above the transports.
TEST_P(TransportContractTest, WorkersMeetByTheClient) {
  constexpr uint32_t kWorkers = 3;
  const Layout layout = LayoutOf({VariableOf("w", DType::kFloat64, {70'001})});
  std::vector<std::vector<double>> weights(kWorkers);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kWorkers; ++t) {
    threads.emplace_back([&, t] {
      const std::unique_ptr<Client> client =
          std::move(Client::Connect(address_, Long())).value();
      const std::shared_ptr<AttachedSegment> segment =
          std::move(client->Open(RequestFor(layout), 1, Long())).value();
      ASSERT_TRUE(segment->Join(t).ok());
      std::vector<double>& x = weights[t];
      x.assign(70'001, t + 1.0);
      const std::vector<ConstSpan> local = WholeSpans(layout, std::vector<const void*>{x.data()});
      const std::vector<void*> out = {x.data()};
      WaitOptions options;
      const std::vector<uint32_t> all = {0, 1, 2};
      ASSERT_TRUE(segment->Barrier(all, options).ok());
      const Result<bool> seeded = segment->TrySeed(local, Long());
      ASSERT_TRUE(seeded.ok()) << seeded.status().message();
      while (!segment->control()->seeded()) usleep(1000);
      for (int i = 0; i < 3; ++i) {
        const Result<ExchangeOutcome> outcome =
            segment->Exchange(local, out, MoveOutput::kValue, static_cast<uint64_t>(i));
        ASSERT_TRUE(outcome.ok()) << outcome.status().message();
      }
      ASSERT_TRUE(segment->Barrier(all, options).ok());
      const Result<uint64_t> token = segment->Lock(30.0, options);
      ASSERT_TRUE(token.ok()) << token.status().message();
      EXPECT_TRUE(segment->Unlock(*token).ok());
      const Result<RoundResult> round = segment->Average(local, out, 1.0, 4, options);
      ASSERT_TRUE(round.ok()) << round.status().message();
      EXPECT_TRUE(round->missing.empty());
      segment->Leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t t = 1; t < kWorkers; ++t) EXPECT_EQ(weights[t], weights[0]);
  for (const double weight : weights[0]) {
    ASSERT_GE(weight, 1.0);
    ASSERT_LE(weight, 3.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, TransportContractTest, testing::ValuesIn(Setups()),
                         [](const auto& info) { return info.param.scheme; });

}  // namespace
}  // namespace tf_smb
