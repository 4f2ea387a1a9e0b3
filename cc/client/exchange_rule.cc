#include "cc/client/exchange_rule.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace tf_smb {

Status ExchangeRule::Check() const {
  if (synchronous) return Status::Ok();
  if (kind != MoveKind::kElastic && kind != MoveKind::kDelta) {
    return InvalidArgumentError("an exchange rule is elastic or delta averaging [SMB-E189]");
  }
  if (!atomic && kind != MoveKind::kElastic) {
    return InvalidArgumentError("only elastic averaging can read first and add later [SMB-E190]");
  }
  const double highest = kind == MoveKind::kElastic ? 1.0 : 2.0;
  if (std::isfinite(rate) && rate > 0.0 && rate <= highest) return Status::Ok();
  return InvalidArgumentError("the rate of this exchange rule must be above 0 and at most " +
                              std::to_string(static_cast<int>(highest)) + ", got " +
                              std::to_string(rate) + " [SMB-E191]");
}

std::string ExchangeRule::ToString() const {
  if (synchronous) return "rounds";
  char digits[32];  // the fewest that tell the rate from any other
  for (int precision = 1; precision <= 17; ++precision) {
    std::snprintf(digits, sizeof(digits), "%.*g", precision, rate);
    if (std::strtod(digits, nullptr) == rate) break;
  }
  std::string text = kind == MoveKind::kDelta ? "delta" : "elastic";
  if (!atomic) text += " (read, then accumulate)";
  return text + " at " + digits + (per_worker ? " / workers" : "");
}

Move MoveChooser::Next(const ExchangeRule& rule, uint32_t num_live, bool others_moved,
                       MoveOutput output) {
  had_company_ = had_company_ || others_moved || num_live > 1;
  if (num_live > 1) {
    return {rule.kind, rule.per_worker ? rule.rate / num_live : rule.rate, output};
  }
  if (!had_company_) return {MoveKind::kCopy, 1.0, output};
  // Last of several: take over what the center knows, once, before copying into it.
  had_company_ = false;
  return {rule.kind, rule.kind == MoveKind::kElastic ? 0.5 : 1.0, output};
}

}  // namespace tf_smb
