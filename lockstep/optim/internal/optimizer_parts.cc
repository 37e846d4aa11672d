#include <c10/util/Exception.h>

#include <lockstep/optim/internal/optimizer_parts.h>
#include <lockstep/optim/internal/sync_options.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>

namespace lockstep::internal {

OptimizerParts::OptimizerParts(torch::optim::Optimizer& optimizer) {
  add(optimizer, /*whole=*/false);
}

OptimizerParts OptimizerParts::consolidated(torch::optim::Optimizer& optimizer) {
  OptimizerParts parts;
  parts.add(optimizer, /*whole=*/true);
  return parts;
}

void OptimizerParts::add(torch::optim::Optimizer& optimizer, bool whole) {
  optimizers_.push_back(&optimizer);
  if (auto* post_local = dynamic_cast<PostLocalSGDOptimizer*>(&optimizer)) {
    averager_ = post_local->averager_.get();
    return add(*post_local->optim_, whole);
  }
  if (auto* zero = dynamic_cast<ZeroRedundancyOptimizer*>(&optimizer)) {
    zero_ = zero;
    zero->check_groups_are_known();
    if (!whole) {
      optimizers_.push_back(zero->local_.get());
      return find_keys(*zero);
    }
    TORCH_CHECK(zero->consolidated_,
                "Optimizer state has not been consolidated on this rank. Please call "
                "`consolidate_state_dict(to=",
                zero->rank_, ")` on all ranks beforehand if you meant to save the global state.");
    sync_options(*zero, *zero->consolidated_);
    optimizers_.push_back(zero->consolidated_.get());
  }
  for (const auto& group : optimizer.param_groups()) {
    auto& keys = keys_.emplace_back();
    for (const at::Tensor& parameter : group.params()) keys.push_back(parameter.unsafeGetTensorImpl());
  }
}

/// The local optimizer's groups hold this rank's parameters, or aliases of them, in the partition's order.
void OptimizerParts::find_keys(const ZeroRedundancyOptimizer& zero) {
  const auto& mine = zero.partition_[static_cast<size_t>(zero.rank_)];
  for (size_t group = 0; group < zero.param_groups().size(); ++group) {
    auto& keys = keys_.emplace_back(zero.param_groups()[group].params().size(), nullptr);
    const auto& parameters = zero.local_->param_groups()[group].params();
    for (size_t i = 0; i < mine[group].size(); ++i) {
      keys[mine[group][i]] = parameters[i].unsafeGetTensorImpl();
    }
  }
}

void OptimizerParts::forget_consolidated() const {
  if (zero_) zero_->consolidated_.reset();
}

}  // namespace lockstep::internal
