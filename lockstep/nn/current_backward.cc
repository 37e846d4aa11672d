#include <cstddef>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/nn/current_backward.h>

namespace lockstep {
namespace {

using torch::autograd::Engine;
using torch::autograd::GraphTask;

/// What autograd keeps of the backward. It shows some of its members alone, so the whole is found from where one of them lies.
GraphTask& current_graph_task() {
  const auto* member = torch::autograd::get_current_graph_task_exec_info();
  TORCH_INTERNAL_ASSERT(member != nullptr, "this thread runs no part of a backward");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t kPlace = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  auto* const address = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(member)) - kPlace;
  return *reinterpret_cast<GraphTask*>(address);
}

}  // namespace

void enter_backward_phase(bool from_any_thread) {
  thread_local int told = -1;  // the backward
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(told, task) == task) return;
  enter_phase(TrainingPhase::kBackward, from_any_thread);
  // After the callbacks that are queued until the end, in which reductions end.
  Engine::get_default_engine().queue_callback([from_any_thread] {
    Engine::get_default_engine().queue_callback(
        [from_any_thread] { enter_phase(TrainingPhase::kOptimizer, from_any_thread); });
  });
}

void on_failed_backward(std::function<void(const std::string& text)> listener) {
  const auto listen = [listener = std::move(listener)](at::ivalue::Future& end) {
    if (end.hasError()) listener(text_of(end.exception_ptr()));
  };
  current_graph_task().future_result_->addCallback(listen, /*uses_future=*/false);
}

}  // namespace lockstep
