#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/training/training_phases.h>
#include <lockstep/nn/current_backward.h>

namespace lockstep {

using torch::autograd::Engine;

void enter_backward_phase(bool from_any_thread) {
  thread_local int told = -1;  // the backward
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(told, task) == task) return;
  enter_phase(TrainingPhase::kBackward, from_any_thread);
  // Behind the callbacks that are queued until the end, in which reductions end.
  Engine::get_default_engine().queue_callback([from_any_thread] {
    Engine::get_default_engine().queue_callback(
        [from_any_thread] { enter_phase(TrainingPhase::kOptimizer, from_any_thread); });
  });
}

}  // namespace lockstep
