// Barriers, the lock, rounds, phases, texts and versions: members in this process and in
// real ones, some of which are killed.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "cc/box/segment.h"
#include "tests/cc/box_testing.h"

namespace tf_smb {
namespace {

using Workers = std::vector<uint32_t>;

Segment* Make(double lease_s = 3600.0) {
  return Keep(Segment::Create(OptionsOf(LayoutOf({{3}}), lease_s)));
}

Workers Missing(Segment* segment, const MemberId& member, uint64_t barrier) {
  const Result<Workers> missing = segment->MissingAtBarrier(member, barrier);
  EXPECT_TRUE(missing.ok()) << missing.status().message();
  return missing.ok() ? *missing : Workers{999};
}

// --- Barriers ------------------------------------------------------------------

TEST(BarrierTest, PassesWhenAllOfTheListHaveCome) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1), c = *segment->Join(2);
  const Workers list = {0, 1, 2};
  const uint64_t barrier = *segment->ArriveAtBarrier(a, list);
  EXPECT_NE(barrier, 0u);
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1, 2}));
  EXPECT_EQ(*segment->ArriveAtBarrier(c, {2, 0, 1, 1}), barrier);  // a set: order is nothing
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1}));
  EXPECT_EQ(*segment->ArriveAtBarrier(b, list), barrier);
  for (const MemberId& member : {a, b, c}) EXPECT_TRUE(Missing(segment, member, barrier).empty());
}

TEST(BarrierTest, AloneIsPassedAtOnce) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(5);
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {5});
  EXPECT_TRUE(Missing(segment, a, barrier).empty());
}

TEST(BarrierTest, SameListAgainIsAnotherBarrier) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  uint64_t last = 0;
  for (int round = 0; round < 200; ++round) {  // more often than there are entries
    const uint64_t barrier = *segment->ArriveAtBarrier(a, {0, 1});
    EXPECT_GT(barrier, last);
    EXPECT_EQ(Missing(segment, a, barrier), (Workers{1}));
    EXPECT_EQ(*segment->ArriveAtBarrier(b, {0, 1}), barrier);
    last = barrier;
    // a is slow to look: b is at the next one already.
    const uint64_t next = *segment->ArriveAtBarrier(b, {0, 1});
    EXPECT_GT(next, barrier);
    EXPECT_TRUE(Missing(segment, a, barrier).empty());
    EXPECT_EQ(Missing(segment, b, next), (Workers{0}));
    EXPECT_EQ(*segment->ArriveAtBarrier(a, {0, 1}), next);
    last = next;
  }
}

TEST(BarrierTest, ListsDoNotMix) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1), c = *segment->Join(2);
  const uint64_t all = *segment->ArriveAtBarrier(a, {0, 1, 2});
  const uint64_t two = *segment->ArriveAtBarrier(b, {1, 2});
  EXPECT_NE(all, two);
  EXPECT_EQ(*segment->ArriveAtBarrier(c, {1, 2}), two);
  EXPECT_TRUE(Missing(segment, b, two).empty());
  EXPECT_EQ(Missing(segment, a, all), (Workers{1, 2}));
}

TEST(BarrierTest, HighestIndexes) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(kMaxWorkers - 1), b = *segment->Join(64);
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {64, kMaxWorkers - 1});
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{64}));
  EXPECT_EQ(*segment->ArriveAtBarrier(b, {64, kMaxWorkers - 1}), barrier);
  EXPECT_TRUE(Missing(segment, a, barrier).empty());
}

TEST(BarrierTest, BadListsAreRefused) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  Status status = segment->ArriveAtBarrier(a, {0, kMaxWorkers}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("worker index 1024 in the barrier's list is out of range"),
            std::string::npos);
  for (const Workers& list : {Workers{}, Workers{1, 2}}) {
    status = segment->ArriveAtBarrier(a, list).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("worker 0 is not in the list"), std::string::npos);
  }
}

TEST(BarrierTest, WhoLeftIsNotWaitedForWhoNeverCameIs) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {0, 1, 2});
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1, 2}));
  segment->Leave(b);
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{2}));
  segment->MarkAbsent(2);
  EXPECT_TRUE(Missing(segment, a, barrier).empty());
}

TEST(BarrierTest, AbsentWorkerThatCameAllTheSameIsWaitedFor) {
  Segment* const segment = Make();
  segment->MarkAbsent(1);
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {0, 1});
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1}));
  EXPECT_EQ(*segment->ArriveAtBarrier(b, {0, 1}), barrier);
}

TEST(BarrierTest, KilledMemberIsNotWaitedFor) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  const pid_t child = SpawnMember(*segment, 1);
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {0, 1});
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1}));
  Kill(child);
  EXPECT_TRUE(Missing(segment, a, barrier).empty());
}

// It arrived, died, and comes again: that is another arrival.
TEST(BarrierTest, KilledInABarrierHasNotArrived) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), c = *segment->Join(2);
  int* const arrived = NewShared<int>();
  const pid_t child = SpawnMember(*segment, 1, [arrived](Segment* own, MemberId member) {
    *arrived = own->ArriveAtBarrier(member, {0, 1, 2}).ok() ? 1 : 2;
  });
  ASSERT_TRUE(WaitUntil([&] { return *arrived == 1; }));
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {0, 1, 2});
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{2}));
  Kill(child);
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{2}));
  const MemberId b = *segment->Join(1);
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1, 2}));
  EXPECT_EQ(*segment->ArriveAtBarrier(c, {0, 1, 2}), barrier);
  EXPECT_EQ(*segment->ArriveAtBarrier(b, {0, 1, 2}), barrier);
  EXPECT_TRUE(Missing(segment, a, barrier).empty());
}

TEST(BarrierTest, FencedMemberIsTold) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId alone = *segment->Join(0), other = *segment->Join(1);
  // The only one there: the barrier goes with it, and that is not passing it.
  const uint64_t barrier = *segment->ArriveAtBarrier(alone, {0, 1});
  raw.Expire(alone);
  ASSERT_TRUE(segment->Reap());
  EXPECT_EQ(segment->MissingAtBarrier(alone, barrier).status().code(), StatusCode::kAborted);
  EXPECT_EQ(segment->ArriveAtBarrier(alone, {0, 1}).status().code(), StatusCode::kAborted);
  EXPECT_TRUE(segment->CheckMember(other).ok());
}

// Its lease is found to have lapsed at the moment it comes: it has not come.
TEST(BarrierTest, LapsedAtTheBarrierHasNotArrived) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId late = *segment->Join(0), other = *segment->Join(1);
  const uint64_t barrier = *segment->ArriveAtBarrier(other, {0, 1, 2});
  raw.Expire(late);
  EXPECT_EQ(segment->ArriveAtBarrier(late, {0, 1, 2}).status().code(), StatusCode::kAborted);
  ASSERT_TRUE(segment->Join(0).ok());
  EXPECT_EQ(Missing(segment, other, barrier), (Workers{0, 2}));
}

// Many expected, few here: the sets of all of them.
TEST(BarrierTest, OfAllWorkers) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(3);
  ASSERT_TRUE(segment->Join(1000).ok());
  segment->MarkAbsent(77);
  segment->MarkAbsent(1000);
  Workers all(kMaxWorkers);
  std::iota(all.begin(), all.end(), 0);
  Workers expected = all;
  expected.erase(expected.begin() + 77);
  expected.erase(expected.begin() + 3);
  EXPECT_EQ(Missing(segment, a, *segment->ArriveAtBarrier(a, all)), expected);
}

TEST(BarrierTest, WithdrawnMemberHasNotArrived) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1), c = *segment->Join(2);
  const Workers list = {0, 1, 2};
  const uint64_t barrier = *segment->ArriveAtBarrier(a, list);
  ASSERT_EQ(*segment->ArriveAtBarrier(b, list), barrier);
  EXPECT_TRUE(segment->WithdrawFromBarrier(a, barrier));
  EXPECT_EQ(Missing(segment, b, barrier), (Workers{0, 2}));
  ASSERT_EQ(*segment->ArriveAtBarrier(c, list), barrier);
  EXPECT_EQ(Missing(segment, b, barrier), (Workers{0}));
  ASSERT_EQ(*segment->ArriveAtBarrier(a, list), barrier);
  EXPECT_FALSE(segment->WithdrawFromBarrier(b, barrier));  // too late: passed
}

TEST(BarrierTest, LastToWithdrawTakesTheBarrierAway) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->Join(1).ok());
  const uint64_t first = *segment->ArriveAtBarrier(a, {0, 1});
  EXPECT_TRUE(segment->WithdrawFromBarrier(a, first));
  EXPECT_GT(*segment->ArriveAtBarrier(a, {0, 1}), first);
}

// Without the control lock nobody knows: then it has not been passed.
TEST(BarrierTest, WithdrawingUnderAStoppedProcessIsNoPassing) {
  Segment* const segment = Make();
  segment->set_control_timeout(0.05);
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->Join(1).ok());
  const uint64_t barrier = *segment->ArriveAtBarrier(a, {0, 1});
  const pid_t child = Spawn([&] {
    const RawSegment own(segment->fd());
    if (!Holds(own.control()->mutex.TryLock())) return 1;
    raise(SIGSTOP);
    return 0;
  });
  WaitStopped(child);
  EXPECT_TRUE(segment->WithdrawFromBarrier(a, barrier));
  EXPECT_EQ(segment->MissingAtBarrier(a, barrier).status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(segment->ArriveAtBarrier(a, {0, 1}).status().code(), StatusCode::kDeadlineExceeded);
  Kill(child);
  EXPECT_EQ(Missing(segment, a, barrier), (Workers{1}));
}

TEST(BarrierTest, OneMoreThanThereAreEntries) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  std::vector<uint64_t> barriers;
  for (uint32_t i = 0; i < kMaxBarriers; ++i) {
    barriers.push_back(*segment->ArriveAtBarrier(a, {0, 100 + i}));
  }
  const Status status = segment->ArriveAtBarrier(a, {0, 99}).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("has 64 open barriers"), std::string::npos);
  EXPECT_EQ(*segment->ArriveAtBarrier(a, {0, 110}), barriers[10]);  // an open one is found
  EXPECT_TRUE(segment->WithdrawFromBarrier(a, barriers[10]));
  EXPECT_TRUE(segment->ArriveAtBarrier(a, {0, 99}).ok());
}

TEST(BarrierTest, LeavingFreesAllEntries) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  for (uint32_t i = 0; i < kMaxBarriers; ++i) {
    ASSERT_TRUE(segment->ArriveAtBarrier(a, {0, 100 + i}).ok());
  }
  segment->Leave(a);
  const MemberId b = *segment->Join(1);
  for (uint32_t i = 0; i < kMaxBarriers; ++i) {
    ASSERT_TRUE(segment->ArriveAtBarrier(b, {1, 100 + i}).ok());
  }
}

// Nobody is through before all are there, round for round.
TEST(BarrierTest, ProcessesInLockstep) {
  constexpr uint32_t kProcesses = 4;
  constexpr int kRounds = 200;
  Segment* const segment = Make();
  struct Shared {
    std::atomic<int> at[kProcesses];
    std::atomic<int> joined;
  };
  Shared* const shared = NewShared<Shared>();
  std::vector<pid_t> children;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      const MemberId member = *own->Join(p);
      Workers list(kProcesses);
      std::iota(list.begin(), list.end(), 0);
      for (int round = 0; round < kRounds; ++round) {
        shared->at[p].store(round);
        const uint64_t barrier = *own->ArriveAtBarrier(member, list);
        const Deadline deadline = Long();
        for (;;) {
          const uint32_t seen = own->changes();
          if (own->MissingAtBarrier(member, barrier)->empty()) break;
          if (deadline.Expired()) return 1;
          own->WaitForChange(seen, kNanosPerSecond);
        }
        for (const std::atomic<int>& other : shared->at) {
          if (other.load() < round) return 2;
        }
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
}

// --- The lock ------------------------------------------------------------------

TEST(LockTest, OneHolderWithATokenThatGrows) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(3), b = *segment->Join(4);
  EXPECT_EQ(segment->LockHolder(), std::nullopt);
  const uint64_t first = *segment->TryLock(a, 60.0);
  EXPECT_GT(first, 0u);
  EXPECT_EQ(segment->LockHolder(), 3u);
  EXPECT_EQ(MapAgain(*segment)->LockHolder(), 3u);
  EXPECT_EQ(*segment->TryLock(b, 60.0), 0u);
  EXPECT_EQ(*segment->TryLock(a, 60.0), 0u);  // nor twice
  EXPECT_EQ(segment->Unlock(b, first).code(), StatusCode::kAborted);
  EXPECT_EQ(segment->Unlock(a, first + 1).code(), StatusCode::kAborted);
  EXPECT_TRUE(segment->Unlock(a, first).ok());
  EXPECT_EQ(segment->LockHolder(), std::nullopt);
  const uint64_t second = *segment->TryLock(b, 60.0);
  EXPECT_GT(second, first);
  const Status late = segment->Unlock(a, first);
  EXPECT_EQ(late.code(), StatusCode::kAborted);
  EXPECT_EQ(late.scope(), FailureScope::kCall);  // nobody has to join again
  EXPECT_NE(late.message().find("lapsed"), std::string::npos);
  EXPECT_TRUE(segment->Unlock(b, second).ok());
}

TEST(LockTest, LeaseEndsIt) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  const uint64_t first = *segment->TryLock(a, 0.05);
  EXPECT_EQ(*segment->TryLock(b, 1.0), 0u);
  const int64_t before = MonotonicNanos();
  uint64_t second = 0;
  ASSERT_TRUE(WaitUntil([&] { return (second = *segment->TryLock(b, 60.0)) != 0; }));
  EXPECT_LT(MonotonicNanos() - before, 2 * kNanosPerSecond);
  EXPECT_GT(second, first);
  EXPECT_EQ(segment->LockHolder(), 1u);
  EXPECT_EQ(segment->Unlock(a, first).code(), StatusCode::kAborted);
  EXPECT_EQ(segment->LockHolder(), 1u);  // not taken from b
}

TEST(LockTest, LapsedButNotTakenIsAborted) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  const uint64_t token = *segment->TryLock(a, 0.01);
  usleep(20'000);
  EXPECT_EQ(segment->LockHolder(), std::nullopt);
  EXPECT_EQ(segment->Unlock(a, token).code(), StatusCode::kAborted);
  EXPECT_GT(*segment->TryLock(a, 1.0), token);
}

TEST(LockTest, HolderThatLeavesOrDiesGivesItUp) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_GT(*segment->TryLock(b, 3600.0), 0u);
  segment->Leave(b);
  const uint64_t token = *segment->TryLock(a, 3600.0);
  ASSERT_GT(token, 0u);
  ASSERT_TRUE(segment->Unlock(a, token).ok());
  const pid_t child = SpawnMember(*segment, 2, [](Segment* own, MemberId member) {
    if (!own->TryLock(member, 3600.0).ok()) _exit(1);
  });
  ASSERT_TRUE(WaitUntil([&] { return segment->LockHolder() == 2u; }));
  EXPECT_EQ(*segment->TryLock(a, 1.0), 0u);
  Kill(child);
  EXPECT_GT(*segment->TryLock(a, 3600.0), token);  // at once
  raw.Expire(a);
  const MemberId c = *segment->Join(3);
  EXPECT_EQ(segment->LockHolder(), std::nullopt);
  EXPECT_GT(*segment->TryLock(c, 1.0), token + 1);
}

TEST(LockTest, LeaseHasARange) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  for (const double lease : {0.0, -1.0, 3600.1, std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::infinity()}) {
    const Status status = segment->TryLock(a, lease).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << lease;
    EXPECT_NE(status.message().find("above 0 and at most 3600 seconds"), std::string::npos);
  }
  EXPECT_GT(*segment->TryLock(a, kMaxLockLeaseSeconds), 0u);
}

TEST(LockTest, OnlyMembersGetIt) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0);
  raw.Expire(a);
  segment->Reap();
  EXPECT_EQ(segment->TryLock(a, 1.0).status().code(), StatusCode::kAborted);
}

TEST(LockTest, ExcludesProcesses) {
  constexpr uint32_t kProcesses = 4;
  constexpr int kRounds = 200;
  Segment* const segment = Make();
  volatile int64_t* const counter = NewShared<int64_t>();
  std::vector<pid_t> children;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      const MemberId member = *own->Join(p);
      uint64_t last = 0;
      for (int round = 0; round < kRounds; ++round) {
        uint64_t token = 0;
        const Deadline deadline = Long();
        while (token == 0) {
          const uint32_t seen = own->changes();
          token = *own->TryLock(member, 60.0);
          if (token == 0) own->WaitForChange(seen, kNanosPerSecond);
          if (deadline.Expired()) return 1;
        }
        if (token <= last) return 2;
        last = token;
        const int64_t value = *counter;
        sched_yield();
        *counter = value + 1;
        if (!own->Unlock(member, token).ok()) return 3;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_EQ(*counter, kProcesses * kRounds);
}

// --- Rounds --------------------------------------------------------------------

TEST(RoundTest, ClosesWithTheLastShareAndWaitsForItsReaders) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  EXPECT_FALSE(segment->IsOpenRound(1));
  for (uint64_t round = 1; round <= 3; ++round) {
    EXPECT_EQ(*segment->EnterRound(a), round);
    EXPECT_TRUE(segment->IsOpenRound(round));
    EXPECT_FALSE(segment->IsOpenRound(round + 1));
    EXPECT_EQ(segment->MissingInRound(), (Workers{0, 1}));
    segment->FinishShare(a, round, false);
    EXPECT_FALSE(segment->TryCloseRound(round, /*force=*/false));
    EXPECT_EQ(segment->MissingInRound(), (Workers{1}));
    EXPECT_EQ(*segment->EnterRound(a), 0u);  // its share is in: the next one is not open
    EXPECT_EQ(*segment->EnterRound(b), round);
    segment->FinishShare(b, round, false);
    EXPECT_TRUE(segment->TryCloseRound(round, /*force=*/false));
    EXPECT_FALSE(segment->IsOpenRound(round));
    EXPECT_EQ(segment->rounds_closed(), round);
    EXPECT_EQ(segment->MissingInRound(), (Workers{0, 1}));  // to read
    segment->FinishRound(b, round);
    EXPECT_EQ(*segment->EnterRound(b), 0u);
    EXPECT_EQ(segment->MissingInRound(), (Workers{0}));
    segment->FinishRound(a, round);
  }
}

TEST(RoundTest, LateJoinerWaitsForTheNextOne) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  const MemberId late = *segment->Join(1);
  EXPECT_EQ(*segment->EnterRound(late), 0u);
  EXPECT_EQ(segment->MissingInRound(), (Workers{0}));  // not for the late one
  segment->FinishShare(a, 1, false);
  EXPECT_TRUE(segment->TryCloseRound(1, false));
  EXPECT_EQ(*segment->EnterRound(late), 0u);  // a still reads
  segment->FinishRound(a, 1);
  EXPECT_EQ(*segment->EnterRound(late), 2u);
  EXPECT_EQ(segment->MissingInRound(), (Workers{0, 1}));
}

TEST(RoundTest, ForceClosesWithThoseThatAreThere) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->FinishShare(a, 1, false);
  EXPECT_TRUE(segment->TryCloseRound(1, /*force=*/true));
  EXPECT_FALSE(segment->IsOpenRound(1));  // what is late is refused by whoever updates
  segment->FinishRound(a, 1);
  EXPECT_EQ(*segment->EnterRound(b), 2u);  // it is not waited for to read what it is not in
  EXPECT_FALSE(segment->TryCloseRound(2, false));
  EXPECT_FALSE(segment->TryCloseRound(3, true));  // there is none
  EXPECT_TRUE(segment->TryCloseRound(1, true));   // long closed
  EXPECT_EQ(segment->rounds_closed(), 1u);
}

TEST(RoundTest, DeathBeforeAndAfterTheShare) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  int* const step = NewShared<int>();
  const pid_t before = SpawnMember(*segment, 1);
  const pid_t after = SpawnMember(*segment, 2, [step](Segment* own, MemberId member) {
    if (!WaitUntil([step] { return *static_cast<volatile int*>(step) == 1; })) _exit(1);
    if (*own->EnterRound(member) != 1) _exit(2);
    own->FinishShare(member, 1, false);
    *step = 2;
  });
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  *step = 1;
  ASSERT_TRUE(WaitUntil([step] { return *static_cast<volatile int*>(step) == 2; }));
  segment->FinishShare(a, 1, false);
  EXPECT_EQ(segment->MissingInRound(), (Workers{1}));
  EXPECT_FALSE(segment->TryCloseRound(1, false));
  Kill(before);
  EXPECT_TRUE(segment->TryCloseRound(1, false));
  segment->FinishRound(a, 1);
  EXPECT_EQ(segment->MissingInRound(), (Workers{2}));
  EXPECT_EQ(*segment->EnterRound(a), 0u);
  Kill(after);  // before it read the mean
  EXPECT_EQ(*segment->EnterRound(a), 2u);
}

// Everybody of the round is gone: whoever comes next closes it.
TEST(RoundTest, OneWhoseMembersAllDiedHoldsUpNobody) {
  Segment* const segment = Make();
  const pid_t child = SpawnMember(*segment, 0, [](Segment* own, MemberId member) {
    if (*own->EnterRound(member) != 1) _exit(1);
  });
  ASSERT_TRUE(WaitUntil([&] { return segment->IsOpenRound(1); }));
  const MemberId next = *segment->Join(1);
  EXPECT_EQ(*segment->EnterRound(next), 0u);
  Kill(child);
  EXPECT_EQ(*segment->EnterRound(next), 2u);
  EXPECT_EQ(segment->rounds_closed(), 1u);
}

// It gave up waiting after its share, as an interrupted worker does, and comes again.
TEST(RoundTest, WhoComesAgainDoesNotWaitForItself) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->FinishShare(a, 1, false);
  EXPECT_EQ(*segment->EnterRound(a), 0u);
  ASSERT_EQ(*segment->EnterRound(b), 1u);
  segment->FinishShare(b, 1, false);
  EXPECT_EQ(*segment->EnterRound(a), 0u);  // b has to read
  segment->FinishRound(b, 1);
  EXPECT_EQ(*segment->EnterRound(a), 2u);
}

TEST(RoundTest, FencedMemberIsOut) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0), slow = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(slow), 1u);
  raw.Expire(slow);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->FinishShare(a, 1, false);
  segment->FinishShare(slow, 1, false);  // harmless
  EXPECT_EQ(segment->EnterRound(slow).status().code(), StatusCode::kAborted);
  EXPECT_TRUE(segment->TryCloseRound(1, false));
  segment->FinishRound(a, 1);
  EXPECT_EQ(*segment->EnterRound(a), 2u);
}

// --- Turns -----------------------------------------------------------------------

// Shares are added by index, whoever comes first.
TEST(TurnTest, PassesFromIndexToIndex) {
  Segment* const segment = Make();
  const MemberId c = *segment->Join(7), a = *segment->Join(0), b = *segment->Join(3);
  for (uint64_t round = 1; round <= 3; ++round) {
    for (const MemberId& member : {c, a, b}) ASSERT_EQ(*segment->EnterRound(member), round);
    const MemberId in_order[] = {a, b, c};
    for (size_t turn = 0; turn < 3; ++turn) {
      for (size_t i = turn; i < 3; ++i) {
        EXPECT_EQ(segment->IsTurn(in_order[i], round), i == turn) << turn << " " << i;
      }
      segment->FinishShare(in_order[turn], round, false);
    }
    EXPECT_TRUE(segment->TryCloseRound(round, false));
    for (const MemberId& member : {c, a, b}) segment->FinishRound(member, round);
  }
}

TEST(TurnTest, PassesWhenTheLowerOneLeavesOrLapses) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0), b = *segment->Join(1), c = *segment->Join(2);
  ASSERT_EQ(*segment->EnterRound(c), 1u);
  EXPECT_FALSE(segment->IsTurn(c, 1));
  segment->Leave(a);
  EXPECT_FALSE(segment->IsTurn(c, 1));
  raw.Expire(b);
  EXPECT_TRUE(segment->IsTurn(c, 1));
}

TEST(TurnTest, PassesWhenTheLowerOneIsKilled) {
  Segment* const segment = Make();
  const MemberId b = *segment->Join(1);
  const pid_t child = SpawnMember(*segment, 0);
  ASSERT_EQ(*segment->EnterRound(b), 1u);
  EXPECT_FALSE(segment->IsTurn(b, 1));
  Kill(child);
  EXPECT_TRUE(segment->IsTurn(b, 1));
}

TEST(TurnTest, LateJoinerWithALowIndexIsNotWaitedFor) {
  Segment* const segment = Make();
  const MemberId b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(b), 1u);
  ASSERT_TRUE(segment->Join(0).ok());
  EXPECT_TRUE(segment->IsTurn(b, 1));
}

// It would be told that its share comes too late, instead of waiting for ever.
TEST(TurnTest, OfAClosedRoundIsEverybodys) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(b), 1u);
  EXPECT_FALSE(segment->IsTurn(b, 1));
  ASSERT_TRUE(segment->TryCloseRound(1, /*force=*/true));
  EXPECT_TRUE(segment->IsTurn(b, 1));
  ASSERT_EQ(*segment->EnterRound(a), 2u);
  EXPECT_TRUE(segment->IsTurn(b, 1));
  EXPECT_FALSE(segment->IsTurn(b, 2));
}

// --- Rounds and meetings -------------------------------------------------------------

TEST(RoundMeetingTest, WhoCameToAMeetingIsNotInTheNextRound) {
  Segment* const segment = Make();
  const MemberId done = *segment->Join(0), b = *segment->Join(1);
  const uint64_t meeting = segment->Arrive(done);
  ASSERT_EQ(*segment->EnterRound(b), 1u);
  EXPECT_EQ(segment->MissingInRound(), (Workers{1}));
  EXPECT_TRUE(segment->IsTurn(b, 1));
  segment->FinishShare(b, 1, false);
  EXPECT_TRUE(segment->TryCloseRound(1, false));
  segment->FinishRound(b, 1);
  // After the meeting it is again.
  ASSERT_EQ(segment->Arrive(b), meeting);
  ASSERT_TRUE(segment->TryCloseMeeting(meeting));
  ASSERT_EQ(*segment->EnterRound(b), 2u);
  EXPECT_EQ(segment->MissingInRound(), (Workers{0, 1}));
}

TEST(RoundMeetingTest, ComingToAMeetingFreesTheOpenRound) {
  Segment* const segment = Make();
  const MemberId done = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(b), 1u);
  EXPECT_FALSE(segment->IsTurn(b, 1));
  const uint32_t seen = segment->changes();
  segment->Arrive(done);
  EXPECT_NE(segment->changes(), seen);  // who waits is woken
  EXPECT_TRUE(segment->IsTurn(b, 1));
  segment->FinishShare(b, 1, false);
  EXPECT_TRUE(segment->MissingInRound().empty());
  EXPECT_TRUE(segment->TryCloseRound(1, false));
}

// All of them: the next one that comes to a round closes it.
TEST(RoundMeetingTest, OneThatAllHaveLeftForAMeetingHoldsUpNobody) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->Arrive(a);
  segment->Arrive(b);
  const MemberId late = *segment->Join(2);
  EXPECT_EQ(*segment->EnterRound(late), 2u);
  EXPECT_EQ(segment->MissingInRound(), (Workers{2}));
}

// Nobody waits for it, but it may: a worker that gave up its meeting and averages.
TEST(RoundMeetingTest, WhoComesFromAnOpenMeetingIsInTheRoundItOpens) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->Join(1).ok());
  segment->Arrive(a);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  EXPECT_TRUE(segment->IsOpenRound(1));
  EXPECT_EQ(segment->MissingInRound(), (Workers{1}));
  segment->FinishShare(a, 1, false);
  EXPECT_FALSE(segment->TryCloseRound(1, false));
}

// --- Phases ----------------------------------------------------------------------

TEST(PhaseTest, ARoundEndsItOnceWhoeverSaidSo) {
  for (uint32_t says = 1; says < 8; ++says) {  // each subset of three members
    Segment* const segment = Make();
    const MemberId members[] = {*segment->Join(0), *segment->Join(1), *segment->Join(2)};
    uint64_t expected = 0;
    for (uint64_t round = 1; round <= 4; ++round) {
      const bool ends = round % 2 == 0;
      for (uint32_t i = 0; i < 3; ++i) {
        ASSERT_EQ(*segment->EnterRound(members[i]), round);
        EXPECT_EQ(segment->phase(), expected);
        segment->FinishShare(members[i], round, ends && (says >> i & 1) != 0);
      }
      EXPECT_EQ(segment->phase(), expected);  // not before it closes
      ASSERT_TRUE(segment->TryCloseRound(round, false));
      if (ends) ++expected;
      EXPECT_EQ(segment->phase(), expected);
      EXPECT_TRUE(segment->TryCloseRound(round, true));
      EXPECT_EQ(segment->phase(), expected);
      for (const MemberId& member : members) segment->FinishRound(member, round);
    }
  }
}

TEST(PhaseTest, AForcedRoundEndsItToo) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->FinishShare(a, 1, /*ends_phase=*/true);
  ASSERT_TRUE(segment->TryCloseRound(1, /*force=*/true));
  EXPECT_EQ(segment->phase(), 1u);
  // Too late: neither this round nor the next is ended by it.
  segment->FinishShare(b, 1, /*ends_phase=*/true);
  segment->FinishRound(a, 1);
  segment->FinishRound(b, 1);
  ASSERT_EQ(*segment->EnterRound(b), 2u);
  segment->FinishShare(a, 2, false);
  segment->FinishShare(b, 2, false);
  ASSERT_TRUE(segment->TryCloseRound(2, false));
  EXPECT_EQ(segment->phase(), 1u);
}

TEST(PhaseTest, WhoSaidSoAndDiedHasSaidSo) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  int* const done = NewShared<int>();
  const pid_t child = SpawnMember(*segment, 1, [done](Segment* own, MemberId member) {
    if (*own->EnterRound(member) != 1) _exit(1);
    own->FinishShare(member, 1, /*ends_phase=*/true);
    *done = 1;
  });
  ASSERT_TRUE(WaitUntil([done] { return *static_cast<volatile int*>(done) == 1; }));
  Kill(child);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->FinishShare(a, 1, false);
  ASSERT_TRUE(segment->TryCloseRound(1, false));
  EXPECT_EQ(segment->phase(), 1u);
}

// Its closer dies after the phase has ended and before the round has: the next one closes
// the round, and ends no other phase.
TEST(PhaseTest, DeathWhileClosingEndsItOnce) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  ASSERT_EQ(*segment->EnterRound(a), 1u);
  segment->FinishShare(a, 1, /*ends_phase=*/true);
  raw.control()->phase.store(1);  // as the dead one left it
  segment->FinishShare(b, 1, /*ends_phase=*/true);
  ASSERT_TRUE(segment->TryCloseRound(1, false));
  EXPECT_EQ(segment->phase(), 1u);
  // Nor does what was said then end the next one.
  ASSERT_EQ(raw.control()->round_ends_phase.load(), 1u);
  segment->FinishRound(b, 1);
  ASSERT_EQ(*segment->EnterRound(a), 2u);
  EXPECT_EQ(raw.control()->round_ends_phase.load(), 0u);
}

TEST(PhaseTest, WaitsForThoseInTrainingThatHaveNotEntered) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  EXPECT_EQ(segment->phase(), 0u);
  for (const MemberId& member : {a, b}) segment->SetTraining(member, true);
  EXPECT_FALSE(segment->TryEndPhase(a, 1));  // there is none yet
  EXPECT_TRUE(segment->TryEndPhase(a, 0));   // all joined in it
  EXPECT_TRUE(segment->TryEndPhase(b, 0));
  EXPECT_EQ(segment->phase(), 1u);  // once
  segment->EnterPhase(a, 1);
  EXPECT_FALSE(segment->TryEndPhase(a, 1));
  EXPECT_FALSE(segment->TryEndPhase(b, 1));
  const uint32_t seen = segment->changes();
  segment->EnterPhase(b, 1);
  EXPECT_NE(segment->changes(), seen);
  EXPECT_TRUE(segment->TryEndPhase(a, 1));
  EXPECT_EQ(segment->phase(), 2u);
  EXPECT_FALSE(segment->TryEndPhase(a, 5));
  EXPECT_FALSE(segment->TryEndPhase(a, UINT64_MAX));
  EXPECT_EQ(segment->phase(), 2u);
}

TEST(PhaseTest, WaitsForNobodyElse) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0);
  segment->SetTraining(a, true);
  ASSERT_TRUE(segment->TryEndPhase(a, 0));
  segment->EnterPhase(a, 1);
  const auto lag = [&](uint32_t index) {  // a member in training, a phase behind
    const MemberId member = *segment->Join(index);
    EXPECT_EQ(segment->Members().back().phase, segment->phase());  // where it joined
    segment->EnterPhase(member, segment->phase() - 1);
    segment->SetTraining(member, true);
    return member;
  };
  uint64_t phase = 1;
  const auto ends = [&](const std::function<void()>& goes) {
    EXPECT_FALSE(segment->TryEndPhase(a, phase));
    goes();
    EXPECT_TRUE(segment->TryEndPhase(a, phase));
    segment->EnterPhase(a, ++phase);
    EXPECT_EQ(segment->phase(), phase);
  };
  const MemberId left = lag(1);
  ends([&] { segment->Leave(left); });
  const MemberId lapsed = lag(2);
  ends([&] { raw.Expire(lapsed); });
  const MemberId idle = lag(3);
  ends([&] { segment->SetTraining(idle, false); });
  const MemberId done = lag(4);
  ends([&] {
    segment->Arrive(done);
    segment->SetTraining(done, true);  // only that it came counts
  });
  const pid_t child = SpawnMember(*segment, 5, [&](Segment* own, MemberId member) {
    own->EnterPhase(member, phase - 1);
    own->SetTraining(member, true);
  });
  ASSERT_TRUE(WaitUntil([&] { return segment->Members().back().training; }));
  ends([&] { Kill(child); });
}

TEST(PhaseTest, FencedMembersEndAndEnterNothing) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId lapsed = *segment->Join(0);
  raw.Expire(lapsed);
  EXPECT_FALSE(segment->TryEndPhase(lapsed, 0));
  segment->EnterPhase(lapsed, 9);
  EXPECT_EQ(segment->Members().at(0).phase, 0u);
  EXPECT_EQ(segment->phase(), 0u);
}

TEST(PhaseTest, OnlyTheSeederSetsTheFirst) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  segment->SetFirstPhase(a, 4);
  EXPECT_EQ(segment->phase(), 0u);
  ASSERT_TRUE(segment->BeginSeeding(a));
  segment->SetFirstPhase(b, 4);
  EXPECT_EQ(segment->phase(), 0u);
  segment->SetFirstPhase(a, 2);
  EXPECT_EQ(segment->phase(), 2u);
  segment->SetFirstPhase(a, 1);  // never back
  EXPECT_EQ(segment->phase(), 2u);
  segment->FinishSeeding(a);
  segment->SetFirstPhase(a, 5);
  EXPECT_EQ(segment->phase(), 2u);
  const MemberId late = *segment->Join(2);
  EXPECT_EQ(segment->Members().back().phase, 2u);
  EXPECT_TRUE(segment->CheckMember(late).ok());
}

// Processes that go through many phases as fast as they can: no two are ever more than
// one apart, and all end in the same.
TEST(PhaseTest, ProcessesAreNeverTwoApart) {
  constexpr uint32_t kProcesses = 4;
  constexpr uint64_t kPhases = 300;
  Segment* const segment = Make();
  struct Shared {
    std::atomic<uint64_t> at[kProcesses];
    std::atomic<uint32_t> joined;
  };
  Shared* const shared = NewShared<Shared>();
  std::vector<pid_t> children;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      const MemberId member = *own->Join(p);
      own->SetTraining(member, true);
      shared->joined.fetch_add(1);
      if (!WaitUntil([&] { return shared->joined.load() == kProcesses; })) return 1;
      for (uint64_t phase = 0; phase < kPhases; ++phase) {
        shared->at[p].store(phase);
        own->EnterPhase(member, phase);
        const Deadline deadline = Long();
        for (;;) {
          const uint32_t seen = own->changes();
          if (own->TryEndPhase(member, phase)) break;
          if (deadline.Expired()) return 2;
          own->WaitForChange(seen, kNanosPerSecond);
        }
        for (const std::atomic<uint64_t>& other : shared->at) {
          if (other.load() < phase || other.load() > phase + 1) return 3;
        }
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_EQ(segment->phase(), kPhases);
}

// --- Texts -------------------------------------------------------------------------

TEST(TextTest, TheFirstScheduleIsInForceWhileOthersTrainByIt) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  EXPECT_EQ(*segment->AgreeOnSchedule(a, "first"), "first");
  EXPECT_EQ(*segment->AgreeOnSchedule(b, "second"), "first");
  EXPECT_EQ(*MapAgain(*segment)->AgreeOnSchedule(a, "third"), "first");
  segment->Leave(a);
  EXPECT_EQ(segment->AgreeOnSchedule(a, "first").status().code(), StatusCode::kAborted);
  EXPECT_EQ(*segment->AgreeOnSchedule(b, "second"), "second");
}

TEST(TextTest, AnotherScheduleOfTheOnlyMemberBeginsAnew) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  EXPECT_EQ(*segment->AgreeOnSchedule(a, ""), "");
  segment->SetTraining(a, true);
  ASSERT_TRUE(segment->TryEndPhase(a, 0));
  EXPECT_EQ(*segment->AgreeOnSchedule(a, ""), "");
  EXPECT_EQ(segment->phase(), 1u);
  EXPECT_EQ(*segment->AgreeOnSchedule(a, "late"), "late");
  EXPECT_EQ(segment->phase(), 0u);
  EXPECT_EQ(segment->Members()[0].phase, 0u);
}

TEST(TextTest, NoticesCountAndReplaceEachOther) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  EXPECT_EQ(segment->LastNotice().number, 0u);
  EXPECT_EQ(segment->LastNotice().text, "");
  const uint32_t seen = segment->changes();
  EXPECT_EQ(*segment->PostNotice(a, std::string("one\0two", 7)), 1u);
  EXPECT_NE(segment->changes(), seen);
  EXPECT_EQ(segment->LastNotice().text, std::string("one\0two", 7));
  for (uint64_t number = 2; number < 7; ++number) {
    const std::string text(number * 700 % 4097, static_cast<char>('a' + number));
    EXPECT_EQ(*segment->PostNotice(number % 2 == 0 ? b : a, text), number);
    const Notice last = MapAgain(*segment)->LastNotice();
    EXPECT_EQ(last.number, number);
    EXPECT_EQ(last.text, text);
  }
  segment->Leave(b);
  EXPECT_EQ(segment->PostNotice(b, "gone").status().code(), StatusCode::kAborted);
  EXPECT_EQ(segment->LastNotice().number, 6u);
}

TEST(TextTest, HaveALimit) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  const std::string longest(kMaxTextBytes, 'x');
  for (const Status& status : {segment->PostNotice(a, longest + "x").status(),
                               segment->AgreeOnSchedule(a, longest + "x").status()}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(WithoutAnchor(status.message()),
              "a text for all workers has 4097 bytes, more than 4096");
  }
  EXPECT_EQ(segment->LastNotice().number, 0u);
  EXPECT_EQ(*segment->PostNotice(a, longest), 1u);
  EXPECT_EQ(segment->LastNotice().text, longest);
  EXPECT_EQ(*segment->AgreeOnSchedule(a, longest), longest);
}

// Each text of one byte, its number's: whatever is read is one that was written.
TEST(TextTest, ReadersSeeWholeNotices) {
  constexpr uint64_t kNotices = 3000;
  Segment* const segment = Make();
  std::vector<pid_t> children;
  for (uint32_t p = 0; p < 2; ++p) {
    children.push_back(Spawn([&, p] {
      Segment* const own = MapAgain(*segment);
      const MemberId member = *own->Join(p);
      uint64_t last = 0;
      for (uint64_t i = 0; i < kNotices; ++i) {
        const auto byte = static_cast<char>('a' + (p * kNotices + i) % 26);
        const Result<uint64_t> number =
            own->PostNotice(member, std::string(1 + (i * 37) % kMaxTextBytes, byte));
        if (!number.ok() || *number <= last) return 1;
        last = *number;
        const Notice notice = own->LastNotice();
        if (notice.number < last || notice.text.empty()) return 2;
        if (notice.text != std::string(notice.text.size(), notice.text[0])) return 3;
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_EQ(segment->LastNotice().number, 2 * kNotices);
}

// Its writer died with the next one half written: the present one is as it was, and the
// next writer overwrites the half.
TEST(TextTest, AHalfWrittenOneIsNotThere) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->PostNotice(a, "whole").ok());
  TextEntry* const notice = &raw.control()->notice;
  notice->texts[0].size_bytes.store(4000);
  std::fill_n(notice->texts[0].bytes, 100, '?');
  EXPECT_EQ(segment->LastNotice().number, 1u);
  EXPECT_EQ(segment->LastNotice().text, "whole");
  EXPECT_EQ(*segment->PostNotice(a, "next"), 2u);
  EXPECT_EQ(segment->LastNotice().text, "next");
}

TEST(TextTest, DamagedNumbersAreReadSafely) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const MemberId a = *segment->Join(0);
  ASSERT_TRUE(segment->Join(1).ok());  // the only member would write a schedule of its own
  for (const uint64_t number : {uint64_t{1}, uint64_t{2}, UINT64_MAX - 1, UINT64_MAX}) {
    for (const uint32_t size : {0u, 1u, 4096u, 4097u, 0x80000000u, UINT32_MAX}) {
      for (TextEntry* const entry : {&raw.control()->notice, &raw.control()->schedule}) {
        entry->number.store(number);
        for (auto& text : entry->texts) text.size_bytes.store(size);
      }
      EXPECT_EQ(segment->LastNotice().number, number);
      EXPECT_EQ(segment->LastNotice().text.size(), std::min(size, kMaxTextBytes));
      EXPECT_EQ(segment->AgreeOnSchedule(a, "s")->size(), std::min(size, kMaxTextBytes));
      EXPECT_TRUE(segment->PostNotice(a, "n").ok());
    }
  }
}

// --- Stopping ----------------------------------------------------------------------

TEST(StopTest, HoldsUntilAMeetingCloses) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0), b = *segment->Join(1);
  EXPECT_FALSE(segment->stop_requested());
  const uint32_t seen = segment->changes();
  segment->RequestStop(b);
  EXPECT_NE(segment->changes(), seen);
  EXPECT_TRUE(segment->stop_requested());
  EXPECT_TRUE(MapAgain(*segment)->stop_requested());
  const uint64_t meeting = segment->Arrive(a);
  EXPECT_FALSE(segment->TryCloseMeeting(meeting));
  EXPECT_TRUE(segment->stop_requested());
  ASSERT_EQ(segment->Arrive(b), meeting);
  ASSERT_TRUE(segment->TryCloseMeeting(meeting));
  EXPECT_FALSE(segment->stop_requested());
  segment->RequestStop(a);  // of the next training
  EXPECT_TRUE(segment->TryCloseMeeting(meeting));
  EXPECT_TRUE(segment->stop_requested());
  segment->Leave(a);
  EXPECT_TRUE(segment->stop_requested());
}

TEST(StopTest, FencedMembersStopNobody) {
  Segment* const segment = Make();
  const MemberId a = *segment->Join(0);
  segment->Leave(a);
  segment->RequestStop(a);
  EXPECT_FALSE(segment->stop_requested());
}

// --- Versions ------------------------------------------------------------------

TEST(VersionTest, WaitsUntilItComes) {
  Segment* const segment = Make();
  EXPECT_EQ(segment->WaitForVersion(0, kLongNanos), 0u);
  EXPECT_EQ(segment->WaitForVersion(1, 0), 0u);
  const int64_t before = MonotonicNanos();
  EXPECT_EQ(segment->WaitForVersion(1, 20'000'000), 0u);
  EXPECT_GE(MonotonicNanos() - before, 10'000'000);
  segment->AdvanceVersion();
  EXPECT_EQ(segment->WaitForVersion(1, kLongNanos), 1u);
}

// A pair of processes that answer each other: with a lost wakeup it would take minutes.
TEST(VersionTest, ProcessesWakeEachOther) {
  constexpr uint64_t kRounds = 2000;
  Segment* const segment = Make();
  std::vector<pid_t> children;
  const int64_t before = MonotonicNanos();
  for (uint64_t side = 0; side < 2; ++side) {
    children.push_back(Spawn([&, side] {
      Segment* const own = MapAgain(*segment);
      for (uint64_t round = side; round < kRounds; round += 2) {
        const Deadline deadline = Long();
        while (own->WaitForVersion(round, kLongNanos) < round) {
          if (deadline.Expired()) return 1;
        }
        if (own->version() != round) return 2;
        own->AdvanceVersion();
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(WaitExit(child), 0);
  EXPECT_EQ(segment->version(), kRounds);
  EXPECT_LT(MonotonicNanos() - before, 30 * kNanosPerSecond);
}

TEST(VersionTest, KilledWaiterHoldsUpNobody) {
  Segment* const segment = Make();
  const RawSegment raw(segment->fd());
  const pid_t child = Spawn([&] {
    MapAgain(*segment)->WaitForVersion(100, kLongNanos);
    return 0;
  });
  ASSERT_TRUE(WaitUntil([&] { return raw.control()->version_waiters.load() == 1; }));
  Kill(child);
  segment->AdvanceVersion();
  EXPECT_EQ(segment->WaitForVersion(1, kLongNanos), 1u);
}

}  // namespace
}  // namespace tf_smb
