#pragma once

// What happens in the backward of which this thread runs a part, as a hook or a graph's function does.
namespace lockstep {

/// From now on training is in its backward phase (training_phases.h), and in the optimizer's behind the callbacks that this
/// backward queues until its end. Told once by each thread. `from_any_thread`: as enter_phase() has it.
void enter_backward_phase(bool from_any_thread);

}  // namespace lockstep
