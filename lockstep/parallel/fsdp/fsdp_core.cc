#include <exception>
#include <malloc.h>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/record_function.h>
#include <torch/optim/optimizer.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/nn/current_backward.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/class_name.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_units.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>
#include <lockstep/parallel/fsdp/internal/offloaded_tensors.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

// What happens around forward, backward and step.
namespace lockstep {

using fsdp::internal::count_ranks;
using fsdp::internal::kClass;
using fsdp::internal::OffloadedTensors;
using fsdp::internal::ShardedWeight;
using fsdp::internal::ShardedWeights;
using fsdp::internal::WeightWindows;

namespace {

/// Whose forward this thread runs.
thread_local const FsdpCore* in_forward = nullptr;

}  // namespace

FsdpCore::~FsdpCore() = default;

void FsdpCore::check_usable() const {
  if (units_) units_->rethrow_failure();
  reduction_->check_ended();
}

void FsdpCore::run_forward(const std::function<void()>& forward) {
  check_usable();
  // Within backward it is computed again (activation checkpoints), which is no forward of its own.
  if (at::GradMode::is_enabled() && !is_in_backward()) {
    const int64_t reduced = reduction_->reduced();
    if (marked_.exchange(reduced) != reduced) {
      mark_step(StepMark::kForward, this);
    } else {
      enter_phase(TrainingPhase::kForward);  // of gradients that are accumulated
    }
  }
  RECORD_USER_SCOPE("FullyShardedDataParallel.forward");
  const WeightWindows::Reading reading(*windows_);
  weights_->check_in_place();
  struct Within {
    const FsdpCore* const before;
    explicit Within(const FsdpCore* core) : before(std::exchange(in_forward, core)) {}
    ~Within() { in_forward = before; }
  } within(this);
  units_ ? units_->run_forward(forward) : forward();
}

void FsdpCore::run_forward_of_part(const std::function<void()>& forward) {
  // Within backward too: what is computed again there (activation checkpoints) is no forward of its own.
  const bool is_within = in_forward == this || is_in_backward();
  is_within ? forward() : run_forward(forward);
}

void FsdpCore::enter_no_sync() {
  ++no_sync_depth_;
  reduction_->set_synchronising(false);
}
void FsdpCore::leave_no_sync() {
  --no_sync_depth_;
  reduction_->set_synchronising(no_sync_depth_ == 0);
}

void FsdpCore::drop_sums() {
  for (size_t i = 0; i < weights_->all().size(); ++i) reduction_->drop_sum(i);
}

void FsdpCore::drop_sums(const torch::optim::Optimizer& optimizer) {
  std::unordered_set<const c10::TensorImpl*> optimized;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) optimized.insert(parameter.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < weights_->all().size(); ++i) {
    if (optimized.contains(weights_->all()[i].shard.unsafeGetTensorImpl())) reduction_->drop_sum(i);
  }
}

/// This rank's part of what the ranks have together, each once, and what it has for itself.
void FsdpCore::tell(HeldTensors& held) const {
  for (const auto& [name, leaf] : parameters_) held.add(leaf);
  for (const ShardedWeight& weight : weights_->all()) {
    held.parameters.push_back(weight.published);
    held.gradients.push_back(weight.parameter.grad());  // what has added up under no_sync()
  }
  reduction_->tell(held);
}

ModelTensors FsdpCore::leaves_as_model() const {
  return {.name = model_.name, .parameters = parameters_, .buffers = {}};
}

void FsdpCore::write(const std::function<void()>& change, const std::function<void()>& check) {
  const auto close_and_check = [&] {
    if (units_) units_->close();
    check();
  };
  groups_->spread_failures([&] { windows_->write(close_and_check, [&] { weights_->write(change); }); });
}

void FsdpCore::step(torch::optim::Optimizer& optimizer, const std::function<void()>& update) {
  write([&] {
    if (!offloaded_ || state_is_offloaded(optimizer)) return update();
    step_one_by_one(optimizer, update);
  });
}

/// Of all parameters that get a step now.
bool FsdpCore::state_is_offloaded(const torch::optim::Optimizer& optimizer) const {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) return false;
      for (const at::Tensor& tensor : fsdp::internal::tensors_of(*state->second)) {
        if (tensor.defined() && tensor.numel() > 0 && !OffloadedTensors::has(tensor)) return false;
      }
    }
  }
  return true;
}

void FsdpCore::offload_state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (state == optimizer.state().end()) return;
  for (const at::Tensor& tensor : fsdp::internal::tensors_of(*state->second)) offloaded_->take(tensor);
}

/// So that the new state of one parameter alone is in memory. These optimizers pass over parameters without gradients.
void FsdpCore::step_one_by_one(torch::optim::Optimizer& optimizer, const std::function<void()>& update) {
  struct Hidden {
    std::vector<std::pair<at::Tensor, at::Tensor>> gradients = {};
    ~Hidden() {
      for (auto& [parameter, gradient] : gradients) parameter.mutable_grad() = gradient;
    }
  } hidden;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      hidden.gradients.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad() = at::Tensor();
    }
  }
  for (auto& [parameter, gradient] : hidden.gradients) {
    parameter.mutable_grad() = gradient;
    update();
    parameter.mutable_grad() = at::Tensor();
    offload_state(optimizer, parameter);
    ::malloc_trim(0);  // what the state was in stays in the heap otherwise, between blocks that are in use
  }
  // Some have state before they have a gradient.
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) offload_state(optimizer, parameter);
  }
}

/// A weight counts once, on however many ranks it has rows.
at::Tensor FsdpCore::count_nonzero_gradients() const {
  const at::NoGradGuard no_grad;
  std::vector<float> nonzero;
  for (const ShardedWeight& weight : weights_->all()) {
    const at::Tensor& gradient = weight.shard.grad();
    nonzero.push_back(gradient.defined() && gradient.ne(0).any().item<bool>() ? 1 : 0);
  }
  const at::Tensor flags = at::tensor(nonzero);
  all_reduce(flags, ReduceOp::MAX, weights_->group());
  return flags.sum().to(device_);
}

at::Tensor FsdpCore::clip_grad_norm_(double max_norm, double norm_type) {
  return groups_->spread_failures([&] { return clip_gradients(max_norm, norm_type); });
}

at::Tensor FsdpCore::clip_gradients(double max_norm, double norm_type) {
  std::vector<at::Tensor> sharded;
  for (const ShardedWeight& weight : weights_->all()) sharded.push_back(weight.shard);
  at::Tensor norm = norm_type == 0 ? count_nonzero_gradients()
                                   : get_total_norm(gradients_of(sharded), norm_type,
                                                    /*error_if_nonfinite=*/false, {}, weights_->group());
  if (!ignored_.empty()) {
    at::Tensor other = get_total_norm(gradients_of(ignored_), norm_type).to(norm.options());
    // Ranks with the same rows scale them equally, or they would differ from then on.
    if (groups_->replicas()) all_reduce(other, ReduceOp::MAX, groups_->replicas());
    norm = norm_type == 0 ? norm + other : get_total_norm({norm, other}, norm_type);
    clip_grads_with_norm_(ignored_, max_norm, norm);
  }
  clip_grads_with_norm_(sharded, max_norm, norm);
  return norm;
}

void FsdpCore::summon_full_params(const std::function<void()>& action, bool writeback) {
  std::exception_ptr error;
  int failed = 0;
  const auto attempt = [&](auto&& part) {
    try {
      part();
    } catch (...) {
      error = std::current_exception();
    }
  };
  write([&] {
    struct TakeBack {
      ShardedWeights& weights;
      ~TakeBack() { weights.take_private_values(); }
    } take_back{*weights_};
    std::vector<at::Tensor> memory;
    attempt([&] {
      failpoint::here("fsdp.summon.allocate");
      for (size_t i = 0; i < sharded_.size(); ++i) memory.push_back(weights_->empty_whole(i, {}, device_));
    });
    failed = count_ranks(groups_->all(), error != nullptr);
    if (failed > 0) return;
    weights_->give_private_values(memory);
    attempt([&] {
      action();
      if (writeback) weights_->check_private_values();
    });
    if (!writeback) return;
    // Weights of which some ranks' rows are new, and others' not, would be of no use. And a rank that is faster must not write
    // its rows while another copies them.
    failed = count_ranks(groups_->all(), error != nullptr);
    if (failed == 0) weights_->write_private_values_back();
  });
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_WITH(DistBackendError, failed == 0, kClass, ": ", counted(failed, "rank"),
                   " of the group failed in summon_full_params(); the weights are as they were");
}

}  // namespace lockstep
