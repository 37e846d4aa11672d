#pragma once

#include <cstdint>

namespace lockstep {

/// How many calls of activation_checkpoint() this thread has made with gradients enabled. For what runs one graph in
/// several parts, and so would have each checkpoint computed again several times.
int64_t activation_checkpoint_count();

}  // namespace lockstep
