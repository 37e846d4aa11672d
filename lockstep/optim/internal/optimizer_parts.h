#pragma once

#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/optim/model_averaging.h>

namespace lockstep {
class ZeroRedundancyOptimizer;
}

namespace lockstep::internal {

/// Where an optimizer keeps what belongs into a checkpoint: in itself, or in the optimizers that it contains
/// (ZeroRedundancyOptimizer, PostLocalSGDOptimizer). Refers to the optimizer.
class OptimizerParts {
 public:
  explicit OptimizerParts(torch::optim::Optimizer& optimizer);
  /// The same of the whole state of a ZeroRedundancyOptimizer, as it was consolidated to this rank. Throws
  /// c10::Error, with torch's text, where it was not.
  static OptimizerParts consolidated(torch::optim::Optimizer& optimizer);

  /// The one whose state() is the state.
  torch::optim::Optimizer& local() const { return *optimizers_.back(); }
  /// The one that the user has; its groups have all parameters.
  torch::optim::Optimizer& outer() const { return *optimizers_.front(); }
  /// All that hold options: each has the same groups.
  const std::vector<torch::optim::Optimizer*>& optimizers() const { return optimizers_; }
  /// By group and index: the parameter's key in local().state(), null where the state is another rank's.
  const std::vector<std::vector<void*>>& keys() const { return keys_; }
  /// Null if there is none.
  ModelAverager* averager() const { return averager_; }
  /// To be called when the state has been changed.
  void forget_consolidated() const;

 private:
  OptimizerParts() = default;
  void add(torch::optim::Optimizer& optimizer, bool whole);
  void find_keys(const ZeroRedundancyOptimizer& zero);

  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<std::vector<void*>> keys_;
  ModelAverager* averager_ = nullptr;
  ZeroRedundancyOptimizer* zero_ = nullptr;
};

}  // namespace lockstep::internal
