#pragma once

#include <functional>
#include <string>

#include <torch/csrc/autograd/graph_task.h>

// The backward of which this thread runs a part, as a hook or a graph's function does.
namespace lockstep {

/// Whether there is one; also in a forward that is computed again for it (activation checkpoints). Thread-safe.
inline bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

/// From now on training is in its backward phase (training_phases.h), and in the optimizer's after the callbacks that this
/// backward queues until its end. Told once by each thread. `from_any_thread`: as enter_phase() has it.
void enter_backward_phase(bool from_any_thread);

/// When this backward ends by an exception, `listener` is given its text, before backward() throws it, in the thread where it
/// came up. The program may catch the exception, so that nothing else shows that the end will not come. The listener must
/// not throw.
void on_failed_backward(std::function<void(const std::string& text)> listener);

}  // namespace lockstep
