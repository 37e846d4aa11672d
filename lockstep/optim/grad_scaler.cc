#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/nn/collective_optimizer.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>

namespace lockstep {
namespace {

using torch::optim::Optimizer;

constexpr const char* kOwner = "GradScaler";

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

/// Code that watches the parameters' versions shall see that the step is over, though it changed nothing.
void count_as_stepped(const Optimizer& optimizer) {
  for (const at::Tensor& parameter : parameters_of(optimizer)) {
    if (parameter.grad().defined() && !parameter.is_inference()) {
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : enabled_(options.enabled),
      device_(options.device),
      init_scale_(options.init_scale),
      growth_factor_(options.growth_factor),
      backoff_factor_(options.backoff_factor),
      growth_interval_(options.growth_interval),
      process_group_(options.process_group) {
  if (enabled_ && device_ == at::kCUDA && cuda_device_count() == 0) {
    LOCKSTEP_LOG(kWarning) << "GradScaler is enabled, but CUDA is not available.  Disabling. On a CPU, give "
                              "{.device = at::kCPU}.";
    enabled_ = false;
  }
  if (!enabled_) return;
  TORCH_CHECK_VALUE(growth_factor_ > 1.0, "The growth factor must be > 1.0. It is ", growth_factor_);
  TORCH_CHECK_VALUE(backoff_factor_ < 1.0, "The backoff factor must be < 1.0. It is ", backoff_factor_);
  TORCH_CHECK_VALUE(!process_group_ || is_member(*process_group_),
                    "GradScaler: this rank is not in the process group");
}

at::Tensor& GradScaler::MultiDeviceReplicator::on(const c10::Device& device) {
  for (auto& [known, copy] : copies_) {
    if (known == device) return copy;
  }
  at::Tensor copy = original_.to(device, original_.scalar_type(), /*non_blocking=*/true, /*copy=*/true);
  return copies_.emplace_back(device, std::move(copy)).second;
}

std::vector<at::Tensor> GradScaler::MultiDeviceReplicator::copies() const {
  std::vector<at::Tensor> copies;
  for (const auto& [device, copy] : copies_) copies.push_back(copy);
  return copies;
}

void GradScaler::check_owned(int64_t foreign) {
  TORCH_CHECK_VALUE(foreign == 0, "GradScaler::scale: ", foreign,
                    " of the tensors lie behind pointers or views, and would have to be replaced there; pass "
                    "containers that have the tensors themselves");
}

void GradScaler::check_scale(const char* function) const {
  TORCH_CHECK(scale_.defined(), "Attempted ", function,
              " but _scale is None.  This may indicate your script did not use scaler.scale(loss or outputs) "
              "earlier in the iteration.");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) {
  if (!enabled_) return outputs;
  TORCH_CHECK_VALUE(outputs.defined(), "outputs must be a Tensor or an iterable of Tensors; it is undefined");
  start_at(outputs.device());
  return outputs * scale_.to(outputs.device(), scale_.scalar_type(), /*non_blocking=*/true);
}

void GradScaler::start_at(const at::Device& device) {
  if (scale_.defined()) return;
  at::NoGradGuard no_grad;
  const auto options = at::TensorOptions(device);
  scale_ = at::full({}, init_scale_, options.dtype(at::kFloat));
  growth_tracker_ = at::full({}, init_growth_tracker_, options.dtype(at::kInt));
}

/// Whether a gradient was not finite: a number for each device that has gradients.
std::vector<at::Tensor> GradScaler::unscale_gradients(const Optimizer& optimizer) const {
  std::vector<at::Tensor> values;
  for (const at::Tensor& gradient : gradients_of(parameters_of(optimizer))) {
    TORCH_CHECK_VALUE(
        gradient.scalar_type() != at::kHalf,
        "Attempting to unscale FP16 gradients. Keep the parameters in float32, and let autocast() "
        "cast them");
    values.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  // The reciprocal in float64, as the division of float32 may be imprecise on some devices.
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  MultiDeviceReplicator inverses(inverse);
  MultiDeviceReplicator found_infs(at::zeros({}, inverse.options()));
  for (const auto& [key, gradients] : group_by_device_and_dtype(values)) {
    const at::Device device = gradients[0].device();
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found_infs.on(device), inverses.on(device));
  }
  return found_infs.copies();
}

/// The ranks that must skip the steps of this optimizer together; none where they do so without communication.
std::optional<ProcessGroup> GradScaler::group_of(const Optimizer& optimizer) const {
  const auto* zero = dynamic_cast<const ZeroRedundancyOptimizer*>(&optimizer);
  TORCH_CHECK(
      !zero || !zero->overlap_with_ddp(),
      "GradScaler can't unscale the gradients of a ZeroRedundancyOptimizer with `overlap_with_ddp=True`: "
      "its steps are made within backward(); construct it without the overlap");
  if (process_group_) return process_group_;
  const auto* collective = dynamic_cast<const CollectiveOptimizer*>(&optimizer);
  if (collective != nullptr) return collective->process_group();
  return std::nullopt;
}

/// One number that all ranks of the group have; none when no rank has gradients.
std::vector<at::Tensor> GradScaler::agree(const std::vector<at::Tensor>& found_infs,
                                          const ProcessGroup& process_group) const {
  const ProcessGroup group = process_group ? process_group : default_group();
  // On the CPU, where the answer is wanted, unless the group can reduce on devices alone.
  const auto types = group->getDeviceTypes();
  const bool on_cpu = std::any_of(types.begin(), types.end(), [](const auto& type) { return type.is_cpu(); });
  at::Tensor flags = at::zeros({2}, at::TensorOptions(on_cpu ? at::Device(at::kCPU) : scale_.device()));
  at::Tensor found = flags[0];
  for (const at::Tensor& found_inf : found_infs) found += found_inf.to(flags.device());
  flags[1].fill_(!found_infs.empty());
  all_reduce(flags, ReduceOp::MAX, group);
  if (flags[1].item<float>() == 0) return {};
  return {found};
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled_) return;
  check_scale("unscale_");
  const auto group = group_of(optimizer);
  OptimizerState& state = optimizers_[&optimizer];
  TORCH_CHECK(state.stage != Stage::kUnscaled,
              "unscale_() has already been called on this optimizer since the last update().");
  TORCH_CHECK(state.stage != Stage::kStepped, "unscale_() is being called after step().");
  at::NoGradGuard no_grad;
  state.found_infs = unscale_gradients(optimizer);
  if (group) {
    try {
      state.found_infs = agree(state.found_infs, *group);
    } catch (...) {
      reset();
      throw;
    }
  }
  state.stage = Stage::kUnscaled;
}

at::Tensor GradScaler::step(Optimizer& optimizer, Optimizer::LossClosure closure) {
  if (!enabled_) return optimizer.step(std::move(closure));
  TORCH_CHECK(!closure, "Closure use is not currently supported if GradScaler is enabled.");
  check_scale("step");
  if (optimizers_[&optimizer].stage == Stage::kReady) unscale_(optimizer);
  OptimizerState& state = optimizers_.at(&optimizer);
  TORCH_CHECK(state.stage != Stage::kStepped, "step() has already been called since the last update().");
  TORCH_CHECK(!state.found_infs.empty(),
              "No inf checks were recorded for this optimizer. None of its parameters has a gradient: call "
              "backward() before step()");
  const bool skip = std::any_of(state.found_infs.begin(), state.found_infs.end(),
                                [](const at::Tensor& found) { return found.item<float>() != 0; });
  at::Tensor loss;
  if (skip) {
    count_as_stepped(optimizer);
  } else {
    loss = optimizer.step();
  }
  state.stage = Stage::kStepped;
  return loss;
}

void GradScaler::update() {
  if (!enabled_) return;
  check_scale("update");
  at::NoGradGuard no_grad;
  at::Tensor found;
  for (const auto& [optimizer, state] : optimizers_) {
    for (const at::Tensor& found_inf : state.found_infs) {
      const at::Tensor here = found_inf.to(scale_.device(), at::kFloat, /*non_blocking=*/true);
      found = found.defined() ? found + here : here;
    }
  }
  TORCH_CHECK(found.defined(),
              "No inf checks were recorded prior to update. Call step() or unscale_() before update()");
  at::_amp_update_scale_(scale_, growth_tracker_, found, growth_factor_, backoff_factor_, growth_interval_);
  reset();
}

void GradScaler::update(double new_scale) {
  if (!enabled_) return;
  check_scale("update");
  scale_.fill_(new_scale);
  reset();
}

void GradScaler::update(const at::Tensor& new_scale) {
  if (!enabled_) return;
  check_scale("update");
  TORCH_CHECK_VALUE(new_scale.defined() && new_scale.device().type() == device_ && new_scale.numel() == 1 &&
                        !new_scale.requires_grad(),
                    "new_scale should be a float or a 1-element tensor on a ",
                    c10::DeviceTypeName(device_, /*lower_case=*/true), " device with requires_grad=False.");
  scale_.copy_(new_scale.reshape({}));
  reset();
}

double GradScaler::get_scale() const {
  if (!enabled_) return 1.0;
  return scale_.defined() ? scale_.item<double>() : init_scale_;
}

int64_t GradScaler::growth_tracker() const {
  return growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : init_growth_tracker_;
}

StateDict GradScaler::state_dict() const {
  if (!enabled_) return {};
  return {{"scale", get_scale()},
          {"growth_factor", growth_factor_},
          {"backoff_factor", backoff_factor_},
          {"growth_interval", growth_interval_},
          {"_growth_tracker", growth_tracker()}};
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!enabled_) return;
  TORCH_CHECK(!state.empty(),
              "The source state dict is empty, possibly because it was saved from a disabled instance of "
              "GradScaler.");
  const auto scale = state_value<double>(state, "scale", kOwner);
  const auto growth_factor = state_value<double>(state, "growth_factor", kOwner);
  const auto backoff_factor = state_value<double>(state, "backoff_factor", kOwner);
  const auto growth_interval = state_value<int64_t>(state, "growth_interval", kOwner);
  const auto tracker = state_value<int64_t>(state, "_growth_tracker", kOwner);
  init_scale_ = scale;
  growth_factor_ = growth_factor;
  backoff_factor_ = backoff_factor;
  growth_interval_ = growth_interval;
  init_growth_tracker_ = tracker;
  if (!scale_.defined()) return;
  scale_.fill_(scale);
  growth_tracker_.fill_(tracker);
}

GradScaler::operator Recoverable() {
  return Recoverable(
      [this] {
        const auto bytes = torch::jit::pickle_save(to_object(state_dict()));
        return std::string(bytes.begin(), bytes.end());
      },
      [this](const std::string& bytes) {
        const auto state = torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
        load_state_dict(from_object<StateDict>(state));
        reset();
      });
}

void GradScaler::update_process_group(const ProcessGroup& process_group) {
  TORCH_CHECK_VALUE(is_member(process_group), "GradScaler: this rank is not in the process group");
  process_group_ = process_group;
  reset();
}

}  // namespace lockstep
