#include "cc/client/exchange_rule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace tf_smb {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(ExchangeRuleTest, RangeDependsOnKind) {
  for (const float rate : {std::numeric_limits<float>::denorm_min(), 0.5f, 1.0f}) {
    EXPECT_TRUE((ExchangeRule{MoveKind::kElastic, rate, true}.Check().ok()));
    EXPECT_TRUE((ExchangeRule{MoveKind::kDelta, rate, false}.Check().ok()));
  }
  EXPECT_TRUE((ExchangeRule{MoveKind::kDelta, 2.0f, true}.Check().ok()));
  for (const float rate : {0.0f, -0.5f, std::nextafter(1.0f, 2.0f), kNaN, kInf, -kInf}) {
    const Status status = ExchangeRule{MoveKind::kElastic, rate, true}.Check();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << rate;
    EXPECT_NE(status.message().find("above 0 and at most 1"), std::string::npos);
  }
  for (const float rate : {0.0f, -0.5f, std::nextafter(2.0f, 3.0f), kNaN, kInf}) {
    EXPECT_FALSE((ExchangeRule{MoveKind::kDelta, rate, true}.Check().ok())) << rate;
  }
  EXPECT_FALSE((ExchangeRule{MoveKind::kCopy, 0.5f, true}.Check().ok()));
}

TEST(MoveChooserTest, AloneCopies) {
  MoveChooser chooser;
  for (int i = 0; i < 3; ++i) {
    const Move move = chooser.Next({MoveKind::kDelta, 1.0f, true}, 1, false, MoveOutput::kDelta);
    EXPECT_EQ(move.kind, MoveKind::kCopy);
    EXPECT_EQ(move.output, MoveOutput::kDelta);
  }
}

TEST(MoveChooserTest, RateFollowsTheLiveWorkers) {
  MoveChooser chooser;
  const ExchangeRule per_worker{MoveKind::kElastic, 0.9f, true};
  for (const uint32_t live : {2u, 5u, 16u, 3u}) {
    const Move move = chooser.Next(per_worker, live, false, MoveOutput::kValue);
    EXPECT_EQ(move.kind, MoveKind::kElastic);
    EXPECT_EQ(move.rate, 0.9f / static_cast<float>(live));
    EXPECT_EQ(move.output, MoveOutput::kValue);
  }
  EXPECT_EQ(chooser.Next({MoveKind::kElastic, 0.25f, false}, 7, false, MoveOutput::kValue).rate, 0.25f);
}

TEST(MoveChooserTest, LastOfSeveralMeetsTheCenterOnce) {
  for (const auto& [kind, rate] : {std::pair{MoveKind::kElastic, 0.5f}, {MoveKind::kDelta, 1.0f}}) {
    MoveChooser chooser;
    const ExchangeRule rule{kind, 0.75f, true};
    for (int life = 0; life < 2; ++life) {  // company may come again
      EXPECT_EQ(chooser.Next(rule, 2, false, MoveOutput::kValue).rate, 0.375f);
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
  const ExchangeRule rule = {MoveKind::kElastic, 0.9f, true};
  EXPECT_EQ(chooser.Next(rule, 1, false, MoveOutput::kValue).kind, MoveKind::kCopy);
  EXPECT_EQ(chooser.Next(rule, 1, true, MoveOutput::kValue).rate, 0.5f);
  EXPECT_EQ(chooser.Next(rule, 1, false, MoveOutput::kValue).kind, MoveKind::kCopy);
}

}  // namespace
}  // namespace tf_smb
