#pragma once

#include <torch/optim/optimizer.h>

namespace lockstep::internal {

/// Gives each parameter group of `to` the options of the same group of `from`: a learning rate that a
/// scheduler has set, for instance. torch's ZeroRedundancyOptimizer._sync_param_groups.
inline void sync_options(const torch::optim::Optimizer& from, torch::optim::Optimizer& to) {
  TORCH_INTERNAL_ASSERT(from.param_groups().size() == to.param_groups().size(),
                        "Mismatch between number of source and destination parameter groups");
  for (size_t group = 0; group < from.param_groups().size(); ++group) {
    to.param_groups()[group].set_options(from.param_groups()[group].options().clone());
  }
}

}  // namespace lockstep::internal
