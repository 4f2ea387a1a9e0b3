#include "cc/client/schedule.h"

#include <utility>

namespace tf_smb {
namespace {

Status CheckPhase(const Phase& phase, uint64_t earliest) {
  if (phase.begin < earliest) {
    return InvalidArgumentError("this phase of a schedule must begin at " +
                                std::to_string(earliest) +
                                " or later, after the one before it, got " +
                                std::to_string(phase.begin) + " [SMB-E193]");
  }
  TF_SMB_RETURN_IF_ERROR(phase.rule.Check());
  return CheckPeriod(phase.period);
}

}  // namespace

Status CheckPeriod(uint64_t period) {
  if (period >= 1 && period <= kMaxPeriod) return Status::Ok();
  return InvalidArgumentError("a communication period must be 1 to " +
                              std::to_string(kMaxPeriod) + " steps, got " +
                              std::to_string(period) + " [SMB-E194]");
}

Schedule::Schedule(std::vector<Phase> phases, ScheduleUnit unit)
    : phases_(std::move(phases)), unit_(unit) {}

Result<Schedule> Schedule::Create(std::vector<Phase> phases, ScheduleUnit unit) {
  if (phases.empty() || phases.size() > kMaxPhases) {
    return InvalidArgumentError("a schedule has 1 to " + std::to_string(kMaxPhases) +
                                " phases, got " + std::to_string(phases.size()) + " [SMB-E195]");
  }
  if (phases.front().begin != 0) {
    return InvalidArgumentError("the first phase of a schedule begins at 0, got " +
                                std::to_string(phases.front().begin) + " [SMB-E196]");
  }
  uint64_t earliest = 0;
  for (const Phase& phase : phases) {
    TF_SMB_RETURN_IF_ERROR(CheckPhase(phase, earliest));
    earliest = phase.begin + 1;
  }
  return Schedule(std::move(phases), unit);
}

uint64_t Schedule::PhaseAt(uint64_t position) const {
  uint64_t phase = 0;
  while (EndsPhase(phase, position)) ++phase;
  return phase;
}

bool Schedule::EndsPhase(uint64_t phase, uint64_t position) const {
  return phase + 1 < phases_.size() && phases_[phase + 1].begin <= position;
}

std::string Schedule::ToString() const {
  std::string text = unit_ == ScheduleUnit::kSteps ? "by steps: " : "by epochs: ";
  for (const Phase& phase : phases_) {
    if (phase.begin > 0) text += "; ";
    text += "from " + std::to_string(phase.begin) + " " + phase.rule.ToString() + " every " +
            std::to_string(phase.period);
  }
  return text;
}

}  // namespace tf_smb
