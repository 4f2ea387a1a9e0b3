// Over real memfds and real processes: children are forked before any thread is made.
#include "cc/box/segment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cc/wire/coding.h"
#include "cc/wire/messages.h"
#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

SegmentOptions Options(double lease_s = 3600.0) {
  return OptionsOf(LayoutOf({{3, 4}, {}}), lease_s);
}

Segment* Make(const SegmentOptions& options = Options()) {
  return Keep(Segment::Create(options));
}

float* Floats(const Segment& segment) { return reinterpret_cast<float*>(segment.center()); }

// --- Creation and mapping ------------------------------------------------------

TEST(SegmentTest, HoldsWhatItWasTold) {
  Segment* const segment = Make();
  for (const Segment* s : {segment, MapAgain(*segment)}) {
    EXPECT_EQ(s->name(), "run/0");
    EXPECT_EQ(s->job_id(), "job-1");
    EXPECT_EQ(s->num_workers(), 3u);
    EXPECT_EQ(s->lease_s(), 3600.0);
    EXPECT_EQ(s->layout().Encode(), Options().layout.Encode());
    EXPECT_EQ(s->version(), 0u);
    EXPECT_FALSE(s->seeded());
    EXPECT_FALSE(s->ever_joined());
    EXPECT_EQ(s->CountLive(), 0u);
    ASSERT_EQ(s->num_chunks(), 1u);
    for (uint64_t i = 0; i < s->layout().size_bytes(); ++i) EXPECT_EQ(s->center()[i], 0);
  }
}

TEST(SegmentTest, MappingsShareTheCenter) {
  Segment* const segment = Make();
  Segment* const mapped = MapAgain(*segment);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapped->center()) % 64, 0u);
  Floats(*segment)[11] = 2.5f;
  mapped->AdvanceVersion();
  EXPECT_EQ(Floats(*mapped)[11], 2.5f);
  EXPECT_EQ(segment->version(), 1u);
}

void ExpectWholeCover(const Segment& segment) {
  const std::vector<Variable>& variables = segment.layout().variables();
  std::vector<uint64_t> seen(variables.size(), 0);
  EXPECT_EQ(segment.num_chunks(), (segment.layout().size_bytes() + kChunkBytes - 1) / kChunkBytes);
  for (uint64_t c = 0; c < segment.num_chunks(); ++c) {
    for (const ChunkPiece& piece : segment.pieces(c)) {
      const uint64_t element_bytes = variables[piece.variable].element_bytes();
      ASSERT_GT(piece.count, 0u);
      ASSERT_GE(piece.center_offset, c * kChunkBytes);
      ASSERT_LE(piece.center_offset + piece.count * element_bytes,
                c * kChunkBytes + segment.chunk_bytes(c));
      ASSERT_EQ(piece.first, seen[piece.variable]);  // in order, without holes
      ASSERT_EQ(piece.center_offset,
                variables[piece.variable].offset_bytes + piece.first * element_bytes);
      seen[piece.variable] += piece.count;
    }
  }
  for (size_t v = 0; v < variables.size(); ++v) EXPECT_EQ(seen[v], variables[v].num_elements);
}

TEST(SegmentTest, PiecesCoverEveryElementOnce) {
  for (int number = 1; number <= 15; ++number) {
    const auto dtype = static_cast<DType>(number);
    const auto chunk = static_cast<int64_t>(kChunkBytes / ElementBytes(CenterDType(dtype)));
    Segment* const segment = Make(OptionsOf(
        LayoutOf({{chunk - 16}, {}, {0}, {2 * chunk + 5}, {0, 3}, {chunk}, {7, 3}}, dtype)));
    ExpectWholeCover(*segment);
  }
}

TEST(SegmentTest, PiecesOfMixedDTypes) {
  std::vector<Variable> variables;
  for (int round = 0; round < 3; ++round) {
    for (int number = 1; number <= 15; ++number) {
      for (const std::vector<int64_t>& shape :
           {std::vector<int64_t>{}, {0}, {1}, {33333 + round, 3}}) {
        variables.push_back(VariableOf(shape, static_cast<DType>(number)));
      }
    }
  }
  Segment* const segment = Make(OptionsOf(*Layout::Create(variables)));
  EXPECT_GT(segment->num_chunks(), 16u);
  ExpectWholeCover(*segment);
  ExpectWholeCover(*MapAgain(*segment));
}

// Sizes beyond 31, 32 and 33 bits, of which almost nothing is ever touched.
TEST(SegmentTest, HugeSparseSegmentsToTheirLastElement) {
  const std::pair<int64_t, DType> sizes[] = {{(2LL << 30) + 1, DType::kInt8},
                                             {(1LL << 31) + 3, DType::kFloat32},
                                             {(8LL << 30) + 5, DType::kUInt8},
                                             {(1LL << 30) + 1, DType::kFloat64},
                                             {(1LL << 31) + 1, DType::kBFloat16}};
  for (const auto& [size, dtype] : sizes) {
    SegmentOptions options =
        OptionsOf(*Layout::Create({VariableOf({size}, dtype), VariableOf({3}, dtype)}));
    options.sparse = true;
    Result<std::unique_ptr<Segment>> segment = Segment::Create(options);
    ASSERT_TRUE(segment.ok()) << segment.status().message();
    Result<std::unique_ptr<Segment>> mapped = Segment::Map(Duplicate((*segment)->fd()));
    ASSERT_TRUE(mapped.ok()) << mapped.status().message();
    ExpectWholeCover(**mapped);
    const Variable& first = (*mapped)->layout().variables()[0];
    EXPECT_EQ(first.size_bytes(), static_cast<uint64_t>(size) * first.element_bytes());
    (*segment)->center()[first.size_bytes() - 1] = 7;
    (*segment)->center()[(*segment)->layout().size_bytes() - 1] = 9;
    EXPECT_EQ((*mapped)->center()[first.size_bytes() - 1], 7);
    EXPECT_EQ((*mapped)->center()[(*mapped)->layout().size_bytes() - 1], 9);
    EXPECT_GT((*mapped)->layout().size_bytes(), 2ULL << 30);
    struct stat info;
    ASSERT_EQ(fstat((*segment)->fd(), &info), 0);
    EXPECT_LT(info.st_blocks * 512, 64 << 20);  // the chunk table is all there is
  }
}

TEST(SegmentTest, NothingButEmptyVariables) {
  SegmentOptions options = Options();
  options.layout = LayoutOf({{0}, {3, 0}});
  Segment* const segment = Make(options);
  EXPECT_EQ(segment->num_chunks(), 0u);
  EXPECT_EQ(MapAgain(*segment)->num_chunks(), 0u);
}

TEST(SegmentTest, RefusesBadOptions) {
  std::vector<SegmentOptions> bad(12, Options());
  bad[0].name = "";
  bad[1].name = std::string(kMaxSegmentNameBytes + 1, 'n');
  bad[2].job_id = std::string(kMaxJobIdBytes + 1, 'j');
  bad[3].num_workers = 0;
  bad[4].num_workers = kMaxWorkers + 1;
  bad[5].name = std::string("a\0b", 3);
  bad[6].lease_s = 0.0;
  bad[7].lease_s = -1.0;
  bad[8].lease_s = std::numeric_limits<double>::quiet_NaN();
  bad[9].lease_s = std::numeric_limits<double>::infinity();
  bad[10].lease_s = 86401.0;
  bad[11].lease_s = 1e-10;
  for (const SegmentOptions& options : bad) {
    EXPECT_EQ(Segment::Create(options).status().code(), StatusCode::kInvalidArgument);
  }
  SegmentOptions longest = Options();
  longest.name = std::string(kMaxSegmentNameBytes, 'n');
  longest.job_id = std::string(kMaxJobIdBytes, 'j');
  EXPECT_EQ(MapAgain(*Make(longest))->name(), longest.name);
  EXPECT_EQ(MapAgain(*Make(longest))->job_id(), longest.job_id);
}

TEST(SegmentTest, MoreThanTheMachineHasNamesBothNumbers) {
  SegmentOptions options = Options();
  options.layout = LayoutOf({{1LL << 45}, {5}});
  const Status status = Segment::Create(options).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  // 2^47 bytes, and the chunk table's 2^29 locks of 64 bytes or more.
  const size_t needs = status.message().find("'run/0' needs ");
  ASSERT_NE(needs, std::string::npos) << status.message();
  EXPECT_GT(std::stoull(status.message().substr(needs + 14)), 1ULL << 27);
  const size_t available = status.message().find(" MiB, and ");
  ASSERT_NE(available, std::string::npos) << status.message();
  EXPECT_GT(std::stoull(status.message().substr(available + 10)), 0u);
}

// --- Hostile and damaged bytes -------------------------------------------------

UniqueFd CopyOf(const RawSegment& raw, uint64_t bytes, bool seal) {
  UniqueFd fd(memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  const uint64_t kept = std::min(bytes, raw.size());
  EXPECT_EQ(pwrite(fd.get(), raw.data(), kept, 0), static_cast<ssize_t>(kept));
  const int seals = seal ? F_SEAL_SHRINK | F_SEAL_GROW : 0;
  EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

TEST(SegmentMapTest, WholeCopyIsFine) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  EXPECT_TRUE(Segment::Map(CopyOf(raw, raw.size(), /*seal=*/true)).ok());
}

TEST(SegmentMapTest, UnsealedOrNoSegmentIsRefused) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  EXPECT_EQ(Segment::Map(CopyOf(raw, raw.size(), /*seal=*/false)).status().code(),
            StatusCode::kDataLoss);
  EXPECT_EQ(Segment::Map(UniqueFd(open("/dev/null", O_RDWR | O_CLOEXEC))).status().code(),
            StatusCode::kDataLoss);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd other_end(ends[1]);
  EXPECT_EQ(Segment::Map(UniqueFd(ends[0])).status().code(), StatusCode::kDataLoss);
  EXPECT_FALSE(Segment::Map(UniqueFd()).ok());
}

TEST(SegmentMapTest, CutShortOrTooLongIsRefused) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  std::vector<uint64_t> sizes = {0, 1, sizeof(SegmentHeader), kPageBytes - 1, raw.size() - 1,
                                 raw.size() + 1, raw.size() + kPageBytes, 1ULL << 40};
  for (uint64_t size = kPageBytes; size < raw.size(); size += kPageBytes) sizes.push_back(size);
  for (const uint64_t size : sizes) {
    const Status status = Segment::Map(CopyOf(raw, size, /*seal=*/true)).status();
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << size << ": " << status.ToString();
  }
}

TEST(SegmentMapTest, AnyFlippedBitOfHeaderOrDirectoryIsRefused) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const auto check = [&](uint64_t at) {
    for (int bit = 0; bit < 8; ++bit) {
      raw.data()[at] ^= static_cast<char>(1 << bit);
      const Status status = Segment::Map(Duplicate(segment->fd())).status();
      EXPECT_TRUE(status.code() == StatusCode::kDataLoss ||
                  status.code() == StatusCode::kFailedPrecondition)
          << "byte " << at << " bit " << bit << ": " << status.ToString();
      raw.data()[at] ^= static_cast<char>(1 << bit);
    }
  };
  for (uint64_t at = 0; at < sizeof(SegmentHeader); ++at) check(at);
  for (uint64_t i = 0; i < raw.header()->directory_bytes; ++i) {
    check(raw.header()->directory_offset + i);
  }
  EXPECT_TRUE(Segment::Map(Duplicate(segment->fd())).ok());
}

TEST(SegmentMapTest, OtherFormatVersionNamesBoth) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  raw.header()->format_version = 2;  // of an older tf_smb
  EXPECT_EQ(Segment::Map(Duplicate(segment->fd())).status().code(),
            StatusCode::kFailedPrecondition);
  raw.header()->format_version = 7;
  const Status status = Segment::Map(Duplicate(segment->fd())).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("format 7"), std::string::npos);
  EXPECT_NE(status.message().find("format 3"), std::string::npos);
}

// A forged checksum makes it a valid header, which must still be within bounds.
TEST(SegmentMapTest, ForgedHeadersAreRefusedOrHarmless) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const std::string directory(raw.data() + raw.header()->directory_offset,
                              raw.header()->directory_bytes);
  const SegmentHeader good = *raw.header();
  std::mt19937_64 random(3);
  const uint64_t interesting[] = {0,  1,  kPageBytes, raw.size(), raw.size() - 1, 1ULL << 47,
                                  1ULL << 62, ~0ULL, ~0ULL - kPageBytes};
  for (int round = 0; round < 3000; ++round) {
    SegmentHeader forged = good;
    uint64_t* const fields[] = {&forged.total_bytes,    &forged.directory_offset,
                                &forged.directory_bytes, &forged.control_offset,
                                &forged.chunks_offset,   &forged.num_chunks,
                                &forged.sides_offset,    &forged.num_sides,
                                &forged.side_data_offset, &forged.side_bytes,
                                &forged.center_offset,   &forged.center_bytes};
    for (uint64_t changes = 1 + random() % 3; changes > 0; --changes) {
      *fields[random() % std::size(fields)] =
          random() % 4 == 0 ? random() : interesting[random() % std::size(interesting)];
    }
    std::string bytes(reinterpret_cast<const char*>(&forged), offsetof(SegmentHeader, checksum));
    forged.checksum = Checksum(bytes + directory);
    *raw.header() = forged;
    const Result<std::unique_ptr<Segment>> mapped = Segment::Map(Duplicate(segment->fd()));
    if (mapped.ok()) {
      EXPECT_EQ(std::memcmp(&forged, &good, offsetof(SegmentHeader, checksum)), 0);
    }
  }
  *raw.header() = good;
  const auto sign = [&] {
    raw.header()->checksum = Checksum(
        std::string(raw.data(), offsetof(SegmentHeader, checksum)) + directory);
  };
  for (const int64_t lease : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    raw.header()->lease_nanos = lease;
    sign();
    EXPECT_EQ(Segment::Map(Duplicate(segment->fd())).status().code(), StatusCode::kDataLoss);
  }
  *raw.header() = good;
  for (const uint32_t workers : {0u, kMaxWorkers + 1, ~0u}) {
    raw.header()->num_workers = workers;
    sign();
    EXPECT_EQ(Segment::Map(Duplicate(segment->fd())).status().code(), StatusCode::kDataLoss);
  }
  *raw.header() = good;
  std::memset(raw.header()->name, 'x', sizeof(good.name));  // without its zero
  sign();
  EXPECT_EQ(MapAgain(*segment)->name(), std::string(sizeof(good.name), 'x'));
}

// A terabyte of holes that says it is a directory: refused unread.
TEST(SegmentMapTest, GrownDirectoryIsNotRead) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  SegmentHeader forged = *raw.header();
  const uint64_t more = 1ULL << 40;
  for (uint64_t* const field :
       {&forged.directory_bytes, &forged.control_offset, &forged.chunks_offset,
        &forged.sides_offset, &forged.side_data_offset, &forged.center_offset,
        &forged.total_bytes}) {
    *field += more;
  }
  const UniqueFd fd(memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), static_cast<off_t>(forged.total_bytes)), 0);
  ASSERT_EQ(pwrite(fd.get(), &forged, sizeof(forged), 0), static_cast<ssize_t>(sizeof(forged)));
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  const Status status = Segment::Map(Duplicate(fd.get())).status();
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.ToString();
  struct stat info;
  ASSERT_EQ(fstat(fd.get(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 1 << 20);
}

TEST(SegmentMapTest, DamagedCountersAndSlotsAreHarmless) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  std::mt19937_64 random(4);
  ControlBlock* const control = raw.control();
  for (int round = 0; round < 300; ++round) {
    control->slots_used.store(static_cast<uint32_t>(random()));
    control->seeder_slot.store(static_cast<uint32_t>(random()));
    control->seed_state.store(static_cast<uint32_t>(random() % 4));
    control->meetings_closed.store(random());
    control->rounds_opened.store(random());
    control->rounds_closed.store(random());
    control->lock_holder.store(random());
    control->lock_token.store(random());
    control->lock_expires_nanos.store(static_cast<int64_t>(random()));
    control->next_barrier_id.store(random());
    control->round_ends_phase.store(random());
    control->phase.store(random());
    for (TextEntry* const entry : {&control->schedule, &control->notice}) {
      entry->number.store(random());
      for (auto& text : entry->texts) text.size_bytes.store(static_cast<uint32_t>(random()));
    }
    for (int i = 0; i < 4; ++i) {
      BarrierEntry& barrier = control->barriers[random() % kMaxBarriers];
      barrier.id.store(random() % 3);
      barrier.expected.words[random() % std::size(barrier.expected.words)].store(random());
      barrier.arrived.words[random() % std::size(barrier.arrived.words)].store(random());
    }
    for (int i = 0; i < 8; ++i) {
      MemberSlot& slot = control->members[random() % kMaxMembers];
      slot.state.store(static_cast<uint32_t>(random() % 6));
      slot.worker_index.store(static_cast<uint32_t>(random()));
      slot.renewed_nanos.store(static_cast<int64_t>(random()));
    }
    for (const MemberInfo& info : segment->Members()) EXPECT_LE(info.state, MemberState::kDead);
    EXPECT_LE(segment->CountLive(), kMaxMembers);
    const Result<MemberId> member = segment->Join(std::nullopt);
    if (!member.ok()) continue;
    segment->TryCloseMeeting(segment->Arrive(*member));
    segment->BeginSeeding(*member);
    const uint32_t index = control->members[member->slot].worker_index.load();
    const Result<uint64_t> barrier = segment->ArriveAtBarrier(*member, {index, index + 1});
    if (barrier.ok()) {
      EXPECT_TRUE(segment->MissingAtBarrier(*member, *barrier).ok());
      segment->WithdrawFromBarrier(*member, *barrier);
    }
    const Result<uint64_t> token = segment->TryLock(*member, 1.0);
    EXPECT_TRUE(token.ok());
    segment->LockHolder();
    static_cast<void>(segment->Unlock(*member, *token));
    const Result<uint64_t> entered = segment->EnterRound(*member);
    EXPECT_TRUE(entered.ok());
    segment->IsTurn(*member, *entered);
    segment->FinishShare(*member, *entered, /*ends_phase=*/true);
    segment->TryCloseRound(*entered, /*force=*/true);
    segment->MissingInRound();
    segment->FinishRound(*member, *entered);
    segment->EnterPhase(*member, segment->phase());
    segment->TryEndPhase(*member, segment->phase());
    EXPECT_LE(segment->AgreeOnSchedule(*member, "s")->size(), kMaxTextBytes);
    EXPECT_TRUE(segment->PostNotice(*member, "n").ok());
    EXPECT_LE(segment->LastNotice().text.size(), kMaxTextBytes);
    segment->RequestStop(*member);
    segment->Leave(*member);
  }
}

// --- Members -------------------------------------------------------------------

TEST(MembersTest, LowestFreeIndexUnlessTold) {
  Segment* const segment = Make();
  const MemberId first = *segment->Join(std::nullopt);
  EXPECT_TRUE(segment->Join(2).ok());
  EXPECT_TRUE(segment->Join(std::nullopt).ok());
  EXPECT_TRUE(segment->Join(std::nullopt).ok());
  std::vector<uint32_t> indexes;
  for (const MemberInfo& member : segment->Members()) indexes.push_back(member.worker_index);
  EXPECT_EQ(indexes, (std::vector<uint32_t>{0, 1, 2, 3}));
  segment->Leave(first);
  EXPECT_EQ(segment->CountLive(), 3u);
  const MemberId again = *segment->Join(std::nullopt);
  EXPECT_GT(again.incarnation, first.incarnation);
  const std::vector<MemberInfo> members = segment->Members();
  ASSERT_EQ(members.size(), 5u);  // it still tells who left
  EXPECT_EQ(members[0].worker_index, 0u);
  EXPECT_EQ(members[0].state, MemberState::kLeft);
  EXPECT_EQ(members[1].worker_index, 0u);
  EXPECT_EQ(members[1].state, MemberState::kLive);
  EXPECT_EQ(members[1].incarnation, again.incarnation);
  EXPECT_EQ(members[1].process_id, static_cast<uint32_t>(getpid()));
  EXPECT_TRUE(segment->ever_joined());
}

TEST(MembersTest, TakenIndexNamesTheProcess) {
  Segment* const segment = Make();
  ASSERT_TRUE(segment->Join(1).ok());
  const Status status = segment->Join(1).status();
  EXPECT_EQ(status.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(status.message().find("worker index 1"), std::string::npos);
  EXPECT_NE(status.message().find(std::to_string(getpid())), std::string::npos);
  EXPECT_EQ(segment->Join(kMaxWorkers).status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(segment->Join(kMaxWorkers - 1).ok());
}

TEST(MembersTest, AllSlotsTakenThenReused) {
  Segment* const segment = Make();
  std::vector<MemberId> members;
  for (uint32_t i = 0; i < kMaxMembers; ++i) members.push_back(*segment->Join(std::nullopt));
  EXPECT_EQ(segment->CountLive(), kMaxMembers);
  EXPECT_EQ(segment->Join(std::nullopt).status().code(), StatusCode::kResourceExhausted);
  segment->Leave(members[500]);
  const Result<MemberId> again = segment->Join(std::nullopt);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->slot, members[500].slot);
  EXPECT_EQ(segment->CheckMember(members[500]).code(), StatusCode::kAborted);
  EXPECT_TRUE(segment->CheckMember(*again).ok());
  for (const MemberId& member : members) {
    if (member.slot != again->slot) segment->Leave(member);
  }
  segment->Leave(*again);
  EXPECT_EQ(segment->CountLive(), 0u);
}

TEST(MembersTest, ProgressIsSeen) {
  Segment* const segment = Make();
  Segment* const other = MapAgain(*segment);
  const MemberId member = *segment->Join(std::nullopt);
  segment->PublishProgress(member, {30, 1, 7});
  segment->PublishProgress(member, {40, 2, 3});
  segment->SetTraining(member, true);
  segment->EnterPhase(member, 1);
  MemberInfo info = other->Members().at(0);
  EXPECT_EQ(info.steps, 40u);
  EXPECT_EQ(info.epoch, 2u);
  EXPECT_EQ(info.batch, 3u);
  EXPECT_EQ(info.phase, 1u);
  EXPECT_EQ(info.exchanges, 2u);
  EXPECT_TRUE(info.training);
  const uint32_t seen = segment->changes();
  segment->PublishSteps(member, 41);
  EXPECT_EQ(segment->changes(), seen);  // with every step: wakes nobody
  info = other->Members().at(0);
  EXPECT_EQ(info.steps, 41u);
  EXPECT_EQ(info.epoch, 2u);
  EXPECT_EQ(info.exchanges, 2u);
}

// Whoever takes a slot begins anew, in the phase that the segment is in.
TEST(MembersTest, AUsedSlotIsCleared) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  for (MemberSlot& slot : raw.control()->members) {
    for (auto* const field : {&slot.steps, &slot.epoch, &slot.batch, &slot.phase, &slot.exchanges,
                              &slot.round_entered, &slot.round_contributed,
                              &slot.round_finished}) {
      field->store(9);
    }
  }
  raw.control()->phase.store(3);
  ASSERT_TRUE(segment->Join(0).ok());
  const MemberSlot& slot = raw.control()->members[0];
  const MemberInfo info = segment->Members().at(0);
  EXPECT_EQ(info.steps, 0u);
  EXPECT_EQ(info.epoch, 0u);
  EXPECT_EQ(info.batch, 0u);
  EXPECT_EQ(info.phase, 3u);
  EXPECT_EQ(info.exchanges, 0u);
  EXPECT_EQ(slot.round_entered.load(), 0u);
  EXPECT_EQ(slot.round_contributed.load(), 0u);
  EXPECT_EQ(slot.round_finished.load(), 0u);
}

TEST(MembersTest, WhoStopsRenewingIsFenced) {
  Segment* const segment = Make(Options(/*lease_s=*/0.05));
  const MemberId silent = *segment->Join(0), busy = *segment->Join(1);
  ASSERT_TRUE(WaitUntil([&] {
    EXPECT_TRUE(segment->Renew(busy).ok());
    return !segment->CheckMember(silent).ok();
  }));
  EXPECT_EQ(segment->CheckMember(silent).code(), StatusCode::kAborted);
  EXPECT_EQ(segment->Members().at(0).state, MemberState::kDead);
  EXPECT_EQ(segment->Renew(silent).code(), StatusCode::kAborted);  // too late
  EXPECT_FALSE(segment->BeginSeeding(silent));
  EXPECT_FALSE(segment->LeaveUnlessLast(silent));
  // Its index is free, its slot is not: it still holds the slot's mutex.
  const MemberId successor = *segment->Join(0);
  EXPECT_NE(successor.slot, silent.slot);
  segment->Leave(silent);  // harmless
  EXPECT_TRUE(segment->CheckMember(successor).ok());
}

TEST(MembersTest, RenewingInTimeKeepsTheLease) {
  Segment* const segment = Make(Options(/*lease_s=*/30.0));
  const MemberId member = *segment->Join(std::nullopt);
  RawSegment raw(segment->fd());
  raw.control()->members[member.slot].renewed_nanos.store(BootTimeNanos() - 20 * kNanosPerSecond);
  EXPECT_FALSE(segment->Reap());
  raw.control()->members[member.slot].renewed_nanos.store(BootTimeNanos() - 40 * kNanosPerSecond);
  EXPECT_TRUE(segment->Renew(member).ok());  // late, but nobody had reaped it
  EXPECT_TRUE(segment->CheckMember(member).ok());
}

TEST(MembersTest, KilledMemberIsDeadAtOnce) {
  Segment* const segment = Make();  // a lease of an hour
  const pid_t child = SpawnMember(*segment, 2);
  EXPECT_EQ(segment->Members().at(0).state, MemberState::kLive);
  EXPECT_EQ(segment->Members().at(0).process_id, static_cast<uint32_t>(child));
  EXPECT_EQ(segment->Join(2).status().code(), StatusCode::kAlreadyExists);
  Kill(child);
  EXPECT_EQ(segment->Members().at(0).state, MemberState::kDead);
  EXPECT_EQ(segment->CountLive(), 0u);
  EXPECT_TRUE(segment->Join(2).ok());
}

TEST(MembersTest, StoppedMemberIsNotDeadBeforeItsLease) {
  Segment* const segment = Make();
  const pid_t child = SpawnMember(*segment, 0);
  kill(child, SIGSTOP);
  EXPECT_EQ(segment->Members().at(0).state, MemberState::kLive);
  Kill(child);
}

TEST(MembersTest, DeathUnderTheControlLockStopsNobody) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const pid_t child = Spawn([&] {
    const RawSegment own(segment->fd());
    if (!Holds(own.control()->mutex.TryLock())) return 1;
    raise(SIGKILL);
    return 0;
  });
  ASSERT_EQ(WaitExit(child), -SIGKILL);
  EXPECT_TRUE(segment->Join(std::nullopt).ok());
}

TEST(MembersTest, StoppedHolderOfTheControlLockIsADeadline) {
  Segment* const segment = Make();
  segment->set_control_timeout(0.05);
  const pid_t child = Spawn([&] {
    const RawSegment own(segment->fd());
    if (!Holds(own.control()->mutex.TryLock())) return 1;
    raise(SIGSTOP);
    own.control()->mutex.Unlock();
    return 0;
  });
  WaitStopped(child);
  const Status status = segment->Join(std::nullopt).status();
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("has been locked for 0.05 s"), std::string::npos)
      << status.message();
  EXPECT_FALSE(segment->Reap());
  EXPECT_TRUE(segment->Members().empty());
  kill(child, SIGCONT);
  EXPECT_EQ(WaitExit(child), 0);
  EXPECT_TRUE(segment->Join(std::nullopt).ok());
}

TEST(MembersTest, AbsentWorkersAreRemembered) {
  Segment* const segment = Make();
  Segment* const other = MapAgain(*segment);
  EXPECT_FALSE(other->IsAbsent(64));
  segment->MarkAbsent(64);
  segment->MarkAbsent(kMaxWorkers - 1);
  segment->MarkAbsent(kMaxWorkers);  // ignored
  EXPECT_TRUE(other->IsAbsent(64));
  EXPECT_TRUE(other->IsAbsent(kMaxWorkers - 1));
  EXPECT_FALSE(other->IsAbsent(0));
  EXPECT_FALSE(other->IsAbsent(65));
}

TEST(MembersTest, ChangesWakeOtherProcesses) {
  Segment* const segment = Make();
  const pid_t child = Spawn([&] {
    Segment* const own = MapAgain(*segment);
    const Deadline deadline = Deadline::After(kLongSeconds);
    for (;;) {
      const uint32_t seen = own->changes();
      if (own->CountLive() == 1) return 0;
      own->WaitForChange(seen, kLongNanos);
      if (deadline.Expired()) return 1;
    }
  });
  usleep(50'000);
  ASSERT_TRUE(segment->Join(std::nullopt).ok());
  EXPECT_EQ(WaitExit(child), 0);
}

TEST(MembersTest, LastTrainingMemberStays) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1), idle = *segment->Join(2);
  segment->SetTraining(a, true);
  segment->SetTraining(b, true);
  segment->SetTraining(idle, false);
  EXPECT_TRUE(segment->LeaveUnlessLast(a));
  EXPECT_EQ(segment->CheckMember(a).code(), StatusCode::kAborted);
  EXPECT_FALSE(segment->LeaveUnlessLast(a));
  EXPECT_FALSE(segment->LeaveUnlessLast(b));  // the idle one does not count
  EXPECT_TRUE(segment->CheckMember(b).ok());
  segment->Leave(a);
  EXPECT_EQ(segment->Members().at(0).state, MemberState::kLeft);
}

TEST(MembersTest, OfManyThatLeaveAtOnceExactlyOneStays) {
  constexpr int kProcesses = 8;
  for (int round = 0; round < 5; ++round) {
    Segment* const segment = Make();
    std::vector<pid_t> children;
    for (int i = 0; i < kProcesses; ++i) {
      children.push_back(Spawn([&, i] {
        Segment* const own = MapAgain(*segment);
        const MemberId member = *own->Join(i);
        own->SetTraining(member, true);
        const Deadline deadline = Deadline::After(kLongSeconds);
        while (own->version() == 0 && !deadline.Expired()) {}
        const bool left = own->LeaveUnlessLast(member);
        own->AdvanceVersion();
        // Nobody dies before all have decided: the dead are no company.
        while (own->version() < kProcesses + 1 && !deadline.Expired()) usleep(100);
        return left ? 10 : 20;
      }));
    }
    ASSERT_TRUE(WaitUntil([&] {
      const std::vector<MemberInfo> members = segment->Members();
      return std::count_if(members.begin(), members.end(), [](const MemberInfo& m) {
               return m.training;
             }) == kProcesses;
    }));
    segment->AdvanceVersion();
    int stayed = 0;
    for (const pid_t child : children) {
      const int code = WaitExit(child);
      EXPECT_TRUE(code == 10 || code == 20) << code;
      stayed += code == 20 ? 1 : 0;
    }
    EXPECT_EQ(stayed, 1);
  }
}

// --- Seeding -------------------------------------------------------------------

TEST(SeedingTest, OnlyOneSeeds) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  EXPECT_TRUE(segment->BeginSeeding(a));
  EXPECT_FALSE(segment->BeginSeeding(b));
  EXPECT_TRUE(segment->BeginSeeding(a));  // it may try again
  segment->FinishSeeding(b);              // not its seeding
  EXPECT_FALSE(segment->seeded());
  segment->FinishSeeding(a);
  EXPECT_TRUE(segment->seeded());
  EXPECT_FALSE(segment->BeginSeeding(a));
  EXPECT_FALSE(segment->BeginSeeding(b));
}

TEST(SeedingTest, SeederThatLeavesGivesItUp) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_TRUE(segment->BeginSeeding(a));
  segment->Leave(a);
  EXPECT_TRUE(segment->BeginSeeding(b));
  segment->SetTraining(*segment->Join(2), true);
  ASSERT_TRUE(segment->LeaveUnlessLast(b));
  EXPECT_TRUE(segment->BeginSeeding(*segment->Join(3)));
}

TEST(SeedingTest, LeavingAfterSeedingKeepsTheCenter) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->BeginSeeding(a));
  segment->FinishSeeding(a);
  segment->Leave(a);
  EXPECT_TRUE(segment->seeded());
}

TEST(SeedingTest, KilledSeederIsReplaced) {
  Segment* const segment = Make();
  const MemberId other = *segment->Join(1);
  const RawSegment raw(segment->fd());
  const pid_t child = SpawnMember(*segment, 0, [](Segment* own, MemberId member) {
    if (!own->BeginSeeding(member)) _exit(1);
  });
  ASSERT_TRUE(WaitUntil([&] {
    return raw.control()->seed_state.load() == static_cast<uint32_t>(SeedState::kSeeding);
  }));
  EXPECT_FALSE(segment->BeginSeeding(other));
  Kill(child);
  EXPECT_TRUE(segment->BeginSeeding(other));
  segment->FinishSeeding(other);
  EXPECT_TRUE(segment->seeded());
}

TEST(SeedingTest, FencedSeederCannotFinish) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId slow = *segment->Join(0), other = *segment->Join(1);
  ASSERT_TRUE(segment->BeginSeeding(slow));
  raw.control()->members[slow.slot].renewed_nanos.store(BootTimeNanos() -
                                                      7200 * kNanosPerSecond);
  ASSERT_TRUE(segment->Reap());
  ASSERT_TRUE(segment->BeginSeeding(other));
  segment->FinishSeeding(slow);
  EXPECT_FALSE(segment->seeded());
  segment->FinishSeeding(other);
  EXPECT_TRUE(segment->seeded());
}

// --- Meetings ------------------------------------------------------------------

TEST(MeetingTest, ClosesWhenAllHaveArrived) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  for (uint64_t round = 1; round <= 3; ++round) {
    segment->SetTraining(a, true);
    EXPECT_EQ(segment->Arrive(a), round);
    EXPECT_FALSE(segment->Members().at(0).training);  // it makes no more steps
    EXPECT_FALSE(segment->TryCloseMeeting(round));
    EXPECT_EQ(segment->Arrive(b), round);
    EXPECT_TRUE(segment->TryCloseMeeting(round));
    EXPECT_TRUE(segment->TryCloseMeeting(round));
    EXPECT_FALSE(segment->MeetingFinished(round));
    segment->FinishMeeting(b, round);
    EXPECT_FALSE(segment->MeetingFinished(round));
    segment->FinishMeeting(a, round);
    EXPECT_TRUE(segment->MeetingFinished(round));
  }
}

TEST(MeetingTest, NobodyWaitsForWhoLeft) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  const uint64_t meeting = segment->Arrive(a);
  EXPECT_FALSE(segment->TryCloseMeeting(meeting));
  segment->Leave(b);
  EXPECT_TRUE(segment->TryCloseMeeting(meeting));
}

TEST(MeetingTest, KilledMemberIsDropped) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  const pid_t never_comes = SpawnMember(*segment, 1);
  const uint64_t meeting = segment->Arrive(a);
  EXPECT_FALSE(segment->TryCloseMeeting(meeting));
  Kill(never_comes);
  EXPECT_TRUE(segment->TryCloseMeeting(meeting));
  segment->FinishMeeting(a, meeting);
  EXPECT_TRUE(segment->MeetingFinished(meeting));
}

TEST(MeetingTest, ReaderThatDiesIsDropped) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  const pid_t reader = SpawnMember(*segment, 1, [](Segment* own, MemberId member) {
    own->Arrive(member);
  });
  const uint64_t meeting = segment->Arrive(a);
  ASSERT_TRUE(WaitUntil([&] { return segment->TryCloseMeeting(meeting); }));
  segment->FinishMeeting(a, meeting);
  EXPECT_FALSE(segment->MeetingFinished(meeting));
  Kill(reader);
  segment->Reap();
  EXPECT_TRUE(segment->MeetingFinished(meeting));
}

TEST(MeetingTest, LateJoinerHasToComeToo) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->TryCloseMeeting(segment->Arrive(a)));
  segment->FinishMeeting(a, 1);
  const MemberId late = *segment->Join(1);  // after meeting 1: it has nothing to do with it
  EXPECT_TRUE(segment->MeetingFinished(1));
  EXPECT_EQ(segment->Arrive(a), 2u);
  EXPECT_FALSE(segment->TryCloseMeeting(2));
  EXPECT_EQ(segment->Arrive(late), 2u);
  EXPECT_TRUE(segment->TryCloseMeeting(2));
}

}  // namespace
}  // namespace tf_smb
