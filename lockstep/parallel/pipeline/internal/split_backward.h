#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

namespace lockstep::pipeline::internal {

struct InputBackward;

/// What is left of a backward when the gradients of the inputs are there: those of the weights. Keeps of the graph what that
/// needs. Used by one thread at a time.
class WeightBackward {
 public:
  /// Adds to the gradients of all leaves but the inputs. Once.
  void run();

 private:
  friend InputBackward backward_inputs(const torch::autograd::edge_list& roots,
                                       const torch::autograd::variable_list& gradients,
                                       const std::vector<at::Tensor>& inputs);
  using NodePtr = decltype(torch::autograd::Edge::function);

  /// Weights whose gradients can't be computed apart: they meet before they meet an input; or some are used several times.
  struct Group {
    std::vector<NodePtr> nodes;  // on a way to an input, with the weights beside it …
    std::vector<torch::autograd::variable_list> gradients;  // … and what came to each
    torch::autograd::edge_list roots;                       // of outputs that no input leads to
    torch::autograd::variable_list root_gradients;
    torch::autograd::edge_list weights;
  };
  std::vector<Group> groups_;  // at most one has several nodes: the last
};

struct InputBackward {
  std::vector<at::Tensor> gradients;  ///< of the inputs; undefined where none
  WeightBackward weights;
};

/// The first half of a backward, of zero bubble schedules: the gradients of `inputs` (leaves that require them), given those
/// of the outputs, `gradients[i]` of `roots[i]`. What the second half does not need of the graph is freed. Both halves together
/// give the bits of the whole backward; hooks on tensors between run in both. Where a weight is used several times, what lies
/// between is computed in both halves, too. After stage_backward_input() and stage_backward_weight() of
/// torch/distributed/pipelining/_backward.py, but also for outputs that no input leads to.
InputBackward backward_inputs(const torch::autograd::edge_list& roots,
                              const torch::autograd::variable_list& gradients,
                              const std::vector<at::Tensor>& inputs);

}  // namespace lockstep::pipeline::internal
