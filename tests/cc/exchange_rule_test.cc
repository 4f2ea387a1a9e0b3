#include "cc/client/exchange_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tf_smb {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(ExchangeRuleTest, RangeDependsOnKind) {
  for (const double rate : {std::numeric_limits<double>::denorm_min(), 0.5, 1.0}) {
    EXPECT_TRUE((ExchangeRule{MoveKind::kElastic, rate, true}.Check().ok()));
    EXPECT_TRUE((ExchangeRule{MoveKind::kDelta, rate, false}.Check().ok()));
  }
  EXPECT_TRUE((ExchangeRule{MoveKind::kDelta, 2.0, true}.Check().ok()));
  for (const double rate : {0.0, -0.5, std::nextafter(1.0, 2.0), kNaN, kInf, -kInf}) {
    const Status status = ExchangeRule{MoveKind::kElastic, rate, true}.Check();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << rate;
    EXPECT_NE(status.message().find("above 0 and at most 1"), std::string::npos);
  }
  for (const double rate : {0.0, -0.5, std::nextafter(2.0, 3.0), kNaN, kInf}) {
    EXPECT_FALSE((ExchangeRule{MoveKind::kDelta, rate, true}.Check().ok())) << rate;
  }
  for (const MoveKind kind : {MoveKind::kCopy, MoveKind::kAccumulate, MoveKind::kBlend}) {
    EXPECT_FALSE((ExchangeRule{kind, 0.5, true}.Check().ok()));
  }
}

TEST(ExchangeRuleTest, OnlyElasticReadsFirst) {
  EXPECT_TRUE((ExchangeRule{MoveKind::kElastic, 0.5, true, false}.Check().ok()));
  const Status status = ExchangeRule{MoveKind::kDelta, 0.5, true, false}.Check();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("only elastic"), std::string::npos);
}

TEST(ExchangeRuleTest, RoundsLookAtNothingElse) {
  EXPECT_TRUE((ExchangeRule{MoveKind::kCopy, kNaN, true, false, true}.Check().ok()));
}

TEST(ExchangeRuleTest, Words) {
  EXPECT_EQ((ExchangeRule{MoveKind::kElastic, 0.9, true}.ToString()), "elastic at 0.9 / workers");
  EXPECT_EQ((ExchangeRule{MoveKind::kDelta, 1.0, false}.ToString()), "delta at 1");
  EXPECT_EQ((ExchangeRule{MoveKind::kElastic, 0.1 + 0.2, false, false}.ToString()),
            "elastic (read, then accumulate) at 0.30000000000000004");
  EXPECT_EQ((ExchangeRule{MoveKind::kDelta, 2.0, true, true, true}.ToString()), "rounds");
}

TEST(MoveChooserTest, AloneCopies) {
  MoveChooser chooser;
  for (int i = 0; i < 3; ++i) {
    const Move move = chooser.Next({MoveKind::kDelta, 1.0, true}, 1, false, MoveOutput::kDelta);
    EXPECT_EQ(move.kind, MoveKind::kCopy);
    EXPECT_EQ(move.output, MoveOutput::kDelta);
  }
}

TEST(MoveChooserTest, RateFollowsTheLiveWorkers) {
  MoveChooser chooser;
  const ExchangeRule per_worker{MoveKind::kElastic, 0.9, true};
  for (const uint32_t live : {2u, 5u, 16u, 3u}) {
    const Move move = chooser.Next(per_worker, live, false, MoveOutput::kValue);
    EXPECT_EQ(move.kind, MoveKind::kElastic);
    EXPECT_EQ(move.rate, 0.9 / live);
    EXPECT_EQ(move.output, MoveOutput::kValue);
  }
  const ExchangeRule quarter = {MoveKind::kElastic, 0.25, false};
  EXPECT_EQ(chooser.Next(quarter, 7, false, MoveOutput::kValue).rate, 0.25);
}

TEST(MoveChooserTest, LastOfSeveralMeetsTheCenterOnce) {
  for (const auto& [kind, rate] : {std::pair{MoveKind::kElastic, 0.5}, {MoveKind::kDelta, 1.0}}) {
    MoveChooser chooser;
    const ExchangeRule rule{kind, 0.75, true};
    for (int life = 0; life < 2; ++life) {  // company may come again
      EXPECT_EQ(chooser.Next(rule, 2, false, MoveOutput::kValue).rate, 0.375);
      const Move last = chooser.Next(rule, 1, false, MoveOutput::kValue);
      EXPECT_EQ(last.kind, kind);
      EXPECT_EQ(last.rate, rate);
      EXPECT_EQ(chooser.Next(rule, 1, false, MoveOutput::kValue).kind, MoveKind::kCopy);
      EXPECT_EQ(chooser.Next(rule, 1, false, MoveOutput::kValue).kind, MoveKind::kCopy);
    }
  }
}

// Others may have come, exchanged and died between two exchanges of this worker.
TEST(MoveChooserTest, AloneAgainAfterOthersMovedTakesOverTheCenterFirst) {
  MoveChooser chooser;
  const ExchangeRule rule = {MoveKind::kElastic, 0.9, true};
  EXPECT_EQ(chooser.Next(rule, 1, false, MoveOutput::kValue).kind, MoveKind::kCopy);
  EXPECT_EQ(chooser.Next(rule, 1, true, MoveOutput::kValue).rate, 0.5);
  EXPECT_EQ(chooser.Next(rule, 1, false, MoveOutput::kValue).kind, MoveKind::kCopy);
}

}  // namespace
}  // namespace tf_smb
