#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// The parameters, by index, that backward from `outputs` will not reach. `accumulators`: each parameter's
/// node that ends the graph, and its index. Walks the whole graph: microseconds per hundred nodes.
/// torch/csrc/distributed/c10d/reducer.cpp, search_unused_parameters.
std::vector<size_t> find_unused_parameters(
    const std::vector<at::Tensor>& outputs,
    const std::unordered_map<const torch::autograd::Node*, size_t>& accumulators);

}  // namespace lockstep
