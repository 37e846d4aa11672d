#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <sys/vfs.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/device/existing_device.h>
#include <lockstep/parallel/ddp/state_sync.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/class_name.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_units.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_weights.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>
#include <lockstep/parallel/fsdp/internal/offloaded_tensors.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

// How a module is wrapped: what is refused, in which groups and dtypes the weights are, and that all ranks agree on it.
namespace lockstep {

using fsdp::ShardingStrategy;
using fsdp::internal::GatheredUnits;
using fsdp::internal::GatheredWeights;
using fsdp::internal::GradientReduction;
using fsdp::internal::kClass;
using fsdp::internal::OffloadedTensors;
using fsdp::internal::run_on_all;
using fsdp::internal::ShardedWeight;
using fsdp::internal::ShardedWeights;
using fsdp::internal::ShardGroups;
using fsdp::internal::WeightDtypes;
using fsdp::internal::WeightWindows;

namespace {

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

std::unordered_map<std::string, at::Tensor> by_name(const std::vector<NamedTensor>& tensors) {
  return {tensors.begin(), tensors.end()};
}

void warn_of_memory(const std::filesystem::path& directory) {
  constexpr long kTmpfs = 0x01021994;
  struct statfs status {};
  if (::statfs(directory.c_str(), &status) != 0 || status.f_type != kTmpfs) return;
  LOCKSTEP_LOG(kWarning) << kClass << ": cpu_offload.directory " << directory.string()
                         << " is a tmpfs, whose files take memory; name one on a disk";
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
    device_ = choose_device();
    check_options();
    check_parts();
    take_groups_of_parts();
    collect_parameters();
    collect_tensors_without_values();
    dtypes = this->dtypes();
    groups = reduced_groups(dtypes);
  });
  verify_same_model(sharded_, options_.process_group);
  verify_same_layout(groups, dtypes);
  const bool on_each_host =
      !are_to_be_gathered() || options_.sharding_strategy == ShardingStrategy::HYBRID_SHARD;
  groups_ = std::make_shared<const ShardGroups>(
      options_.process_group, on_each_host ? ShardGroups::RowsOn::kEachHost : ShardGroups::RowsOn::kAllRanks,
      are_to_be_gathered(), device_);
  groups_->spread_failures([&] { wrap(std::move(groups), dtypes); });
  log_strategy();
}

void FsdpCore::wrap(std::vector<std::vector<size_t>> groups, const std::vector<WeightDtypes>& dtypes) {
  run_on_all(groups_->all(), "to allocate memory", [&] {
    std::optional<std::filesystem::path> directory;
    if (options_.cpu_offload.offload_params) {
      directory = fsdp::internal::offload_directory(options_.cpu_offload.directory);
      if (groups_->host()->getRank() == 0) warn_of_memory(*directory);
      offloaded_ = std::make_unique<OffloadedTensors>(*directory);
    }
    weights_ = make_weights(dtypes, directory);
  });
  windows_ = std::make_unique<WeightWindows>(groups_->all(), /*one_thread=*/are_to_be_gathered());
  run_on_all(groups_->all(), "to allocate memory", [&] {
    weights_->allocate_copies();
    reduction_ = std::make_shared<GradientReduction>(*weights_, *windows_, std::move(groups), options_);
    if (are_to_be_gathered()) {
      units_ =
          std::make_shared<GatheredUnits>(static_cast<GatheredWeights&>(*weights_), *reduction_, options_);
    }
  });
  groups_->connect();
  move_values();
  place_buffers();
  cast_buffers();
  collect_leaves();
  reduction_->attach();
  if (units_) units_->attach();
}

void FsdpCore::check_options() const {
  TORCH_CHECK_VALUE(options_.sharding_strategy != ShardingStrategy::NO_SHARD, kClass,
                    ": NO_SHARD keeps a whole model on each rank, as DistributedDataParallel does; use that");
  TORCH_CHECK_VALUE(
      !options_.gather || !device_.is_cpu() || options_.sharding_strategy != ShardingStrategy::HYBRID_SHARD,
      kClass,
      ": HYBRID_SHARD has the weights once on each host, where nothing is gathered; leave "
      "`gather` out, or choose FULL_SHARD or SHARD_GRAD_OP");
  if (options_.between_hosts) {
    checked_compression(*options_.between_hosts, "between_hosts");
    TORCH_CHECK_VALUE(!are_to_be_gathered(), kClass,
                      ": between_hosts compresses the averages of HYBRID_SHARD on CPUs; for ",
                      name_of(options_.sharding_strategy), " on ", device_,
                      " set mixed_precision.reduce_dtype to send fewer bytes");
  }
  TORCH_CHECK_VALUE(options_.gradient_buffers > 0, kClass, ": gradient_buffers is ",
                    options_.gradient_buffers, "; it must be at least 1");
  TORCH_CHECK_VALUE(options_.gradient_buffer_cap_mb > 0, kClass, ": gradient_buffer_cap_mb is ",
                    options_.gradient_buffer_cap_mb, "; it must be more than 0");
}

/// device_id; or where the first parameter on a device is. A kind of device stands for the current one of that kind.
c10::Device FsdpCore::choose_device() const {
  if (options_.device_id) {
    return options_.device_id->is_cpu() ? at::kCPU : existing_device(*options_.device_id, "device_id");
  }
  for (const fsdp::Part& part : model_.parts) {
    if (part.wrapper->core_ && !part.wrapper->core_->device_.is_cpu()) return part.wrapper->core_->device_;
  }
  const auto tensors = by_name(model_.parameters);
  for (const auto& group : model_.groups) {
    for (const std::string& name : group.parameters) {
      const at::Tensor& tensor = tensors.at(name);
      if (!tensor.is_meta() && !tensor.is_cpu()) return tensor.device();
    }
  }
  return at::kCPU;
}

bool FsdpCore::are_to_be_gathered() const {
  return options_.gather || !device_.is_cpu() ||
         (options_.sharding_strategy != ShardingStrategy::HYBRID_SHARD &&
          get_topology(options_.process_group).nodes() > 1);
}

void FsdpCore::collect_parameters() {
  const auto tensors = by_name(model_.parameters);
  std::unordered_set<const c10::TensorImpl*> wanted;
  for (const auto& group : model_.groups) {
    for (const std::string& name : group.parameters) wanted.insert(tensors.at(name).unsafeGetTensorImpl());
  }
  const WeightsOfParts of_parts = weights_of_parts();
  // By its first name in the model, whatever group a tied one is in, so that states don't depend on the policy.
  for (const auto& parameter : model_.parameters) {
    const at::Tensor& tensor = parameter.second;
    if (wanted.erase(tensor.unsafeGetTensorImpl()) == 0) continue;
    sharded_.push_back(parameter);
    if (of_parts.contains(tensor.unsafeGetTensorImpl())) continue;  // has been checked
    TORCH_CHECK_VALUE(tensor.device() == device_ || tensor.is_meta() || options_.device_id, kClass,
                      ": parameter '", parameter.first, "' is on ", tensor.device(), ", and others are on ",
                      device_, "; a sharded model is on one device: with device_id all are moved there");
    TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, kClass, ": parameter '", parameter.first,
                      "' is sparse");
    TORCH_CHECK_VALUE(tensor.is_leaf(), kClass, ": parameter '", parameter.first, "' is no leaf");
    TORCH_CHECK_VALUE(!tensor.requires_grad() || !torch::autograd::impl::post_acc_grad_hooks(tensor), kClass,
                      ": parameter '", parameter.first,
                      "' has a post-accumulate-grad hook already; is its module wrapped in another ", kClass,
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
  }
  TORCH_CHECK(!sharded_.empty(), kClass, ": the module has no parameter that is not ignored");
}

void FsdpCore::log_strategy() const {
  if (units_) {
    LOCKSTEP_LOG(kInfo) << kClass << " of " << model_.name << ": " << sharded_.size() << " parameters in "
                        << model_.groups.size() << " groups are gathered from "
                        << weights_->group()->getSize() << " ranks, each of which has its rows on "
                        << weights_->rows_device() << "; " << name_of(options_.sharding_strategy);
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
  const WeightsOfParts of_parts = weights_of_parts();
  std::vector<WeightDtypes> dtypes;
  for (const auto& [name, tensor] : sharded_) {
    if (const auto found = of_parts.find(tensor.unsafeGetTensorImpl()); found != of_parts.end()) {
      dtypes.push_back(found->second->dtypes);
      continue;
    }
    const at::ScalarType own = tensor.scalar_type();
    const bool stays = !tensor.is_floating_point() || contains(model_.full_precision, tensor);
    const at::ScalarType seen = stays ? own : precision.param_dtype.value_or(own);
    dtypes.push_back(
        {.own = own, .seen = seen, .reduced = stays ? own : precision.reduce_dtype.value_or(seen)});
  }
  return dtypes;
}

void FsdpCore::cast_buffers() {
  if (!options_.mixed_precision.buffer_dtype) return;
  std::vector<at::Tensor> stay = model_.full_precision;
  for (const auto& module : options_.ignored_modules) {
    for (const auto& buffer : module->buffers()) stay.push_back(buffer);
  }
  for (auto& [name, buffer] : buffers_left()) {
    if (!buffer.is_floating_point() || contains(stay, buffer)) continue;
    buffer_dtypes_.emplace(name, buffer.scalar_type());
    buffer.set_data(buffer.detach().to(*options_.mixed_precision.buffer_dtype));
  }
}

/// By the parameters' places in sharded_.
std::vector<std::vector<size_t>> FsdpCore::places_of_groups() const {
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  for (size_t i = 0; i < sharded_.size(); ++i) places.emplace(sharded_[i].second.unsafeGetTensorImpl(), i);
  const auto tensors = by_name(model_.parameters);
  std::vector<std::vector<size_t>> groups;
  for (const auto& group : model_.groups) {
    std::vector<size_t> members;
    for (const std::string& name : group.parameters)
      members.push_back(places.at(tensors.at(name).unsafeGetTensorImpl()));
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

std::unique_ptr<ShardedWeights> FsdpCore::make_weights(
    const std::vector<WeightDtypes>& dtypes, const std::optional<std::filesystem::path>& offload) const {
  if (!are_to_be_gathered()) return std::make_unique<ShardedWeights>(sharded_, dtypes, groups_, offload);
  std::vector<std::string> names;
  for (const auto& group : model_.groups) names.push_back(group.module.empty() ? model_.name : group.module);
  return std::make_unique<GatheredWeights>(
      sharded_, dtypes, groups_, device_, places_of_groups(), std::move(names),
      options_.limit_all_gathers ? std::optional<size_t>(2) : std::nullopt, offload);
}

/// Else ranks would see each other's rows at other places.
void FsdpCore::verify_same_layout(const std::vector<std::vector<size_t>>& groups,
                                  const std::vector<WeightDtypes>& dtypes) const {
  std::string own = options_.sync_module_states ? "synced" : "own";
  if (are_to_be_gathered()) {
    own +=
        " gathered on " + c10::DeviceTypeName(device_.type(), true) + " " +
        std::to_string(static_cast<int>(options_.sharding_strategy)) +
        (options_.backward_prefetch ? std::to_string(static_cast<int>(*options_.backward_prefetch)) : "-") +
        (options_.forward_prefetch ? "forward" : "") + (options_.limit_all_gathers ? "limited" : "");
  }
  const WeightsOfParts of_parts = weights_of_parts();
  for (size_t i = 0; i < dtypes.size(); ++i) {
    own += std::string(" ") + toString(dtypes[i].seen) + "/" + toString(dtypes[i].reduced);
    if (of_parts.contains(sharded_[i].second.unsafeGetTensorImpl())) own += " wrapped";
  }
  if (!options_.sync_module_states) {
    for (const bool without_values : without_values_) own += without_values ? " meta" : " real";
    for (const auto& buffer : buffers_without_values_) own += " " + buffer.first;
  }
  for (const auto& members : groups) {
    own += "\n";
    for (const size_t place : members) own += " " + std::to_string(place);
  }
  const std::string first = broadcast_bytes(own, options_.process_group);
  run_on_all(options_.process_group, "to be wrapped", [&] {
    TORCH_CHECK(
        own == first, kClass,
        ": rank 0 has other groups of parameters, other dtypes, other tensors on the meta device, other "
        "wrapped modules, another sync_module_states or gathers in another way; give all ranks the same "
        "options, and "
        "freeze the same parameters; with sync_module_states rank 0 alone may have values");
  });
}

void FsdpCore::collect_leaves() {
  std::unordered_set<const c10::TensorImpl*> named;
  for (const auto& [name, parameter] : model_.parameters) {
    if (!named.insert(parameter.unsafeGetTensorImpl()).second) continue;
    const ShardedWeight* const weight = weights_->find(name);
    if (weight == nullptr) ignored_.push_back(parameter);
    parameters_.emplace_back(name, weight == nullptr ? parameter : weight->shard);
  }
}

}  // namespace lockstep
