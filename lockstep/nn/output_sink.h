#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Copies of the tensors, with one node of the graph behind them all. When backward reaches any of them, it
/// runs through that node and so through what lies behind the others, too, with no gradient where the loss
/// does not use them: so every parameter that forward used reports, if only to say that it got nothing.
/// torch/nn/parallel/distributed.py, _DDPSink.
std::vector<at::Tensor> join_in_graph(const std::vector<at::Tensor>& tensors);

}  // namespace lockstep
