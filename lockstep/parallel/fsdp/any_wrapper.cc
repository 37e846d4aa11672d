#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/device/streams.h>
#include <lockstep/parallel/fsdp/any_wrapper.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/internal/class_name.h>

namespace lockstep::fsdp {
namespace {

using internal::kClass;
using torch::nn::Module;

std::shared_ptr<AnyWrapper> as_wrapper(const std::shared_ptr<Module>& module) {
  return std::dynamic_pointer_cast<AnyWrapper>(module);
}

template <class OfModule, class OfPart>
std::vector<NamedTensor> tensors_with_parts(const Module& module, const OfModule& of_module,
                                            const OfPart& of_part) {
  std::vector<NamedTensor> answer;
  for (const auto& item : module.named_modules()) {
    const std::string prefix = item.key().empty() ? "" : item.key() + ".";
    const auto add = [&](const std::string& name, const at::Tensor& tensor) {
      answer.emplace_back(prefix + name, tensor);
    };
    if (const auto wrapper = as_wrapper(item.value())) {
      for (const auto& [name, tensor] : of_part(*wrapper)) add(name, tensor);
    } else {
      for (const auto& own : of_module(*item.value())) add(own.key(), own.value());
    }
  }
  return answer;
}

}  // namespace

void AnyWrapper::set_core(std::shared_ptr<FsdpCore> core) {
  core_ = std::move(core);
  for (const Part& part : core_->model_.parts) part.wrapper->whole_ = core_;
}

const std::shared_ptr<FsdpCore>& AnyWrapper::core() const {
  TORCH_CHECK(!is_part(), kClass,
              ": this one is a part of the model that another one wraps, which has its parameters, its "
              "optimizer and its states; ask that one");
  return core_;
}

void AnyWrapper::run_forward(const std::function<void()>& forward) {
  if (!is_part()) return core_->run_forward(forward);
  const auto whole = whole_.lock();
  TORCH_CHECK(whole != nullptr, kClass,
              ": the one that this one is a part of is gone, and so are the weights");
  whole->run_forward_of_part(forward);
}

/// What the root's and the parts' flags say is torch's.
bool AnyWrapper::casts_inputs() const {
  return precision_.param_dtype &&
         (precision_.cast_forward_inputs || (!is_part() && precision_.cast_root_forward_inputs));
}

bool AnyWrapper::moves_inputs() const {
  return !is_part() && !core_->device().is_cpu();
}

at::Tensor AnyWrapper::prepare_input(const at::Tensor& tensor) const {
  const at::Tensor there = moves_inputs() ? moved_to(tensor, core_->device()) : tensor;
  return casts_inputs() && there.is_floating_point() ? there.to(*precision_.param_dtype) : there;
}

std::vector<Part> parts_of(const Module& module) {
  std::vector<Part> parts;
  std::unordered_set<const Module*> seen;
  for (const auto& item : module.named_modules()) {
    if (!seen.insert(item.value().get()).second) continue;
    if (auto wrapper = as_wrapper(item.value())) parts.push_back({item.key(), std::move(wrapper)});
  }
  return parts;
}

std::vector<NamedTensor> parameters_with_parts(const Module& module) {
  return tensors_with_parts(
      module, [](const Module& each) { return each.named_parameters(/*recurse=*/false); },
      [](const AnyWrapper& part) { return part.module_parameters(); });
}

std::vector<NamedTensor> buffers_with_parts(const Module& module) {
  return tensors_with_parts(
      module, [](const Module& each) { return each.named_buffers(/*recurse=*/false); },
      [](const AnyWrapper& part) { return part.module_buffers(); });
}

}  // namespace lockstep::fsdp
