#include <algorithm>
#include <exception>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/parallel/ddp/state_sync.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_units.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_weights.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

namespace lockstep {

using fsdp::ShardedStateDict;
using fsdp::ShardingStrategy;
using fsdp::internal::count_ranks;
using fsdp::internal::GatheredUnits;
using fsdp::internal::GatheredWeights;
using fsdp::internal::GradientReduction;
using fsdp::internal::run_on_all;
using fsdp::internal::ShardedWeight;
using fsdp::internal::ShardedWeights;
using fsdp::internal::ShardGroups;
using fsdp::internal::WeightDtypes;
using fsdp::internal::WeightWindows;

namespace {

constexpr const char* kClass = "FullyShardedDataParallel";

const char* name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::FULL_SHARD:
      return "FULL_SHARD";
    case ShardingStrategy::SHARD_GRAD_OP:
      return "SHARD_GRAD_OP";
    case ShardingStrategy::NO_SHARD:
      return "NO_SHARD";
    case ShardingStrategy::HYBRID_SHARD:
      return "HYBRID_SHARD";
  }
  return "";
}

bool contains(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(tensors, [&](const at::Tensor& each) { return each.is_same(tensor); });
}

}  // namespace

FsdpCore::FsdpCore(Model model, FullyShardedDataParallelOptions options)
    : model_(std::move(model)), options_(std::move(options)) {
  if (!options_.process_group) options_.process_group = default_group();
  TORCH_CHECK_VALUE(is_member(options_.process_group), kClass,
                    ": this rank is no member of the process group");
  // All that a rank can refuse or lack comes before the module is changed.
  std::vector<WeightDtypes> dtypes;
  std::vector<std::vector<size_t>> groups;
  run_on_all(options_.process_group, "to be wrapped", [&] {
    check_options();
    collect_parameters();
    dtypes = this->dtypes();
    groups = reduced_groups(dtypes);
  });
  verify_same_model(sharded_, options_.process_group);
  verify_same_layout(groups, dtypes);
  groups_ = std::make_shared<const ShardGroups>(options_.process_group, are_to_be_gathered());
  run_on_all(groups_->all(), "to allocate memory", [&] { weights_ = make_weights(dtypes); });
  windows_ = std::make_unique<WeightWindows>(groups_->all());
  run_on_all(groups_->all(), "to allocate memory", [&] {
    weights_->allocate_copies();
    reduction_ = std::make_shared<GradientReduction>(*weights_, *windows_, std::move(groups), options_);
    if (are_to_be_gathered()) {
      units_ =
          std::make_shared<GatheredUnits>(static_cast<GatheredWeights&>(*weights_), *reduction_, options_);
    }
  });
  weights_->move_values(/*of_rank_0=*/options_.sync_module_states);
  if (options_.sync_module_states) broadcast_coalesced(model_.buffers(), groups_->all());
  cast_buffers();
  collect_leaves();
  reduction_->attach();
  if (units_) units_->attach();
  log_strategy();
}

FsdpCore::~FsdpCore() = default;

void FsdpCore::check_options() const {
  TORCH_CHECK_VALUE(options_.sharding_strategy != ShardingStrategy::NO_SHARD, kClass,
                    ": NO_SHARD keeps a whole model on each rank, as DistributedDataParallel does; use that");
  TORCH_CHECK_VALUE(!options_.gather || options_.sharding_strategy != ShardingStrategy::HYBRID_SHARD, kClass,
                    ": HYBRID_SHARD has the weights once on each host, where nothing is gathered; leave "
                    "`gather` out, or choose FULL_SHARD or SHARD_GRAD_OP");
  if (options_.between_hosts) {
    checked_compression(*options_.between_hosts, "between_hosts");
    TORCH_CHECK_VALUE(
        !are_to_be_gathered(), kClass, ": between_hosts compresses the averages of HYBRID_SHARD; ",
        name_of(options_.sharding_strategy),
        " scatters gradients over all ranks: set mixed_precision.reduce_dtype to send fewer bytes");
  }
  TORCH_CHECK_VALUE(options_.gradient_buffers > 0, kClass, ": gradient_buffers is ",
                    options_.gradient_buffers, "; it must be at least 1");
  TORCH_CHECK_VALUE(options_.gradient_buffer_cap_mb > 0, kClass, ": gradient_buffer_cap_mb is ",
                    options_.gradient_buffer_cap_mb, "; it must be more than 0");
}

bool FsdpCore::are_to_be_gathered() const {
  return options_.gather || (options_.sharding_strategy != ShardingStrategy::HYBRID_SHARD &&
                             get_topology(options_.process_group).nodes() > 1);
}

void FsdpCore::collect_parameters() {
  std::unordered_map<std::string, const c10::TensorImpl*> by_name;
  for (const auto& [name, tensor] : model_.parameters) by_name.emplace(name, tensor.unsafeGetTensorImpl());
  std::unordered_set<const c10::TensorImpl*> wanted;
  for (const auto& group : model_.groups) {
    for (const std::string& name : group.parameters) wanted.insert(by_name.at(name));
  }
  // By its first name in the model, whatever group a tied one is in, so that states don't depend on the policy.
  for (const auto& parameter : model_.parameters) {
    if (wanted.erase(parameter.second.unsafeGetTensorImpl()) == 0) continue;
    const at::Tensor& tensor = parameter.second;
    TORCH_CHECK_VALUE(tensor.device().is_cpu(), kClass, ": parameter '", parameter.first, "' is on ",
                      tensor.device(), "; only models on the CPU can be sharded");
    TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, kClass, ": parameter '", parameter.first,
                      "' is sparse");
    TORCH_CHECK_VALUE(tensor.is_leaf(), kClass, ": parameter '", parameter.first, "' is no leaf");
    TORCH_CHECK_VALUE(!tensor.requires_grad() || !torch::autograd::impl::post_acc_grad_hooks(tensor), kClass,
                      ": parameter '", parameter.first,
                      "' has a hook behind its gradient already; is its module wrapped in another ", kClass,
                      ", which lives, or an optimizer of it?");
    TORCH_CHECK_VALUE(!fsdp::internal::is_gathered_parameter(tensor), kClass, ": parameter '",
                      parameter.first, "' has no values, for an earlier ", kClass,
                      " has gathered them; make the module anew, and load the full_state_dict() taken from "
                      "that one");
    TORCH_CHECK_VALUE(
        !fsdp::internal::is_lower_precision_view(tensor), kClass, ": parameter '", parameter.first,
        "' has the values in ", toString(tensor.scalar_type()), " that an earlier ", kClass,
        " with mixed_precision has left; convert the module by to(), and load the full_state_dict() "
        "taken from that one, before it is wrapped again");
    sharded_.push_back(parameter);
  }
  TORCH_CHECK(!sharded_.empty(), kClass, ": the module has no parameter that is not ignored");
}

void FsdpCore::log_strategy() const {
  if (units_) {
    LOCKSTEP_LOG(kInfo) << kClass << " of " << model_.name << ": " << sharded_.size() << " parameters in "
                        << model_.groups.size() << " groups are gathered from "
                        << weights_->group()->getSize() << " ranks, each of which has its rows; "
                        << name_of(options_.sharding_strategy);
    return;
  }
  const std::string strategy =
      groups_->replicas()
          ? "HYBRID_SHARD over " + std::to_string(groups_->replicas()->getSize()) + " hosts"
          : std::string("here FULL_SHARD, SHARD_GRAD_OP and HYBRID_SHARD come to the same (") +
                name_of(options_.sharding_strategy) + " was asked for)";
  LOCKSTEP_LOG(kInfo) << kClass << " of " << model_.name << ": " << sharded_.size() << " parameters in "
                      << model_.groups.size() << " groups lie once for all " << weights_->group()->getSize()
                      << " ranks of this host; " << strategy;
}

std::vector<WeightDtypes> FsdpCore::dtypes() const {
  const auto& precision = options_.mixed_precision;
  std::vector<WeightDtypes> dtypes;
  for (const auto& [name, tensor] : sharded_) {
    const at::ScalarType own = tensor.scalar_type();
    const bool stays = !tensor.is_floating_point() || contains(model_.full_precision, tensor);
    const at::ScalarType seen = stays ? own : precision.param_dtype.value_or(own);
    dtypes.push_back({.seen = seen, .reduced = stays ? own : precision.reduce_dtype.value_or(seen)});
  }
  return dtypes;
}

void FsdpCore::cast_buffers() {
  if (!options_.mixed_precision.buffer_dtype) return;
  std::vector<at::Tensor> stay = model_.full_precision;
  for (const auto& module : options_.ignored_modules) {
    for (const auto& buffer : module->buffers()) stay.push_back(buffer);
  }
  for (auto& [name, buffer] : model_.buffers()) {
    if (!buffer.is_floating_point() || contains(stay, buffer)) continue;
    buffer_dtypes_.emplace(name, buffer.scalar_type());
    buffer.set_data(buffer.detach().to(*options_.mixed_precision.buffer_dtype));
  }
}

/// By the parameters' places in sharded_.
std::vector<std::vector<size_t>> FsdpCore::places_of_groups() const {
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  for (size_t i = 0; i < sharded_.size(); ++i) places.emplace(sharded_[i].second.unsafeGetTensorImpl(), i);
  std::unordered_map<std::string, const c10::TensorImpl*> by_name;
  for (const auto& [name, tensor] : model_.parameters) by_name.emplace(name, tensor.unsafeGetTensorImpl());
  std::vector<std::vector<size_t>> groups;
  for (const auto& group : model_.groups) {
    std::vector<size_t> members;
    for (const std::string& name : group.parameters) members.push_back(places.at(by_name.at(name)));
    groups.push_back(std::move(members));
  }
  return groups;
}

/// Of those that require gradients.
std::vector<std::vector<size_t>> FsdpCore::reduced_groups(const std::vector<WeightDtypes>& dtypes) const {
  std::vector<std::vector<size_t>> groups;
  for (const auto& group : places_of_groups()) {
    std::vector<size_t> members;
    for (const size_t place : group) {
      if (!sharded_[place].second.requires_grad()) continue;
      members.push_back(place);
      const size_t first = members.front();
      TORCH_CHECK_VALUE(
          dtypes[place].reduced == dtypes[first].reduced, kClass, ": parameters '", sharded_[first].first,
          "' and '", sharded_[place].first,
          "' have different dtypes, but are to be reduced together; put them into groups of their own by an "
          "auto_wrap_policy, or set a reduce_dtype");
    }
    if (!members.empty()) groups.push_back(std::move(members));
  }
  return groups;
}

std::unique_ptr<ShardedWeights> FsdpCore::make_weights(const std::vector<WeightDtypes>& dtypes) const {
  if (!are_to_be_gathered()) return std::make_unique<ShardedWeights>(sharded_, dtypes, groups_);
  std::vector<std::string> names;
  for (const auto& group : model_.groups) names.push_back(group.module.empty() ? model_.name : group.module);
  return std::make_unique<GatheredWeights>(sharded_, dtypes, groups_, places_of_groups(), std::move(names));
}

/// Else ranks would see each other's rows at other places.
void FsdpCore::verify_same_layout(const std::vector<std::vector<size_t>>& groups,
                                  const std::vector<WeightDtypes>& dtypes) const {
  std::string own = options_.sync_module_states ? "synced" : "own";
  if (are_to_be_gathered()) {
    own +=
        " gathered " + std::to_string(static_cast<int>(options_.sharding_strategy)) +
        (options_.backward_prefetch ? std::to_string(static_cast<int>(*options_.backward_prefetch)) : "-") +
        (options_.forward_prefetch ? "forward" : "") + (options_.limit_all_gathers ? "limited" : "");
  }
  for (const auto& [seen, reduced] : dtypes)
    own += std::string(" ") + toString(seen) + "/" + toString(reduced);
  for (const auto& members : groups) {
    own += "\n";
    for (const size_t place : members) own += " " + std::to_string(place);
  }
  const std::string first = broadcast_bytes(own, options_.process_group);
  run_on_all(options_.process_group, "to be wrapped", [&] {
    TORCH_CHECK(
        own == first, kClass,
        ": rank 0 has other groups of parameters, other dtypes, another sync_module_states or gathers in "
        "another way; give all ranks the same options, and freeze the same parameters");
  });
}

// ---- Around forward

void FsdpCore::run_forward(const std::function<void()>& forward) {
  if (units_) units_->rethrow_failure();
  reduction_->check_ended();
  const WeightWindows::Reading reading(*windows_);
  weights_->check_in_place();
  units_ ? units_->run_forward(forward) : forward();
}

bool FsdpCore::prepares_inputs() const {
  const auto& precision = options_.mixed_precision;
  return precision.param_dtype && (precision.cast_root_forward_inputs || precision.cast_forward_inputs);
}

at::Tensor FsdpCore::prepare_input(const at::Tensor& tensor) const {
  return tensor.is_floating_point() ? tensor.to(*options_.mixed_precision.param_dtype) : tensor;
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

// ---- Shards

void FsdpCore::collect_leaves() {
  std::unordered_set<const c10::TensorImpl*> named;
  for (const auto& [name, parameter] : model_.parameters) {
    if (!named.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const ShardedWeight* const weight = weights_->find(name);
    if (weight == nullptr) ignored_.push_back(parameter);
    parameters_.emplace_back(name, weight == nullptr ? parameter : weight->shard);
  }
}

ModelTensors FsdpCore::leaves_as_model() const {
  return {.name = model_.name, .parameters = parameters_, .buffers = {}};
}

void FsdpCore::write(const std::function<void()>& change, const std::function<void()>& check) {
  const auto close_and_check = [&] {
    if (units_) units_->close();
    check();
  };
  windows_->write(close_and_check, [&] { weights_->write(change); });
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
  return flags.sum();
}

at::Tensor FsdpCore::clip_grad_norm_(double max_norm, double norm_type) {
  std::vector<at::Tensor> sharded;
  for (const ShardedWeight& weight : weights_->all()) sharded.push_back(weight.shard);
  at::Tensor norm = norm_type == 0 ? count_nonzero_gradients()
                                   : get_total_norm(gradients_of(sharded), norm_type,
                                                    /*error_if_nonfinite=*/false, {}, weights_->group());
  if (!ignored_.empty()) {
    at::Tensor other = get_total_norm(gradients_of(ignored_), norm_type).to(norm.scalar_type());
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
  write([&] {
    struct TakeBack {
      ShardedWeights& weights;
      ~TakeBack() { weights.take_private_values(); }
    } take_back{*weights_};
    weights_->give_private_values();
    try {
      action();
      if (writeback) weights_->check_private_values();
    } catch (...) {
      error = std::current_exception();
    }
    if (!writeback) return;
    // Weights of which some ranks' rows are new, and others' not, would be of no use.
    failed = count_ranks(groups_->all(), error != nullptr);
    if (failed == 0) weights_->write_private_values_back();
  });
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_WITH(DistBackendError, failed == 0, kClass, ": ", failed, failed == 1 ? " rank" : " ranks",
                   " of the group failed in summon_full_params(); the weights are as they were");
}

// ---- State

StateDict FsdpCore::full_state_dict(bool rank0_only) {
  const WeightWindows::Reading reading(*windows_);
  const bool wanted = !rank0_only || groups_->all()->getRank() == 0;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> whole;
  StateDict state;
  for (size_t i = 0; i < weights_->all().size(); ++i) {
    at::Tensor value = weights_->copy(i, wanted);
    if (wanted) whole.emplace(weights_->all()[i].parameter.unsafeGetTensorImpl(), std::move(value));
  }
  if (!wanted) return state;
  for (const auto& [name, parameter] : model_.parameters) {
    const auto found = whole.find(parameter.unsafeGetTensorImpl());
    state.emplace(name, found == whole.end() ? parameter.detach().clone() : found->second);
  }
  for (const auto& [name, buffer] : model_.buffers()) {
    const auto cast = buffer_dtypes_.find(name);
    const at::ScalarType own = cast == buffer_dtypes_.end() ? buffer.scalar_type() : cast->second;
    state.emplace(name, buffer.detach().to(own, /*non_blocking=*/false, /*copy=*/true));
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
    state.emplace_back(weight.name, fsdp::ShardedTensor{.local = weight.shard.detach().clone(),
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
      TORCH_CHECK_VALUE(contains(ignored_, parameter), kClass,
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
  const auto gather = [&](const PlaceInState& place, const c10::IValue& part) -> c10::IValue {
    const at::Tensor whole = weights_->gather(place.weight, part.toTensor());
    return wanted ? whole : at::Tensor();
  };
  auto state = map_optim_state(optim_state_of_rows(optimizer), gather);
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
            .local = part.toTensor().clone(), .row = weight.own.begin, .global_sizes = weight.sizes});
      });
}

void FsdpCore::load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
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
  prepare_optimizer_state_dict(leaves_as_model(), optimizer, rows, {}).commit();
}

}  // namespace lockstep
