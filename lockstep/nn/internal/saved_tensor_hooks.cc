#include <mutex>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/nn/internal/saved_tensor_hooks.h>

namespace lockstep::nn::internal {
namespace {

thread_local SavedTensorHooks* current_hooks = nullptr;

class EngineWithHooks final : public torch::autograd::Engine {
 public:
  /// Torch starts an engine's threads once in a process, so it has done that for its own engine after a first backward.
  EngineWithHooks() {
    initialize_device_threads_pool();
    if (!thread_pool_shared_) start_device_threads();
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current_hooks == nullptr ? nullptr : current_hooks->make_hooks();
  }
};

/// Never destroyed: its threads for devices are not joined before the process ends, as torch's own are not.
torch::autograd::Engine& engine_with_hooks() {
  static auto* engine = new EngineWithHooks;
  return *engine;
}

void install_engine() {
  static std::once_flag once;
  std::call_once(once, [] {
    TORCH_CHECK(&torch::autograd::Engine::get_default_engine() == &torch::autograd::Engine::get_base_engine(),
                "activation checkpointing in C++ needs torch's own autograd engine, but this process has "
                "another one, "
                "such as Python's; in Python use torch.utils.checkpoint");
    torch::autograd::set_default_engine_stub(engine_with_hooks);
  });
}

}  // namespace

SavedTensorHooksScope::SavedTensorHooksScope(SavedTensorHooks& source) {
  install_engine();
  before_ = std::exchange(current_hooks, &source);
}

SavedTensorHooksScope::~SavedTensorHooksScope() {
  current_hooks = before_;
}

}  // namespace lockstep::nn::internal
