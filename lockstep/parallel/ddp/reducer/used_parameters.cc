#include <unordered_set>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/parallel/ddp/reducer/used_parameters.h>

namespace lockstep {

std::vector<size_t> find_unused_parameters(
    const std::vector<at::Tensor>& outputs,
    const std::unordered_map<const torch::autograd::Node*, size_t>& accumulators) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> queue;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) queue.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      visit(torch::autograd::impl::gradient_edge(output).function.get());
    }
  }
  while (!queue.empty()) {
    const auto* node = queue.back();
    queue.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  std::vector<bool> used(accumulators.size(), false);
  for (const auto& [node, index] : accumulators) used[index] = seen.contains(node);
  std::vector<size_t> unused;
  for (size_t index = 0; index < used.size(); ++index) {
    if (!used[index]) unused.push_back(index);
  }
  return unused;
}

}  // namespace lockstep
