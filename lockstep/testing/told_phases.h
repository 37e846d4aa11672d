#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/record_function.h>
#include <torch/torch.h>

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
  /// In which `run` begins operators, in this thread.
  std::vector<TrainingPhase> of_operators(const std::function<void()>& run) const {
    static thread_local std::function<void()> on_operator;
    std::vector<TrainingPhase> phases;
    on_operator = [&] { phases.push_back(phase()); };
    const auto begin = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
      on_operator();
      return nullptr;
    };
    const auto handle =
        at::addThreadLocalCallback(at::RecordFunctionCallback(begin).scopes({at::RecordScope::FUNCTION}));
    run();
    at::removeCallback(handle);
    return phases;
  }

 private:
  const std::shared_ptr<PhaseAudience> audience_ = std::make_shared<PhaseAudience>();
};

/// A module that notes in which phase its forward runs. `told` lives longer.
struct PhaseNoting : torch::nn::Module {
  explicit PhaseNoting(const ToldPhases& told) : told(told) {}
  torch::Tensor forward(const torch::Tensor& x) {
    phases.push_back(told.phase());
    return layer(x).tanh();
  }
  const ToldPhases& told;
  std::vector<TrainingPhase> phases;
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(4, 3));
};

}  // namespace lockstep::testing
