#pragma once

#include <memory>

#include <lockstep/base/training/training_phases.h>

namespace lockstep::testing {

/// Hears, for its life, the phases that this process tells of.
class ToldPhases {
 public:
  ToldPhases() {
    audience_->board = std::make_shared<PhaseBoard>();
    begin_telling_phases(audience_);
  }
  ToldPhases(const ToldPhases&) = delete;
  ToldPhases& operator=(const ToldPhases&) = delete;
  ~ToldPhases() { end_telling_phases(audience_); }

  PhaseBoard& board() const { return *audience_->board; }
  TrainingPhase phase() const { return static_cast<TrainingPhase>(board().phase.load()); }

 private:
  const std::shared_ptr<PhaseAudience> audience_ = std::make_shared<PhaseAudience>();
};

}  // namespace lockstep::testing
