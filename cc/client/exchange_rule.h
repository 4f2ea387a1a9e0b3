// ExchangeRule: how a worker's weights and the center meet. Single-threaded: the
// AttachedSegment that owns one calls it under its own exchange lock.
#ifndef TF_SMB_CC_CLIENT_EXCHANGE_RULE_H_
#define TF_SMB_CC_CLIENT_EXCHANGE_RULE_H_

#include <cstdint>
#include <string>

#include "cc/box/exchange_kernel.h"
#include "cc/common/status.h"

namespace tf_smb {

struct ExchangeRule {
  MoveKind kind = MoveKind::kElastic;  // kElastic or kDelta
  // The rate of the move is `rate` itself, or, with `per_worker`, `rate` divided by
  // the number of live workers.
  double rate = 0.9;
  bool per_worker = true;
  // False, for kElastic only: the whole center is read first, and added to later, as in
  // the papers (SEASGD). Others may move it in between.
  bool atomic = true;
  // All workers together, in rounds: the center becomes the mean of their weights, and so do
  // these. `kind`, `rate`, `per_worker` and `atomic` are not looked at.
  bool synchronous = false;

  // INVALID_ARGUMENT with the accepted range.
  Status Check() const;
  // The same for the same rule.
  std::string ToString() const;
};

// Which move a worker makes next. A worker alone copies its weights into the
// center, so training alone costs nothing in quality; when the others have gone it
// first meets the center they left behind.
class MoveChooser {
 public:
  // `others_moved`: somebody changed the center since this worker's last exchange,
  // and may have gone again.
  Move Next(const ExchangeRule& rule, uint32_t num_live, bool others_moved, MoveOutput output);

 private:
  bool had_company_ = false;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_EXCHANGE_RULE_H_
