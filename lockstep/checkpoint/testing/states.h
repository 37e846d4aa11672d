#pragma once

#include <torch/torch.h>

#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/testing/values.h>

namespace lockstep::testing {

/// A small model's state, of numbers that depend on `seed`.
inline StateDict model_state(double seed, int64_t width = 4) {
  return {{"fc1.weight", torch::arange(3 * width, at::kFloat).view({3, width}) + seed},
          {"fc1.bias", torch::arange(3, at::kDouble) * seed},
          {"bn.num_batches_tracked", torch::tensor(static_cast<int64_t>(seed))}};
}

inline StateDict training_state(double seed, int64_t width = 4) {
  return {{"model", to_object(model_state(seed, width))},
          {"scheduler", to_object(StateDict{{"last_lr", 0.1 * seed}})}};
}

/// What save() and restore() take.
struct StateHolder {
  StateDict state = training_state(1);
  StateDict own;
  StateDict state_dict() const { return state; }
  StateDict rank_state_dict() const { return own; }
  void load_state_dict(const StateDict& from) { state = from; }
  void load_rank_state_dict(const StateDict& from) { own = from; }
};

}  // namespace lockstep::testing
