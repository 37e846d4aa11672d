#include <mutex>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <lockstep/optim/internal/scheduled_groups.h>

namespace lockstep::internal {
namespace {

using torch::optim::Optimizer;

/// The live ones. An optimizer outlives its schedulers, so an address means one optimizer.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const Optimizer*, std::weak_ptr<ScheduledGroups>> of_optimizer;
};

Registry& registry() {
  static Registry registry;
  return registry;
}

/// Calls `visit(impl, version)` for all parameters that count their changes.
template <class Visit>
void for_each_version(const Optimizer& optimizer, Visit visit) {
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.defined() && !parameter.is_inference()) {
        visit(parameter.unsafeGetTensorImpl(), static_cast<uint32_t>(parameter._version()));
      }
    }
  }
}

/// Whether steps of this optimizer raise its parameters' versions. LibTorch's SGD writes through data(),
/// which has a version of its own; what others do is not known.
bool shows_its_steps(const Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::Adam*>(&optimizer) ||
         dynamic_cast<const torch::optim::AdamW*>(&optimizer) ||
         dynamic_cast<const torch::optim::RMSprop*>(&optimizer) ||
         dynamic_cast<const torch::optim::Adagrad*>(&optimizer);
}

}  // namespace

std::shared_ptr<ScheduledGroups> ScheduledGroups::of(Optimizer& optimizer) {
  const std::lock_guard lock(registry().mutex);
  std::weak_ptr<ScheduledGroups>& entry = registry().of_optimizer[&optimizer];
  auto groups = entry.lock();
  if (!groups) entry = groups = std::shared_ptr<ScheduledGroups>(new ScheduledGroups(optimizer));
  groups->groups_.resize(optimizer.param_groups().size());
  return groups;
}

ScheduledGroups::ScheduledGroups(Optimizer& optimizer)
    : optimizer_(optimizer), stepped_(!shows_its_steps(optimizer)) {
  for_each_version(optimizer, [&](const c10::TensorImpl* parameter, uint32_t version) {
    versions_.emplace(parameter, version);
  });
}

ScheduledGroups::~ScheduledGroups() {
  const std::lock_guard lock(registry().mutex);
  const auto entry = registry().of_optimizer.find(&optimizer_);
  // Another thread may have made a new one meanwhile.
  if (entry != registry().of_optimizer.end() && entry->second.expired()) registry().of_optimizer.erase(entry);
}

bool ScheduledGroups::optimizer_has_stepped() {
  if (stepped_) return true;
  for_each_version(optimizer_, [&](const c10::TensorImpl* parameter, uint32_t version) {
    const auto before = versions_.find(parameter);
    if (before != versions_.end() && before->second != version) stepped_ = true;
  });
  return stepped_;
}

}  // namespace lockstep::internal
