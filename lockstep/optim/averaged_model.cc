#include <map>
#include <tuple>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_lerp.h>
#include <c10/util/Exception.h>

#include <lockstep/optim/averaged_model.h>

namespace lockstep::swa_utils {
namespace {

/// What at::_foreach_lerp_ takes; integers (counters among the buffers) are averaged by hand.
bool can_lerp(const at::Tensor& tensor) {
  return tensor.is_floating_point() || tensor.is_complex();
}

void check_decay(double decay) {
  TORCH_CHECK_VALUE(decay >= 0 && decay <= 1, "Invalid decay value ", decay,
                    " provided. Please provide a value in [0,1] range.");
}

/// _get_foreach_kernels_supported_devices() of torch/utils/_foreach_utils.py.
bool has_foreach_kernels(c10::DeviceType type) {
  return type == c10::kCUDA || type == c10::kXPU || type == c10::kMTIA || type == c10::kPrivateUse1;
}

}  // namespace

AvgFn get_ema_avg_fn(double decay) {
  check_decay(decay);
  return [decay](const at::Tensor& averaged, const at::Tensor& current, int64_t /*num_averaged*/) {
    const at::NoGradGuard no_grad;
    return decay * averaged + (1 - decay) * current;
  };
}

MultiAvgFn get_ema_multi_avg_fn(double decay) {
  check_decay(decay);
  return [decay](const std::vector<at::Tensor>& averaged, const std::vector<at::Tensor>& current,
                 int64_t /*num_averaged*/) {
    const at::NoGradGuard no_grad;
    if (can_lerp(averaged.front())) {
      at::_foreach_lerp_(averaged, current, 1 - decay);
      return;
    }
    for (size_t i = 0; i < averaged.size(); ++i) {
      averaged[i].copy_(averaged[i] * decay + current[i] * (1 - decay));
    }
  };
}

AvgFn get_swa_avg_fn() {
  return [](const at::Tensor& averaged, const at::Tensor& current, int64_t num_averaged) {
    const at::NoGradGuard no_grad;
    return averaged + (current - averaged) / (num_averaged + 1);
  };
}

MultiAvgFn get_swa_multi_avg_fn() {
  return [](const std::vector<at::Tensor>& averaged, const std::vector<at::Tensor>& current,
            int64_t num_averaged) {
    const at::NoGradGuard no_grad;
    if (can_lerp(averaged.front())) {
      at::_foreach_lerp_(averaged, current, 1.0 / static_cast<double>(num_averaged + 1));
      return;
    }
    for (size_t i = 0; i < averaged.size(); ++i) {
      averaged[i].copy_(averaged[i] + (current[i] - averaged[i]) / (num_averaged + 1));
    }
  };
}

namespace internal {
namespace {

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> answer;
  for (const at::Tensor& tensor : tensors) answer.push_back(tensor.detach());
  return answer;
}

void check_same_structure(const std::vector<at::Tensor>& averaged, const std::vector<at::Tensor>& current,
                          const char* kind) {
  TORCH_CHECK_VALUE(averaged.size() == current.size(), "AveragedModel::update_parameters: the model has ",
                    current.size(), " ", kind, ", the average ", averaged.size(),
                    "; give it the model that the average was made of, or its wrapper");
  for (size_t i = 0; i < averaged.size(); ++i) {
    TORCH_CHECK_VALUE(averaged[i].sizes() == current[i].sizes(), "AveragedModel::update_parameters: number ",
                      i, " of the model's ", kind, " has sizes ", current[i].sizes(), ", the average's ",
                      averaged[i].sizes());
  }
}

}  // namespace

void copy_state(const std::vector<NamedTensor>& from, const std::vector<NamedTensor>& to) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> targets(to.begin(), to.end());
  for (const auto& [name, tensor] : from) {
    const auto target = targets.extract(name);
    TORCH_CHECK_VALUE(!target.empty() && target.mapped().sizes() == tensor.sizes(),
                      "AveragedModel: the copy has no '", name, "' of sizes ", tensor.sizes(),
                      "; the factory must make a module of the same structure");
    target.mapped().detach().copy_(tensor.detach());
  }
  TORCH_CHECK_VALUE(targets.empty(), "AveragedModel: the copy has '", targets.begin()->first,
                    "', which the model has not; the factory must make a module of the same structure");
}

WeightAverage::WeightAverage(AveragedModelOptions options, at::Tensor n_averaged)
    : options_(std::move(options)), n_averaged_(std::move(n_averaged)) {
  TORCH_CHECK_VALUE(!options_.avg_fn || !options_.multi_avg_fn,
                    "Only one of avg_fn and multi_avg_fn should be provided");
}

void WeightAverage::update(const std::vector<at::Tensor>& averaged_parameters,
                           const std::vector<at::Tensor>& averaged_buffers, const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all_averaged = detached(averaged_parameters);
  std::vector<at::Tensor> all_current = detached(model.parameters());
  const std::vector<at::Tensor> averaged_rest = detached(averaged_buffers);
  const std::vector<at::Tensor> current_rest = detached(model.buffers());
  check_same_structure(all_averaged, all_current, "parameters");
  check_same_structure(averaged_rest, current_rest, "buffers");
  if (options_.use_buffers) {
    all_averaged.insert(all_averaged.end(), averaged_rest.begin(), averaged_rest.end());
    all_current.insert(all_current.end(), current_rest.begin(), current_rest.end());
  }

  // LibTorch lists a tensor once for each of its names; averaged twice, it would move twice as far.
  std::vector<at::Tensor> averaged;
  std::vector<at::Tensor> current;
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < all_averaged.size(); ++i) {
    if (all_averaged[i].numel() == 0 || !seen.insert(all_averaged[i].const_data_ptr()).second) continue;
    averaged.push_back(all_averaged[i]);
    current.push_back(all_current[i].to(all_averaged[i].device()));
  }

  const auto num_averaged = n_averaged_.item<int64_t>();
  if (num_averaged == 0) {
    for (size_t i = 0; i < averaged.size(); ++i) averaged[i].copy_(current[i]);
  } else {
    average(averaged, current, num_averaged);
  }
  if (!options_.use_buffers) {
    for (size_t i = 0; i < averaged_rest.size(); ++i) averaged_rest[i].copy_(current_rest[i]);
  }
  n_averaged_ += 1;
}

void WeightAverage::average(const std::vector<at::Tensor>& averaged, const std::vector<at::Tensor>& current,
                            int64_t num_averaged) const {
  const auto average_each = [&](const AvgFn& avg_fn, const auto& old, const auto& now) {
    for (size_t i = 0; i < old.size(); ++i) old[i].copy_(avg_fn(old[i], now[i], num_averaged));
  };
  if (options_.avg_fn) {
    average_each(options_.avg_fn, averaged, current);
    return;
  }
  using Tensors = std::vector<at::Tensor>;
  using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, at::ScalarType>;
  std::map<Kind, std::pair<Tensors, Tensors>> by_kind;
  for (size_t i = 0; i < averaged.size(); ++i) {
    const at::Device device = averaged[i].device();
    auto& [of_average, of_model] = by_kind[{device.type(), device.index(), averaged[i].scalar_type()}];
    of_average.push_back(averaged[i]);
    of_model.push_back(current[i]);
  }
  for (const auto& [kind, tensors] : by_kind) {
    const auto& [of_average, of_model] = tensors;
    if (options_.multi_avg_fn) {
      options_.multi_avg_fn(of_average, of_model, num_averaged);
    } else if (has_foreach_kernels(std::get<c10::DeviceType>(kind))) {
      get_swa_multi_avg_fn()(of_average, of_model, num_averaged);
    } else {
      average_each(get_swa_avg_fn(), of_average, of_model);  // as Python, to the last bit
    }
  }
}

}  // namespace internal
}  // namespace lockstep::swa_utils
