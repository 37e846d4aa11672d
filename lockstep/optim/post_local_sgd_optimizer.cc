#include <utility>

#include <ATen/core/ivalue_inl.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <lockstep/base/log.h>
#include <lockstep/optim/internal/sync_options.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>

namespace lockstep {

using internal::sync_options;

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

}  // namespace

PostLocalSGDOptimizer::PostLocalSGDOptimizer(std::unique_ptr<Optimizer> optim,
                                             std::shared_ptr<ModelAverager> averager)
    : Optimizer(std::vector<OptimizerParamGroup>{}, nullptr),
      optim_(std::move(optim)),
      averager_(std::move(averager)) {
  TORCH_CHECK_VALUE(optim_ && averager_, "PostLocalSGDOptimizer needs an optimizer and a model averager");
  defaults_ = optim_->defaults().clone();
  for (const auto& group : optim_->param_groups()) param_groups_.push_back(group);
}

at::Tensor PostLocalSGDOptimizer::step(LossClosure closure) {
  sync_options(*this, *optim_);
  at::Tensor loss = optim_->step(std::move(closure));
  sync_options(*optim_, *this);
  averager_->average_parameters(param_groups_);
  return loss;
}

void PostLocalSGDOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  optim_->add_param_group(param_group);
  param_groups_.push_back(optim_->param_groups().back());
}

void PostLocalSGDOptimizer::save(torch::serialize::OutputArchive& archive) const {
  sync_options(*this, *optim_);
  optim_->save(archive);
  archive.write("step", c10::IValue(averager_->step()));
}

void PostLocalSGDOptimizer::load(torch::serialize::InputArchive& archive) {
  optim_->load(archive);
  sync_options(*optim_, *this);
  c10::IValue step;
  if (archive.try_read("step", step)) {
    averager_->set_step(step.toInt());
  } else {
    LOCKSTEP_LOG(kWarning) << "Loaded state dict does not contain a step counter for an averager. Setting "
                              "step counter to 0.";
    averager_->set_step(0);
  }
}

}  // namespace lockstep
