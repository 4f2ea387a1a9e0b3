// A segment whose header, directory, control block and tables hold whatever the input says:
// mapping it and everything that can be done with it end, with a result or an error.
//
// The input: flags; a count and so many overwritings; then a script of calls, overwritings
// among them.
#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc/box/segment.h"
#include "cc/box/segment_data.h"
#include "cc/wire/coding.h"
#include "tests/fuzz/fuzz_input.h"

namespace tf_smb {
namespace {

constexpr double kNoSeconds = 0.0;  // nothing that is locked is waited for
constexpr int64_t kSpanElements = 100;

Deadline Now() { return Deadline::After(kNoSeconds); }

// One that is good, made once, and its bytes up to the side buffers' contents.
class Original {
 public:
  Original() {
    SegmentOptions options;
    options.name = "fuzz";
    options.job_id = "job";
    options.num_workers = 3;
    options.lease_s = 3600.0;
    std::vector<Variable> variables(5);
    const DType dtypes[] = {DType::kBool, DType::kFloat32, DType::kFloat16, DType::kFloat64,
                            DType::kInt32};
    for (size_t i = 0; i < variables.size(); ++i) {
      variables[i].name = "v" + std::to_string(i);
      variables[i].dtype = dtypes[i];
    }
    variables[0].shape = {static_cast<int64_t>(kChunkBytes - 256)};
    variables[1].shape = {kSpanElements};  // into a second chunk
    variables[2].shape = {5, 11};
    variables[3].shape = {0};
    options.layout = *Layout::Create(variables);
    segment_ = std::move(Segment::Create(options)).value();
    base_ = FindBase();
    header_ = *reinterpret_cast<const SegmentHeader*>(base_);
    bytes_.assign(base_, header_.side_data_offset);
  }

  int fd() const { return segment_->fd(); }
  char* base() const { return base_; }
  const SegmentHeader& header() const { return header_; }
  ControlBlock* control() const {
    return reinterpret_cast<ControlBlock*>(base_ + header_.control_offset);
  }
  void Restore() const {
    std::memcpy(base_, bytes_.data(), bytes_.size());
    std::memset(segment_->center() + kChunkBytes - 256, 0, 1024);  // what is added to
  }

 private:
  // The header is at the beginning of the mapping, and the center whole pages behind it.
  char* FindBase() const {
    char* at = segment_->center();
    while (std::memcmp(at, &kSegmentMagic, sizeof(kSegmentMagic)) != 0) at -= kPageBytes;
    return at;
  }

  std::unique_ptr<Segment> segment_;
  char* base_;
  SegmentHeader header_;
  std::string bytes_;
};

const Original& TheOriginal() {
  static const Original* const original = new Original();
  return *original;
}

struct Region {
  uint64_t offset;
  uint64_t size;
};

Region RegionOf(uint8_t number) {
  const SegmentHeader& header = TheOriginal().header();
  switch (number % 8) {
    case 0:
      return {0, sizeof(SegmentHeader)};
    case 1:
      return {header.directory_offset, header.directory_bytes};
    case 2:  // of the control block what is neither a table nor a text
      return {header.control_offset, offsetof(ControlBlock, schedule)};
    case 3:
      return {header.control_offset + offsetof(ControlBlock, barriers), 3 * sizeof(BarrierEntry)};
    case 4:
      return {header.control_offset + offsetof(ControlBlock, members), 4 * sizeof(MemberSlot)};
    case 5:
      return {header.chunks_offset, header.num_chunks * sizeof(ChunkState)};
    case 6:
      return {header.sides_offset, header.num_sides * sizeof(SideBuffer)};
    default:
      return {header.control_offset, sizeof(ControlBlock)};
  }
}

void Overwrite(FuzzInput* input) {
  const Region region = RegionOf(input->Byte());
  const uint64_t at = input->Number(3) % region.size;
  const std::string_view bytes = input->Bytes(1 + input->Byte() % 16);
  std::memcpy(TheOriginal().base() + region.offset + at, bytes.data(),
              std::min<uint64_t>(bytes.size(), region.size - at));
}

void Sign() {
  char* const base = TheOriginal().base();
  SegmentHeader header;
  std::memcpy(&header, base, sizeof(header));
  const uint64_t room = TheOriginal().header().control_offset - kPageBytes;
  std::string bytes(base, offsetof(SegmentHeader, checksum));
  bytes.append(base + kPageBytes, std::min(header.directory_bytes, room));
  header.checksum = Checksum(bytes);
  std::memcpy(base, &header, sizeof(header));
}

// Makes calls on a segment by a script.
class Caller {
 public:
  Caller(Segment* segment, FuzzInput* input) : segment_(segment), input_(input) {
    segment->set_control_timeout(kNoSeconds);
  }
  ~Caller() {
    for (const MemberId& member : members_) segment_->Leave(member);
  }

  void Run() {
    for (int calls = 0; calls < 40 && !input_->empty(); ++calls) Call(input_->Byte());
  }

 private:
  MemberId Member() {
    const uint8_t number = input_->Byte();
    return members_.empty() ? MemberId{number, number} : members_[number % members_.size()];
  }

  void Join() {
    if (members_.size() >= 4) return;
    const uint8_t index = input_->Byte();
    const Result<MemberId> member = segment_->Join(
        index == 255 ? std::nullopt : std::optional<uint32_t>(index % 4));
    if (member.ok()) members_.push_back(*member);
  }

  void Leave() {
    if (members_.empty()) return;
    segment_->Leave(members_.back());
    members_.pop_back();
  }

  // A peer that damages what others use. Not the mutexes that this thread holds: the C
  // library follows what is in them.
  void OverwriteInUse() {
    std::vector<std::string> held;
    MemberSlot* const slots = TheOriginal().control()->members;
    for (const MemberId& member : members_) {
      held.emplace_back(reinterpret_cast<const char*>(&slots[member.slot].alive),
                        sizeof(RobustMutex));
    }
    Overwrite(input_);
    for (size_t i = 0; i < members_.size(); ++i) {
      std::memcpy(static_cast<void*>(&slots[members_[i].slot].alive), held[i].data(),
                  sizeof(RobustMutex));
    }
  }

  std::vector<uint32_t> Workers() {
    std::vector<uint32_t> workers;
    for (uint8_t bits = input_->Byte(), worker = 0; bits != 0; bits >>= 1, ++worker) {
      if ((bits & 1) != 0) workers.push_back(worker);
    }
    return workers;
  }

  void Barrier() {
    const MemberId member = Member();
    const Result<uint64_t> barrier = segment_->ArriveAtBarrier(member, Workers());
    const uint64_t id = barrier.ok() ? *barrier : input_->Byte();
    const Result<std::vector<uint32_t>> missing = segment_->MissingAtBarrier(member, id);
    if (missing.ok()) {
      for (const uint32_t worker : *missing) FuzzCheck(worker < kMaxWorkers, "no such worker");
    }
    if (input_->Byte() % 2 == 0) segment_->WithdrawFromBarrier(member, id);
  }

  void Lock() {
    const MemberId member = Member();
    const Result<uint64_t> token = segment_->TryLock(member, 1.0);
    segment_->LockHolder();
    if (token.ok() && input_->Byte() % 2 == 0) {
      static_cast<void>(segment_->Unlock(member, *token));
    }
  }

  void Meeting() {
    const MemberId member = Member();
    const uint64_t meeting = segment_->Arrive(member);
    segment_->TryCloseMeeting(meeting);
    segment_->FewestSteps();
    segment_->FinishMeeting(member, meeting);
    segment_->MeetingFinished(meeting);
  }

  void Round() {
    const MemberId member = Member();
    const Result<uint64_t> round = segment_->EnterRound(member);
    if (!round.ok()) return;
    if (*round != 0) Update(MoveKind::kElastic, RoundShare{*round, 1.0 + input_->Byte()});
    segment_->IsTurn(member, *round);
    segment_->FinishShare(member, *round, input_->Byte() % 2 == 0);
    segment_->TryCloseRound(*round, input_->Byte() % 2 == 0);
    segment_->MissingInRound();
    if (input_->Byte() % 2 == 0) segment_->FinishRound(member, *round);
  }

  void Phase() {
    const MemberId member = Member();
    const uint64_t phase = segment_->phase();
    if (input_->Byte() % 2 == 0) segment_->EnterPhase(member, phase);
    if (segment_->BeginSeeding(member)) segment_->SetFirstPhase(member, input_->Byte());
    segment_->TryEndPhase(member, phase);
  }

  void Text() {
    const MemberId member = Member();
    const std::string text(input_->Number(2) % (kMaxTextBytes + 2), 't');
    const Result<std::string> words = segment_->AgreeOnSchedule(member, text);
    FuzzCheck(!words.ok() || words->size() <= kMaxTextBytes, "a schedule is too long");
    static_cast<void>(segment_->PostNotice(member, text));
    FuzzCheck(segment_->LastNotice().text.size() <= kMaxTextBytes, "a notice is too long");
  }

  void Update(MoveKind kind, std::optional<RoundShare> round) {
    static auto& last = *new std::vector<char>(2 * kChunkBytes);
    const std::vector<Variable>& variables = segment_->layout().variables();
    const bool as_it_was = variables.size() == 5 && variables[1].dtype == DType::kFloat32 &&
                           segment_->layout().size_bytes() <= last.size();
    if (!as_it_was) return;
    std::vector<float> x(kSpanElements, 1.5f), out(kSpanElements);
    UpdateRequest request;
    request.move.kind = kind;
    request.move.rate = 0.5;
    request.local = {{1, 0, kSpanElements, x.data()}};
    request.out = {out.data()};
    request.last = last.data();
    request.round = round;
    request.first_chunk = input_->Byte();
    request.busy_chunk_timeout_s = kNoSeconds;
    static_cast<void>(UpdateCenter(segment_, request, nullptr));
  }

  // Whatever the layout says: all of it, where that is little.
  void ReadAndWrite() {
    std::vector<std::vector<char>> values;
    std::vector<Span> targets;
    std::vector<ConstSpan> sources;
    for (uint32_t v = 0; v < segment_->layout().variables().size(); ++v) {
      const Variable& variable = segment_->layout().variables()[v];
      const uint64_t count = std::min(variable.num_elements, uint64_t{kSpanElements});
      values.emplace_back(count * ElementBytes(variable.dtype));
      const uint64_t first = variable.num_elements - count;
      targets.push_back({v, first, count, values.back().data()});
      sources.push_back({v, first, count, values.back().data()});
    }
    static_cast<void>(ReadCenter(segment_, targets, Now(), nullptr));
    static_cast<void>(WriteCenter(segment_, sources, Now(), nullptr));
  }

  void Call(uint8_t which) {
    switch (which % 24) {
      case 0: case 1: return Join();
      case 2: return Leave();
      case 3: return Barrier();
      case 4: return Lock();
      case 5: return Meeting();
      case 6: case 7: return Round();
      case 8: return Update(MoveKind::kElastic, std::nullopt);
      case 9: return Update(MoveKind::kAccumulate, std::nullopt);
      case 10: return Update(MoveKind::kDelta, std::nullopt);
      case 11: return ReadAndWrite();
      case 12:
        for (const MemberInfo& info : segment_->Members()) {
          FuzzCheck(info.state <= MemberState::kDead, "a member has no state");
        }
        FuzzCheck(segment_->CountLive() <= kMaxMembers, "more live members than slots");
        return;
      case 13:
        static_cast<void>(segment_->Renew(Member()));
        return;
      case 14: {
        const MemberId member = Member();
        if (segment_->BeginSeeding(member)) segment_->FinishSeeding(member);
        return;
      }
      case 15: {
        const MemberId member = Member();
        segment_->SetTraining(member, input_->Byte() % 2 == 0);
        segment_->PublishProgress(member, {input_->Byte(), 1, 2});
        segment_->PublishSteps(member, 3);
        segment_->LeaveUnlessLast(member);
        return;
      }
      case 20: return Phase();
      case 21: case 22: return Text();
      case 23: {
        const MemberId member = Member();
        segment_->RequestStop(member);
        segment_->stop_requested();
        return;
      }
      case 16:
        static_cast<void>(Axpy(segment_, 0.5, segment_, Now()));
        return;
      case 17:
        segment_->MarkAbsent(input_->Byte());
        segment_->WaitForVersion(segment_->version() + 1, 0);
        segment_->WaitForChange(segment_->changes(), 0);
        return;
      default: return OverwriteInUse();
    }
  }

  Segment* const segment_;
  FuzzInput* const input_;
  std::vector<MemberId> members_;
};

std::string Bytes(uint64_t value, size_t num_bytes) {
  return std::string(reinterpret_cast<const char*>(&value), num_bytes);
}

// An overwriting, as Overwrite reads it.
std::string Overwriting(uint8_t region, uint64_t at, const std::string& bytes) {
  return Bytes(region, 1) + Bytes(at, 3) + Bytes(bytes.size() - 1, 1) + bytes;
}

// As if the holders of all locks of the chunks and of the side buffers had died.
std::string HoldersDied() {
  constexpr uint32_t kOwnerDied = 0x40000000;  // FUTEX_OWNER_DIED, in the first word
  std::string overwritings;
  for (uint64_t i = 0; i < 2; ++i) {
    overwritings += Overwriting(5, i * sizeof(ChunkState), Bytes(kOwnerDied, 4));
    overwritings += Overwriting(6, i * sizeof(SideBuffer), Bytes(kOwnerDied, 4));
  }
  return overwritings;
}

}  // namespace

// Every word of the control block and of the tables, and what texts have beside their bytes,
// with values that are trouble: before it is mapped, with dead holders, and under the hands
// of two members.
void FuzzSystematically() {
  const uint64_t values[] = {0, 1, 2, 3, 1000, 0x40000000, 0x7fffffff, 0xffffffff, 1ULL << 63,
                             (1ULL << 63) - 1, ~0ULL, 0x7ff0000000000000, 0x7ff8000000000000};
  const std::string all_calls("\x0b\x06\0\1\0\0\0\x08\0\x09\0\x0a\0\x10\x0c\x0d\0\x0d\1"
                              "\x14\0\0\5\x14\1\1\x15\0\5\0\x16\1\7\0\x17\0"
                              "\3\0\3\1\4\0\0\5\0\x0e\0\x0f\0\0\1\x11\1",
                              52);
  const std::string two_join("\0\0\0\1", 4);
  const auto each_value = [&](uint8_t region, uint64_t at) {
    for (const uint64_t value : values) {
      const std::string word = Overwriting(region, at, Bytes(value, at % 8 == 0 ? 8 : 4));
      FuzzOne(std::string("\0\1", 2) + word + two_join + all_calls);
      FuzzOne(std::string("\0\5", 2) + HoldersDied() + word + two_join + all_calls);
      FuzzOne(std::string("\0\0", 2) + two_join + "\x12" + word + all_calls);
    }
  };
  for (uint8_t region = 2; region <= 6; ++region) {
    for (uint64_t at = 0; at + 4 <= RegionOf(region).size; at += 4) each_value(region, at);
  }
  constexpr uint8_t kWholeBlock = 7;
  for (const uint64_t text : {offsetof(ControlBlock, schedule), offsetof(ControlBlock, notice)}) {
    const uint64_t first = text + offsetof(TextEntry, texts);
    for (const uint64_t at : {text, first, first + sizeof(TextEntry::texts) / 2}) {
      each_value(kWholeBlock, at);
    }
  }
}

}  // namespace tf_smb

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tf_smb;  // NOLINT(build/namespaces): a function of the C world
  FuzzInput input(data, size);
  TheOriginal().Restore();
  const uint8_t flags = input.Byte();
  for (int count = input.Byte() % 16; count > 0; --count) Overwrite(&input);
  if (flags % 2 == 1) Sign();
  const Result<std::unique_ptr<Segment>> segment =
      Segment::Map(UniqueFd(fcntl(TheOriginal().fd(), F_DUPFD_CLOEXEC, 0)));
  if (!segment.ok()) {
    FuzzCheck(segment.status().code() == StatusCode::kDataLoss ||
                  segment.status().code() == StatusCode::kFailedPrecondition,
              "mapping fails with another code");
    return 0;
  }
  Caller(segment->get(), &input).Run();
  return 0;
}
