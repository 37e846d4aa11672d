#pragma once

#include <torch/csrc/autograd/graph_task.h>

namespace lockstep {

/// Whether this thread runs a part of a backward, such as a hook, or a forward that is computed again for one (activation
/// checkpoints). Thread-safe.
inline bool is_in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

}  // namespace lockstep
