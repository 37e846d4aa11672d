#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Copies of the tensors, all made by one node of the graph. When backward reaches any of them, it runs
/// through that node and so through the graphs of the others, too, with no gradient where the loss does not
/// use them: so every parameter that forward used is reached, if only without a gradient.
/// torch/nn/parallel/distributed.py, _DDPSink.
std::vector<at::Tensor> join_in_graph(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
