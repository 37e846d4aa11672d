#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/base/process/thread_team.h>
#include <lockstep/parallel/pipeline/internal/pipe_graph.h>
#include <lockstep/parallel/pipeline/internal/pipe_mailboxes.h>
#include <lockstep/parallel/pipeline/pipe_options.h>

namespace lockstep::pipeline::internal {

/// One forward through the partitions.
struct PipeRun {
  std::vector<torch::nn::AnyValue> outputs;  // of each micro-batch
  c10::intrusive_ptr<PipeGraph> graph;       // null where gradients are off
};

/// Pipe without the types of its arguments and outputs.
class PipeCore {
 public:
  /// Calls the first layer with these tensors in the arguments.
  using Enter = std::function<torch::nn::AnyValue(torch::nn::AnyModule&, const std::vector<at::Tensor>&)>;

  PipeCore(const torch::nn::Sequential& module, const std::vector<int64_t>& balance, PipeOptions options);

  /// `tensors`: of the arguments, whole.
  PipeRun forward(const Enter& enter, const std::vector<at::Tensor>& tensors);
  /// The micro-batches' outputs in one, each along its first dimension; `outputs` are the tensors of
  /// run.outputs.
  static std::vector<at::Tensor> gather(const PipeRun& run, std::vector<std::vector<at::Tensor>> outputs);

  const PipeOptions& options() const { return options_; }  // with the device of each partition

 private:
  /// A cell's input: how to call its first layer, and with which tensors, on the partition's device.
  struct Parcel {
    Enter enter;
    std::vector<at::Tensor> tensors;
  };

  std::vector<std::vector<at::Tensor>> split(const std::vector<at::Tensor>& tensors) const;
  c10::intrusive_ptr<PipeGraph> new_graph(const std::vector<std::vector<at::Tensor>>& micro_batches) const;
  torch::nn::AnyValue compute(PipeCellId id, Parcel parcel, size_t micro_batches, PipeGraph* graph);
  Parcel parcel_of(torch::nn::AnyValue value, PipeCellId id, PipeGraph* graph) const;
  void check_places() const;
  std::vector<at::Tensor> shared_generators() const;

  PipeOptions options_;
  std::vector<std::vector<torch::nn::AnyModule>> partitions_;
  std::vector<PipePlace> places_;
  std::shared_ptr<ThreadTeam> threads_;
};

}  // namespace lockstep::pipeline::internal
