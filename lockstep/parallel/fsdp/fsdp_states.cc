#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/class_name.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>
#include <lockstep/parallel/fsdp/internal/offloaded_tensors.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

// The states of FsdpCore: the model's and its optimizers'.
namespace lockstep {
namespace {

/// States lie in the host's memory, wherever a model computes.
at::Tensor copied_to_host(const at::Tensor& tensor, std::optional<at::ScalarType> dtype = {}) {
  return tensor.detach().to(at::kCPU, dtype.value_or(tensor.scalar_type()), /*non_blocking=*/false,
                            /*copy=*/true);
}

}  // namespace

using fsdp::ShardedStateDict;
using fsdp::internal::kClass;
using fsdp::internal::run_on_all;
using fsdp::internal::ShardedWeight;
using fsdp::internal::WeightWindows;

StateDict FsdpCore::full_state_dict(bool rank0_only) {
  const WeightWindows::Reading reading(*windows_);
  const bool wanted = !rank0_only || groups_->all()->getRank() == 0;
  std::vector<at::Tensor> values(weights_->all().size());
  const auto allocate = [&] {
    failpoint::here("fsdp.state.allocate");
    for (size_t i = 0; wanted && i < values.size(); ++i) values[i] = weights_->empty_whole(i);
  };
  if (weights_->copies_by_gathering()) {
    groups_->spread_failures([&] {
      run_on_all(weights_->group(), "to allocate memory for full_state_dict()", allocate);
      for (size_t i = 0; i < values.size(); ++i) weights_->copy(i, values[i]);
    });
  } else {
    allocate();
    for (size_t i = 0; i < values.size(); ++i) weights_->copy(i, values[i]);
  }
  StateDict state;
  if (!wanted) return state;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> whole;
  for (size_t i = 0; i < values.size(); ++i) {
    whole.emplace(weights_->all()[i].parameter.unsafeGetTensorImpl(), values[i]);
  }
  for (const auto& [name, parameter] : model_.parameters) {
    const auto found = whole.find(parameter.unsafeGetTensorImpl());
    state.emplace(name, found == whole.end() ? copied_to_host(parameter) : found->second);
  }
  for (const auto& [name, buffer] : model_.buffers()) {
    const auto cast = buffer_dtypes_.find(name);
    const at::ScalarType own = cast == buffer_dtypes_.end() ? buffer.scalar_type() : cast->second;
    state.emplace(name, copied_to_host(buffer, own));
  }
  return state;
}

void FsdpCore::load_full_state_dict(const StateDict& state) {
  const auto given = [&](const std::string& name) { return state_value<at::Tensor>(state, name, kClass); };
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // of what is not sharded
  std::vector<at::Tensor> values;
  const auto copy = [&](const NamedTensor& to) {
    const at::Tensor from = given(to.first);
    TORCH_CHECK_VALUE(from.sizes() == to.second.sizes(), kClass, ": '", to.first, "' has sizes ",
                      to.second.sizes(), ", but a tensor of ", from.sizes(), " was given for it");
    copies.emplace_back(to.second, from);
  };
  const auto check = [&] {
    for (size_t i = 0; i < weights_->all().size(); ++i) {
      values.push_back(given(weights_->all()[i].name));
      (void)weights_->part_of(i, values.back());
    }
    for (const auto& leaf : parameters_) {
      if (weights_->find(leaf.first) == nullptr) copy(leaf);
    }
    for (const auto& buffer : model_.buffers()) copy(buffer);
  };
  const auto load = [&] {
    for (size_t i = 0; i < values.size(); ++i) weights_->set_value(i, values[i]);
  };
  write(load, check);
  const at::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
}

ShardedStateDict FsdpCore::sharded_state_dict() const {
  const WeightWindows::Reading reading(*windows_);
  ShardedStateDict state;
  for (const ShardedWeight& weight : weights_->all()) {
    state.emplace_back(weight.name, fsdp::ShardedTensor{.local = copied_to_host(weight.shard),
                                                        .row = weight.own.begin,
                                                        .global_sizes = weight.sizes});
  }
  return state;
}

void FsdpCore::load_sharded_state_dict(const std::vector<ShardedStateDict>& states) {
  std::vector<at::Tensor> rows;
  const auto check = [&] {
    for (size_t i = 0; i < weights_->all().size(); ++i) {
      std::vector<fsdp::ShardedTensor> parts;
      for (const ShardedStateDict& state : states) {
        const auto found =
            std::ranges::find(state, weights_->all()[i].name, &ShardedStateDict::value_type::first);
        if (found != state.end()) parts.push_back(found->second);
      }
      rows.push_back(weights_->own_rows(i, parts));
    }
  };
  const auto load = [&] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < rows.size(); ++i) weights_->all()[i].shard.copy_(rows[i]);
  };
  write(load, check);
}

/// `change` gets each tensor of a sharded parameter's state that has rows, whatever stands for it.
StateDict FsdpCore::map_optim_state(const StateDict& state, const ChangeOfPart& change,
                                    const std::vector<KeyMap>& key_map) const {
  StateDict result = state;
  auto by_parameter = state_value<StateDict>(state, "state", kClass);
  std::unordered_map<std::string, size_t> weights;
  for (size_t i = 0; i < weights_->all().size(); ++i) weights.emplace(weights_->all()[i].name, i);
  for (auto& [key, entry] : by_parameter) {
    const auto name = map_key(key_map, key);
    const auto weight = name ? weights.find(*name) : weights.end();
    if (weight == weights.end()) continue;
    auto values = from_object<StateDict>(entry);
    for (auto& [what, value] : values) {
      const bool has_rows = (value.isTensor() && what != "step") || value.isGenericDict();
      if (has_rows) value = change({weight->second, key, what}, value);
    }
    entry = to_object(values);
  }
  result["state"] = to_object(by_parameter);
  return result;
}

void FsdpCore::check_is_of_rows(const torch::optim::Optimizer& optimizer) const {
  if (dynamic_cast<const fsdp::OptimizerOfRows*>(&optimizer) != nullptr) return;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const bool is_ignored =
          std::ranges::any_of(ignored_, [&](const at::Tensor& each) { return each.is_same(parameter); });
      TORCH_CHECK_VALUE(is_ignored, kClass,
                        ": the optimizer has sharded parameters, and was not made by make_optimizer(), so "
                        "its state is not that of their rows alone; optimizers that look at all elements "
                        "together, such as LBFGS, can't be sharded");
    }
  }
}

StateDict FsdpCore::optim_state_of_rows(const torch::optim::Optimizer& optimizer) const {
  check_is_of_rows(optimizer);
  return get_optimizer_state_dict(leaves_as_model(), optimizer);
}

StateDict FsdpCore::full_optim_state_dict(const torch::optim::Optimizer& optimizer, bool rank0_only) const {
  const bool wanted = !rank0_only || groups_->all()->getRank() == 0;
  const StateDict rows = optim_state_of_rows(optimizer);
  std::vector<at::Tensor> wholes;  // in the order in which map_optim_state() goes through them
  const auto allocate = [&](const PlaceInState& place, const c10::IValue& part) {
    failpoint::here("fsdp.state.allocate");
    wholes.push_back(wanted ? weights_->empty_whole(place.weight, part.toTensor().scalar_type())
                            : at::Tensor());
    return part;
  };
  size_t next = 0;
  const auto gather = [&](const PlaceInState& place, const c10::IValue& part) -> c10::IValue {
    const at::Tensor& whole = wholes[next++];
    weights_->gather(place.weight, part.toTensor(), whole);
    return whole;
  };
  StateDict state;
  groups_->spread_failures([&] {
    run_on_all(weights_->group(), "to allocate memory for full_optim_state_dict()",
               [&] { (void)map_optim_state(rows, allocate); });
    state = map_optim_state(rows, gather);
  });
  if (!wanted) state["state"] = to_object(StateDict());
  return state;
}

PreparedLoad FsdpCore::prepare_full_optim_state_dict(torch::optim::Optimizer& optimizer,
                                                     const StateDict& state,
                                                     const LoadStateDictOptions& options) const {
  check_is_of_rows(optimizer);
  const auto take_rows = [&](const PlaceInState& place, const c10::IValue& whole) -> c10::IValue {
    return weights_->part_of(place.weight, from_object<at::Tensor>(whole)).clone();
  };
  const auto parts = map_optim_state(state, take_rows, options.key_map);
  return prepare_optimizer_state_dict(leaves_as_model(), optimizer, parts, options);
}

StateDict FsdpCore::sharded_optim_state_dict(const torch::optim::Optimizer& optimizer) const {
  return map_optim_state(
      optim_state_of_rows(optimizer), [&](const PlaceInState& place, const c10::IValue& part) {
        const ShardedWeight& weight = weights_->all()[place.weight];
        return to_object(fsdp::ShardedTensor{
            .local = copied_to_host(part.toTensor()), .row = weight.own.begin, .global_sizes = weight.sizes});
      });
}

/// All ranks' checks come before the first one's changes.
void FsdpCore::load_on_all(const std::function<PreparedLoad()>& prepare) const {
  PreparedLoad load;
  groups_->spread_failures([&] {
    run_on_all(groups_->all(), "to load the optimizer's state, which is as it was",
               [&] { load = prepare(); });
  });
  load.commit();
}

void FsdpCore::load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state) const {
  load_on_all([&] { return prepare_full_optim_state_dict(optimizer, state, {}); });
}

void FsdpCore::load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
                                             const std::vector<StateDict>& states) const {
  load_on_all([&] { return prepare_sharded_optim_state_dict(optimizer, states); });
}

PreparedLoad FsdpCore::prepare_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
                                                        const std::vector<StateDict>& states) const {
  check_is_of_rows(optimizer);
  TORCH_CHECK_VALUE(!states.empty(), kClass, ": there is no state to load the optimizer from");
  std::vector<StateDict> by_parameter;
  for (const StateDict& state : states)
    by_parameter.push_back(state_value<StateDict>(state, "state", kClass));
  const auto take_rows = [&](const PlaceInState& place, const c10::IValue&) -> c10::IValue {
    std::vector<fsdp::ShardedTensor> parts;
    for (const StateDict& of_rank : by_parameter) {
      const auto found = of_rank.find(place.parameter);
      if (found == of_rank.end()) continue;
      const auto values = from_object<StateDict>(found->second);
      parts.push_back(state_value<fsdp::ShardedTensor>(values, place.what, kClass));
    }
    return weights_->own_rows(place.weight, parts);
  };
  const auto rows = map_optim_state(states.front(), take_rows);
  return prepare_optimizer_state_dict(leaves_as_model(), optimizer, rows, {});
}

}  // namespace lockstep
