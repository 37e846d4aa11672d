#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/ops/equal.h>
#include <ATen/ops/isclose.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/device/generator_state.h>
#include <lockstep/parallel/data_parallel/internal/replica_state.h>

namespace lockstep::data_parallel::internal {
namespace {

using torch::autograd::impl::set_version_counter;
using torch::autograd::impl::version_counter;
using torch::nn::Module;

/// Puts the default CPU generator back to where it was.
class KeepDefaultGenerator {
 public:
  KeepDefaultGenerator() { state_.take(); }
  KeepDefaultGenerator(const KeepDefaultGenerator&) = delete;
  KeepDefaultGenerator& operator=(const KeepDefaultGenerator&) = delete;
  ~KeepDefaultGenerator() { state_.restore(); }

 private:
  GeneratorStates state_;
};

bool holds_the_same(const at::Tensor& one, const at::Tensor& other) {
  if (one.sizes() != other.sizes() || one.scalar_type() != other.scalar_type()) return false;
  const auto here = other.to(one.device());
  return at::equal(one, here) ||
         (one.is_floating_point() && at::isclose(one, here, 0, 0, /*equal_nan=*/true).all().item<bool>());
}

bool shares_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.layout() == at::kStrided && other.layout() == at::kStrided && one.is_alias_of(other) &&
         one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.scalar_type() == other.scalar_type();
}

/// Copies the original's values into the replica's own memory. That alone does not count as a change for
/// autograd: where it saved the replica's values for a backward to come, they are mostly the same still.
void copy_values(const at::Tensor& replica, const at::Tensor& original) {
  const auto values = original.detach();
  if (replica.layout() != at::kStrided || replica.sizes() != values.sizes() ||
      replica.scalar_type() != values.scalar_type() || shares_memory(replica, values)) {
    replica.set_data(values.to(replica.device(), /*non_blocking=*/true, /*copy=*/true));
  } else {
    replica.variable_data().copy_(values, /*non_blocking=*/true);
  }
}

}  // namespace

ReplicaState::ReplicaState(std::shared_ptr<Module> module, std::vector<at::Device> devices, Clone clone)
    : module_(std::move(module)), devices_(std::move(devices)), clone_(std::move(clone)) {
  replicate();
}

ReplicaState::Parts ReplicaState::parts_of(const Module& module) {
  return {module.modules(), module.parameters(), module.buffers()};
}

void ReplicaState::replicate() {
  original_ = parts_of(*module_);
  replicas_.clear();
  const KeepDefaultGenerator keep;
  for (size_t i = 0; i < devices_.size(); ++i) {
    try {
      replicas_.push_back(parts_of(*clone_(static_cast<int>(i), devices_[i])));
    } catch (...) {
      rethrow_with_context("DataParallel clones its module for each of its " +
                           std::to_string(devices_.size()) + " replicas");
    }
    ++made_;
    check_is_copy(replicas_.back());
  }
}

/// A torch::nn::Cloneable clones its submodules, but passes over those that can't be cloned without a word.
void ReplicaState::check_is_copy(const Parts& copy) const {
  const auto names = module_->named_modules().keys();
  for (size_t i = 0; i < original_.modules.size(); ++i) {
    const auto& original = *original_.modules[i];
    const auto refuse = [&](const std::string& what) {
      const auto type = c10::demangle(typeid(original).name());
      TORCH_CHECK(false, "DataParallel can't replicate submodule '", names[i], "': clone() of ", type, " ",
                  what, ". Subclass torch::nn::Cloneable<", type,
                  "> instead of torch::nn::Module, and register all parameters, buffers and submodules in "
                  "reset()");
    };
    if (i >= copy.modules.size()) refuse("left it out");
    const auto& other = *copy.modules[i];
    if (typeid(original) != typeid(other)) refuse("made " + c10::demangle(typeid(other).name()) + " of it");
    const auto compare = [&](const auto& mine, const auto& theirs, const std::string& kind) {
      if (mine.size() != theirs.size()) refuse("didn't copy its " + kind + "s");
      for (size_t k = 0; k < mine.size(); ++k) {
        if (!holds_the_same(mine[k].value(), theirs[k].value())) {
          refuse("didn't copy its " + kind + " '" + mine[k].key() + "'");
        }
      }
    };
    compare(original.named_parameters(/*recurse=*/false), other.named_parameters(/*recurse=*/false),
            "parameter");
    compare(original.named_buffers(/*recurse=*/false), other.named_buffers(/*recurse=*/false), "buffer");
  }
  TORCH_CHECK(copy.modules.size() == original_.modules.size() &&
                  copy.parameters.size() == original_.parameters.size() &&
                  copy.buffers.size() == original_.buffers.size(),
              "DataParallel can't replicate ", module_->name(), ": its clone has ", copy.modules.size(),
              " modules, ", copy.parameters.size(), " parameters and ", copy.buffers.size(),
              " buffers, where it has ", original_.modules.size(), ", ", original_.parameters.size(), " and ",
              original_.buffers.size(), "; register all of them in reset()");
}

bool ReplicaState::is_changed(const Parts& now) const {
  return now.modules != original_.modules || now.parameters.size() != original_.parameters.size() ||
         now.buffers.size() != original_.buffers.size();
}

void ReplicaState::bring_in_step(int count) {
  auto now = parts_of(*module_);
  for (const auto* tensors : {&now.parameters, &now.buffers}) {
    for (const auto& tensor : *tensors) {
      TORCH_CHECK(tensor.device() == devices_[0], "module must have its parameters and buffers on device ",
                  devices_[0].str(),
                  " (device_ids[0]) but found one of them on device: ", tensor.device().str());
    }
  }
  if (is_changed(now)) replicate();
  original_ = std::move(now);

  const c10::AutoGradMode no_grad(false);
  for (int i = 0; i < count; ++i) {
    const auto& replica = replicas_[static_cast<size_t>(i)];
    const bool same_device = devices_[static_cast<size_t>(i)] == devices_[0];
    const auto follow = [&](const at::Tensor& tensor, const at::Tensor& original, bool is_private) {
      if (!same_device || is_private) {
        copy_values(tensor, original);
      } else if (!shares_memory(tensor, original)) {
        tensor.set_data(original);
      }
      // One counter tells both that autograd's saved values were changed in place.
      if (!is_private) set_version_counter(tensor, version_counter(original));
      if (tensor.requires_grad() != original.requires_grad()) {
        tensor.set_requires_grad(original.requires_grad());
      }
    };
    for (size_t k = 0; k < original_.parameters.size(); ++k) {
      follow(replica.parameters[k], original_.parameters[k], /*is_private=*/false);
    }
    for (size_t k = 0; k < original_.buffers.size(); ++k) {
      const auto& original = original_.buffers[k];
      follow(replica.buffers[k], original, /*is_private=*/i > 0 && !original.requires_grad());
    }
    for (size_t k = 0; k < original_.modules.size(); ++k) {
      // train() goes down the tree; the modules below come later in this order, and get their own mode then.
      const bool training = original_.modules[k]->is_training();
      if (replica.modules[k]->is_training() != training) replica.modules[k]->train(training);
    }
  }
}

std::vector<at::Tensor> ReplicaState::sources() const {
  std::vector<at::Tensor> answer;
  std::unordered_set<at::TensorImpl*> seen;
  for (const auto* tensors : {&original_.parameters, &original_.buffers}) {
    for (const auto& tensor : *tensors) {
      if (tensor.requires_grad() && seen.insert(tensor.unsafeGetTensorImpl()).second)
        answer.push_back(tensor);
    }
  }
  return answer;
}

void ReplicaState::append_leaves(int replica, size_t first, ReplicaGraph& graph) const {
  std::unordered_map<at::TensorImpl*, size_t> sources;
  std::unordered_set<at::TensorImpl*> seen;
  const auto append = [&](const std::vector<at::Tensor>& originals, const std::vector<at::Tensor>& tensors) {
    for (size_t k = 0; k < originals.size(); ++k) {
      if (!originals[k].requires_grad()) continue;
      const size_t source = sources.emplace(originals[k].unsafeGetTensorImpl(), sources.size()).first->second;
      if (!seen.insert(tensors[k].unsafeGetTensorImpl()).second) continue;
      graph.leaves.push_back(tensors[k]);
      graph.sources.push_back(first + source);
    }
  };
  const auto& own = replicas_[static_cast<size_t>(replica)];
  append(original_.parameters, own.parameters);
  append(original_.buffers, own.buffers);
}

}  // namespace lockstep::data_parallel::internal
