#pragma once

#include <lockstep/serialization/state_dict.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep {

/// The part of the checkpoint that is the same on all ranks.
struct TrainerCore::SharedPart {
  TrainerCore& core;

  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);
};

/// And what each rank has for itself.
struct TrainerCore::RankPart {
  TrainerCore& core;

  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);
};

}  // namespace lockstep
