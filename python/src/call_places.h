#pragma once

namespace lockstep::python {

/// From now on flight records name the line of the Python code that calls an operation: the innermost one that is
/// neither torch's nor this package's. Looking takes the GIL, which torch.distributed gives away before it calls the
/// engine. Threads without Python code, such as those of autograd for CUDA tensors, take no GIL and have no place. The GIL
/// must be held.
void watch_call_places();

}  // namespace lockstep::python
