#include <unordered_set>

#include <torch/nn/modules/batchnorm.h>

#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/optim/update_bn.h>

namespace lockstep::swa_utils::internal {
namespace {

/// Starts the layer's statistics anew if it is a `Norm`.
template <class Norm>
void recount(torch::nn::Module& layer, std::vector<std::function<void()>>& restore) {
  auto* norm = dynamic_cast<Norm*>(&layer);
  if (!norm) return;
  norm->reset_running_stats();
  restore.push_back([norm, momentum = norm->options.momentum()] { norm->options.momentum(momentum); });
  norm->options.momentum(std::nullopt);
}

}  // namespace

BatchNormRecount::BatchNormRecount(torch::nn::Module& model)
    : model_(model), was_training_(model.is_training()) {
  using namespace torch::nn;
  std::unordered_set<const Module*> seen;  // a layer may have several names
  const auto visit = [&](Module& layer) {
    if (!seen.insert(&layer).second) return;
    recount<BatchNorm1dImpl>(layer, restore_);
    recount<BatchNorm2dImpl>(layer, restore_);
    recount<BatchNorm3dImpl>(layer, restore_);
    recount<SyncBatchNormImpl>(layer, restore_);
  };
  visit(model);
  for (const auto& layer : model.modules(/*include_self=*/false)) visit(*layer);
  if (!restore_.empty()) model_.train();
}

BatchNormRecount::~BatchNormRecount() {
  if (restore_.empty()) return;
  for (const auto& restore : restore_) restore();
  model_.train(was_training_);
}

}  // namespace lockstep::swa_utils::internal
