#include "cc/client/exchange_rule.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace tf_smb {

Status ExchangeRule::Check() const {
  if (kind != MoveKind::kElastic && kind != MoveKind::kDelta) {
    return InvalidArgumentError("an exchange rule is elastic or delta averaging");
  }
  const float highest = kind == MoveKind::kElastic ? 1.0f : 2.0f;
  if (std::isfinite(rate) && rate > 0.0f && rate <= highest) return Status::Ok();
  return InvalidArgumentError("the rate of this exchange rule must be above 0 and at most " +
                              std::to_string(static_cast<int>(highest)) + ", got " +
                              std::to_string(rate));
}

Move MoveChooser::Next(const ExchangeRule& rule, uint32_t num_live, bool others_moved,
                       MoveOutput output) {
  had_company_ = had_company_ || others_moved || num_live > 1;
  if (num_live > 1) {
    const float rate =
        rule.per_worker ? rule.rate / static_cast<float>(num_live) : rule.rate;
    return {rule.kind, rate, output};
  }
  if (!had_company_) return {MoveKind::kCopy, 1.0f, output};
  // Last of several: take over what the center knows, once, before copying into it.
  had_company_ = false;
  return {rule.kind, rule.kind == MoveKind::kElastic ? 0.5f : 1.0f, output};
}

}  // namespace tf_smb
