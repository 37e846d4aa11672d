#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/class_name.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>

// How the weights of wrappers within a module become those of the one around it.
namespace lockstep {

using fsdp::internal::kClass;
using fsdp::internal::ShardedWeight;

/// The ranks own the same rows of the parts' weights as of the whole's, so that the parts' rows become the whole's.
void FsdpCore::check_parts() const {
  for (const auto& [name, wrapper] : model_.parts) {
    TORCH_CHECK_VALUE(!name.empty(), kClass, ": the module is a ", kClass, " itself");
    TORCH_CHECK_VALUE(
        !options_.auto_wrap_policy, kClass, ": the module's '", name, "' is a ", kClass,
        " itself, so an auto_wrap_policy can't choose among the modules; leave the policy out, or the "
        "wrapper within (lambda_auto_wrap_policy() chooses modules one by one)");
    for (const auto& ignored : options_.ignored_modules) {
      for (const auto& module : ignored->modules()) {
        TORCH_CHECK_VALUE(dynamic_cast<const fsdp::AnyWrapper*>(module.get()) != wrapper.get(), kClass,
                          ": ignored_modules has '", name, "', which is a ", kClass,
                          " itself; ignore a module that is not wrapped");
      }
    }
    TORCH_CHECK_VALUE(wrapper->core_ != nullptr, kClass, ": the module's '", name, "' is a part of another ",
                      kClass, " already, or was, and has no weights; make the module anew");
    TORCH_CHECK_VALUE(wrapper->core_.use_count() == 1, kClass,
                      ": an optimizer or a no_sync() of the module's '", name,
                      "' lives; make the optimizer of the outermost ", kClass);
    const FsdpCore& part = *wrapper->core_;
    const auto& options = part.options_;
    const auto check_same = [&, part_name = name](bool same, const char* what) {
      TORCH_CHECK_VALUE(same, kClass, ": the module's '", part_name, "' is a ", kClass, " with ", what,
                        " than the one around it; give both the same");
    };
    check_same(
        get_process_group_ranks(options.process_group) == get_process_group_ranks(options_.process_group),
        "another process_group");
    check_same(options.sharding_strategy == options_.sharding_strategy, "another sharding_strategy");
    check_same(options.gather == options_.gather, "another `gather`");
    check_same(part.device_ == device_, "another device");
    check_same(
        options.mixed_precision.keep_low_precision_grads == options_.mixed_precision.keep_low_precision_grads,
        "another mixed_precision.keep_low_precision_grads");
    part.check_usable();
  }
}

/// Before the group of what is left.
void FsdpCore::take_groups_of_parts() {
  std::vector<fsdp::ParameterGroup> groups;
  for (const auto& [name, wrapper] : model_.parts) {
    for (fsdp::ParameterGroup group : wrapper->core_->model_.groups) {
      group.module = group.module.empty() ? name : name + "." + group.module;
      for (std::string& parameter : group.parameters) parameter = name + "." + parameter;
      groups.push_back(std::move(group));
    }
  }
  model_.groups.insert(model_.groups.begin(), groups.begin(), groups.end());
}

/// By the module's parameters. Until they are taken over.
FsdpCore::WeightsOfParts FsdpCore::weights_of_parts() const {
  WeightsOfParts weights;
  for (const fsdp::Part& part : model_.parts) {
    for (const ShardedWeight& weight : part.wrapper->core_->weights_->all()) {
      weights.emplace(weight.parameter.unsafeGetTensorImpl(), &weight);
    }
  }
  return weights;
}

/// Without those of parts, which are as these have made them.
std::vector<NamedTensor> FsdpCore::buffers_left() const {
  std::unordered_set<const c10::TensorImpl*> of_parts;
  for (const fsdp::Part& part : model_.parts) {
    for (const NamedTensor& buffer : part.wrapper->module_buffers()) {
      of_parts.insert(buffer.second.unsafeGetTensorImpl());
    }
  }
  std::vector<NamedTensor> buffers = model_.buffers();
  std::erase_if(buffers, [&](const NamedTensor& buffer) {
    return of_parts.contains(buffer.second.unsafeGetTensorImpl());
  });
  return buffers;
}

/// Each part's weights are gone before the next one's are copied.
void FsdpCore::take_parts_over() {
  std::unordered_map<const c10::TensorImpl*, size_t> places;
  for (size_t i = 0; i < sharded_.size(); ++i) places.emplace(sharded_[i].second.unsafeGetTensorImpl(), i);
  std::vector<fsdp::Part> parts_of_parts;
  for (const auto& [name, wrapper] : model_.parts) {
    const FsdpCore& part = *wrapper->core_;
    for (const ShardedWeight& weight : part.weights_->all()) {
      weights_->take_rows(places.at(weight.parameter.unsafeGetTensorImpl()), weight.shard.detach());
    }
    for (const auto& [buffer, dtype] : part.buffer_dtypes_)
      buffer_dtypes_.emplace(name + "." + buffer, dtype);
    for (const auto& [inner, of_inner] : part.model_.parts)
      parts_of_parts.push_back({name + "." + inner, of_inner});
    wrapper->core_.reset();
  }
  model_.parts.insert(model_.parts.end(), parts_of_parts.begin(), parts_of_parts.end());
}

}  // namespace lockstep
