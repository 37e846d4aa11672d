#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/parallel/ddp/reducer/gradient_hooks.h>

namespace lockstep {
namespace {

struct BeforeGradient final : torch::autograd::FunctionPreHook {
  BeforeGradient(std::weak_ptr<GradientObserver> observer, size_t parameter)
      : observer_(std::move(observer)), parameter_(parameter) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& inputs) override {
    if (auto observer = observer_.lock()) observer->before_gradient(parameter_);
    return inputs;
  }

 private:
  std::weak_ptr<GradientObserver> observer_;
  size_t parameter_;
};

struct AfterGradient final : torch::autograd::FunctionPostHook {
  AfterGradient(std::weak_ptr<GradientObserver> observer, size_t parameter)
      : observer_(std::move(observer)), parameter_(parameter) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (auto observer = observer_.lock()) {
      observer->on_gradient(parameter_, inputs.empty() ? at::Tensor() : inputs.front());
    }
    return outputs;
  }

 private:
  std::weak_ptr<GradientObserver> observer_;
  size_t parameter_;
};

}  // namespace

void GradientHooks::attach(std::weak_ptr<GradientObserver> observer,
                           const std::vector<at::Tensor>& parameters) {
  observer_ = std::move(observer);
  for (size_t parameter = 0; parameter < parameters.size(); ++parameter) {
    // An intrusive_ptr since torch 2.13, a shared_ptr before: the type is deduced.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[parameter]);
    TORCH_INTERNAL_ASSERT(accumulator);
    auto* node = accumulator.get();
    const auto hooks = hook(*node, parameter);
    // A hook lives as long as its node, so the node is held; both go with this object.
    removers_.push_back(std::shared_ptr<void>(nullptr, [node, hooks, keep = std::move(accumulator)](void*) {
      std::erase_if(node->pre_hooks(), [&](const auto& each) { return each.get() == hooks.first; });
      node->del_post_hook(hooks.second);
    }));
  }
}

std::vector<std::shared_ptr<void>> GradientHooks::attach_to_current(
    const std::vector<at::Tensor>& parameters) {
  std::vector<std::shared_ptr<void>> kept;
  accumulators_.clear();
  for (size_t parameter = 0; parameter < parameters.size(); ++parameter) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters[parameter]);
    hook(*accumulator, parameter);
    kept.push_back(std::make_shared<decltype(accumulator)>(std::move(accumulator)));
  }
  return kept;
}

/// Returns what tells the hooks from others on this node.
std::pair<const void*, uintptr_t> GradientHooks::hook(torch::autograd::Node& accumulator, size_t parameter) {
  accumulators_.emplace(&accumulator, parameter);
  auto before = std::make_unique<BeforeGradient>(observer_, parameter);
  const torch::autograd::FunctionPreHook* pre_hook = before.get();
  accumulator.add_pre_hook(std::move(before));
  return {pre_hook, accumulator.add_post_hook(std::make_unique<AfterGradient>(observer_, parameter))};
}

}  // namespace lockstep
