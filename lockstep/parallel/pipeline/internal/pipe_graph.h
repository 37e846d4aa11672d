#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/process/thread_team.h>
#include <lockstep/parallel/pipeline/internal/pipe_mailboxes.h>

/// Backward through a pipe. Each cell's autograd graph is cut off from those of other cells, so that the
/// partitions' backwards can run in threads of their own; one node in the caller's graph stands for all of
/// them.
namespace lockstep::pipeline::internal {

/// The graph of one cell.
struct PipeCell {
  torch::autograd::edge_list
      inputs;  // where the gradient of each tensor that came in arrives; invalid where none is wanted
  torch::autograd::edge_list outputs;  // where that of each tensor that went out begins; likewise
};

/// A tensor with the data of `tensor`, at which a graph begins: the gradient arrives at `edge`. In-place
/// changes of both are seen by both, as if nothing were cut. Without gradients it is `tensor` itself, and
/// `edge` stays invalid.
at::Tensor cut(const at::Tensor& tensor, torch::autograd::Edge& edge);
/// Where the tensor's gradient goes; invalid if it needs none.
torch::autograd::Edge edge_of(const at::Tensor& tensor);

struct PipePlace {
  at::Device device = at::kCPU;
  std::string name;  // "partition 1 (layers 2 to 4) on cpu"
};

/// "partition 1 (layers 2 to 4) on cpu, micro-batch 0 of 4"
std::string name_of(PipeCellId cell, const std::vector<PipePlace>& places, size_t micro_batches);

/// One forward's graphs. Belongs to the node that stands for them, and goes with it.
struct PipeGraph : torch::CustomClassHolder {
  std::vector<std::vector<PipeCell>>
      cells;  // by micro-batch, by partition; none once backward has used them up
  size_t micro_batches = 0;
  std::vector<PipePlace> places;
  std::shared_ptr<ThreadTeam> threads;

  torch::autograd::edge_list parameters;                     // each once
  std::vector<std::vector<size_t>> parameters_of_partition;  // indices
  std::vector<bool> is_shared;                               // whether several partitions have the parameter

  // Until the node is made.
  std::vector<at::Tensor>
      node_inputs;  // the micro-batches' tensors that need gradients, in order, and the parameters
  std::vector<at::Tensor> node_outputs;  // of all micro-batches
};

/// The outputs of each micro-batch, as functions of the graph's node_inputs. Those that need no gradient come
/// back as they are.
std::vector<std::vector<at::Tensor>> join_cells(const c10::intrusive_ptr<PipeGraph>& graph,
                                                std::vector<std::vector<at::Tensor>> outputs);

}  // namespace lockstep::pipeline::internal
