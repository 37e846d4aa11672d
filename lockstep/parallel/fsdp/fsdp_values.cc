#include <algorithm>
#include <sys/mman.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/nn/module.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/state_sync.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/class_name.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

// How the values of a module come to where all ranks share them.
namespace lockstep {

using fsdp::InitUnit;
using fsdp::internal::kClass;
using fsdp::internal::replace_data;
using fsdp::internal::run_on_all;

namespace {

bool has_values(const at::Tensor& tensor) {
  return !tensor.is_meta();
}

/// Memory on the CPU for a while. Large tensors have pages of their own: malloc would keep, between small blocks that
/// stay, as much as all modules had one after the other.
at::Tensor empty_for_a_while(const at::Tensor& like) {
  constexpr size_t kLeastMapped = 64 << 10;
  const size_t bytes = like.numel() * like.element_size();
  if (bytes < kLeastMapped) return at::empty_like(like, like.options().device(at::kCPU));
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, kClass, ": there are no ",
                   format_bytes(static_cast<int64_t>(bytes)), " for the values of a module");
  return at::from_blob(
      memory, like.sizes(), [bytes](void* mapped) { ::munmap(mapped, bytes); },
      at::TensorOptions(like.scalar_type()));
}

}  // namespace

/// Rank 0 of the group gives those of modules on the meta device, for all.
bool FsdpCore::gives_values() const {
  return options_.process_group->getRank() == 0;
}

void FsdpCore::collect_tensors_without_values() {
  std::unordered_set<const c10::TensorImpl*> in_units;
  for (const InitUnit& unit : model_.units) {
    const bool can_init = options_.param_init_fn || fsdp::can_reset_parameters(*unit.module);
    for (const auto* tensors : {&unit.parameters, &unit.buffers}) {
      for (const at::Tensor& tensor : *tensors) {
        const bool is_first = in_units.insert(tensor.unsafeGetTensorImpl()).second;
        TORCH_CHECK_VALUE(
            has_values(tensor) || !is_first || can_init || !gives_values(), kClass, ": module '", unit.name,
            "' of class ", unit.module->name(),
            " has tensors on the meta device, and is no class of LibTorch's; give a param_init_fn "
            "that sets its values");
      }
    }
  }
  std::unordered_set<const c10::TensorImpl*> sharded;
  for (const auto& [name, tensor] : sharded_) {
    sharded.insert(tensor.unsafeGetTensorImpl());
    without_values_.push_back(!has_values(tensor));
  }
  const auto check_ignored = [](const NamedTensor& tensor, const auto& known) {
    TORCH_CHECK_VALUE(has_values(tensor.second) || known.contains(tensor.second.unsafeGetTensorImpl()),
                      kClass, ": '", tensor.first,
                      "' is on the meta device and is ignored; give it values before the module is wrapped");
  };
  for (const NamedTensor& parameter : model_.parameters) check_ignored(parameter, sharded);
  for (const NamedTensor& buffer : model_.buffers()) {
    check_ignored(buffer, in_units);
    if (!has_values(buffer.second)) buffers_without_values_.push_back(buffer);
  }
}

/// Moves the values to where all share them, one parameter after the other, so that beside it there is never more than what
/// modules had. Of modules on the meta device rank 0 makes them then.
void FsdpCore::move_values() {
  take_parts_over();
  const bool has_work = std::ranges::count(without_values_, true) > 0 || !buffers_without_values_.empty();
  const bool rank_0_inits = broadcast_bytes(has_work ? "1" : "0", groups_->all()) == "1";
  std::unordered_map<const c10::TensorImpl*, size_t> open;
  for (size_t i = 0; i < sharded_.size(); ++i) {
    if (!weights_->all()[i].shard.defined()) open.emplace(sharded_[i].second.unsafeGetTensorImpl(), i);
  }
  for (const InitUnit& unit : model_.units) {
    if (rank_0_inits) run_on_all(groups_->all(), "to give a module values", [&] { init(unit); });
    for (const at::Tensor& parameter : unit.parameters) {
      const auto found = open.find(parameter.unsafeGetTensorImpl());
      if (found == open.end()) continue;  // ignored, or one that another module has, too
      const size_t place = found->second;
      open.erase(found);
      weights_->move_value(place, options_.sync_module_states || without_values_[place]);
    }
  }
  TORCH_INTERNAL_ASSERT(open.empty());
  const CallSite site("FSDP's first values");
  weights_->group()->barrier()->wait();
}

/// On rank 0. What has values keeps them, as a parameter that a module before has, too; they are elsewhere while the module's
/// are set.
void FsdpCore::init(const InitUnit& unit) const {
  if (!gives_values()) return;
  std::vector<at::Tensor> tensors = unit.parameters;
  tensors.insert(tensors.end(), unit.buffers.begin(), unit.buffers.end());
  if (std::ranges::all_of(tensors, has_values)) return;
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (has_values(tensor)) {
      kept.emplace_back(tensor, tensor.detach());
      tensor.set_data(at::empty_like(tensor));
    } else {
      replace_data(tensor, empty_for_a_while(tensor));
    }
  }
  if (options_.param_init_fn) {
    options_.param_init_fn(*unit.module);
  } else {
    fsdp::reset_parameters(*unit.module);
  }
  for (const auto& [tensor, data] : kept) tensor.set_data(data);
}

/// Where the module computes, with rank 0's values where they are to be the same.
void FsdpCore::place_buffers() {
  std::unordered_set<const c10::TensorImpl*> were_without_values;
  for (const auto& [name, buffer] : buffers_without_values_)
    were_without_values.insert(buffer.unsafeGetTensorImpl());
  std::unordered_set<const c10::TensorImpl*> ignored;
  for (const auto& module : options_.ignored_modules) {
    for (const auto& buffer : module->buffers()) ignored.insert(buffer.unsafeGetTensorImpl());
  }
  run_on_all(groups_->all(), "to allocate memory", [&] {
    for (const auto& [name, buffer] : model_.buffers()) {
      if (ignored.contains(buffer.unsafeGetTensorImpl())) continue;
      if (!has_values(buffer)) {
        replace_data(buffer, at::empty_like(buffer, buffer.options().device(device_)));
      } else if (buffer.device() != device_ &&
                 (options_.device_id || were_without_values.contains(buffer.unsafeGetTensorImpl()))) {
        replace_data(buffer, buffer.detach().to(device_));
      }
    }
  });
  broadcast_coalesced(options_.sync_module_states ? buffers_left() : buffers_without_values_, groups_->all());
}

}  // namespace lockstep
