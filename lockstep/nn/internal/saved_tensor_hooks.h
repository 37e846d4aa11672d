#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace lockstep::nn::internal {

/// Makes the hooks of one tensor that an operation saves for its backward.
class SavedTensorHooks {
 public:
  virtual ~SavedTensorHooks() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// While it lives, tensors that operations of this thread save for backward go through hooks of `source`, which outlives
/// it. The innermost one counts. torch.autograd.graph.saved_tensors_hooks, for which LibTorch has no way in C++ but an
/// engine: the first one makes the process's autograd engine one that asks for hooks, and is otherwise torch's. Throws
/// c10::Error where the process has another engine than torch's own, as in Python.
class SavedTensorHooksScope {
 public:
  explicit SavedTensorHooksScope(SavedTensorHooks& source);
  SavedTensorHooksScope(const SavedTensorHooksScope&) = delete;
  SavedTensorHooksScope& operator=(const SavedTensorHooksScope&) = delete;
  ~SavedTensorHooksScope();

 private:
  SavedTensorHooks* before_;
};

}  // namespace lockstep::nn::internal
