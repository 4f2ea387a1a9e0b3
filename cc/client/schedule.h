// Schedule: by which rule, and how often, a worker exchanges, phase after phase.
#ifndef TF_SMB_CC_CLIENT_SCHEDULE_H_
#define TF_SMB_CC_CLIENT_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc/client/exchange_rule.h"
#include "cc/common/status.h"

namespace tf_smb {

constexpr uint64_t kMaxPeriod = 1000000000;
constexpr size_t kMaxPhases = 64;

enum class ScheduleUnit { kSteps, kEpochs };

struct Phase {
  uint64_t begin = 0;  // in the schedule's unit
  ExchangeRule rule;
  uint64_t period = 1;  // local steps between two exchanges
};

// INVALID_ARGUMENT with the accepted range.
Status CheckPeriod(uint64_t period);

// Immutable.
class Schedule {
 public:
  // INVALID_ARGUMENT unless the first phase begins at 0, each other one after the one
  // before, and rules and periods are in range.
  static Result<Schedule> Create(std::vector<Phase> phases, ScheduleUnit unit);

  const std::vector<Phase>& phases() const { return phases_; }
  ScheduleUnit unit() const { return unit_; }
  // The phase that a worker belongs to that has come to `position`, by itself.
  uint64_t PhaseAt(uint64_t position) const;
  // Whether a worker at `position` ends `phase`: the next one begins at or before it.
  bool EndsPhase(uint64_t phase, uint64_t position) const;
  // One line, the same for the same schedule: what workers compare.
  std::string ToString() const;

 private:
  Schedule(std::vector<Phase> phases, ScheduleUnit unit);

  std::vector<Phase> phases_;
  ScheduleUnit unit_;
};

}  // namespace tf_smb

#endif  // TF_SMB_CC_CLIENT_SCHEDULE_H_
