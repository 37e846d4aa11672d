#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <c10/core/TensorImpl.h>
#include <torch/optim/optimizer.h>

namespace lockstep::internal {

/// What Python's schedulers write into an optimizer's param_groups beside its options, for each group, and
/// LibTorch's groups have no room for. All schedulers of one optimizer share it, so that the second one knows
/// the learning rates that the first one found. It lives as long as one of them.
class ScheduledGroups {
 public:
  struct Group {
    std::optional<double> initial_lr, max_lr, min_lr, max_momentum, base_momentum, swa_lr;
  };

  /// The one of this optimizer, with as many groups as it has now. Thread-safe.
  static std::shared_ptr<ScheduledGroups> of(torch::optim::Optimizer& optimizer);
  ~ScheduledGroups();
  ScheduledGroups(const ScheduledGroups&) = delete;
  ScheduledGroups& operator=(const ScheduledGroups&) = delete;

  std::vector<Group>& groups() { return groups_; }
  /// Whether a parameter was written since the first scheduler was made, as far as that can be seen; true for
  /// optimizers whose steps can't. Python marks optimizer.step() as called; LibTorch's can't be watched, so
  /// what it does is the sign.
  bool optimizer_has_stepped();

 private:
  explicit ScheduledGroups(torch::optim::Optimizer& optimizer);

  torch::optim::Optimizer& optimizer_;
  std::vector<Group> groups_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> versions_;  // of the parameters, at first
  bool stepped_;
};

}  // namespace lockstep::internal
