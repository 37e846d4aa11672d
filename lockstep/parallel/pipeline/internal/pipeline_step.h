#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/parallel/pipeline/internal/pipeline_core.h>
#include <lockstep/parallel/pipeline/internal/split_backward.h>

namespace lockstep::pipeline::internal {

/// One step of a pipeline on one rank: runs the rank's actions in order. For one batch.
class PipelineStep {
 public:
  /// Throws c10::ValueError for inputs and targets that are missing or can't be cut into the micro-batches.
  PipelineStep(PipelineCore& core, bool has_backward, bool return_outputs, const Tensors& inputs,
               const at::Tensor& target);

  void run();
  /// For errors: "in 0B3, which waits for what 1B3 sends", or where else the step is.
  std::string place() const;

  Tensors merged_outputs() const;
  const Tensors& losses() const { return losses_; }

 private:
  /// A micro-batch of a stage between its forward and the end of its backward.
  struct Kept {
    Tensors inputs;                       // leaves; of stage 0 the caller's, on the stage's device
    std::vector<size_t> inputs_from;      // how many of them came from each source
    torch::autograd::edge_list outputs;   // or the loss; without a function where no gradient is required
    std::vector<int64_t> gradients_from;  // the consumers that send gradients
    at::Tensor seed;                      // of the loss
    WeightBackward weights;               // between the two halves of a split backward
    bool is_whole = false;                // backward is not split
    int64_t bytes = 0;                    // of the inputs that live
  };
  /// A tensor of the caller's that requires a gradient. Micro-batches share its graph, which must run once: their
  /// parts are leaves, and their gradients go into it together.
  struct Given {
    int64_t stage;
    at::Tensor whole;
    Tensors parts;
  };
  struct Asked {
    std::shared_ptr<TensorMessages::Receipt> receipt;
    std::string purpose;  // the action that will use it, for traces and flight records
  };
  using Place = std::pair<int64_t, int64_t>;  // stage and micro-batch

  Tensors cut(const at::Tensor& given, const std::string& name, int64_t stage);
  void run(const PipelineAction& action);
  void forward(const PipelineAction& action);
  void compute_loss(const PipelineAction& action, const Tensors& outputs, Kept& kept);
  void backward(const PipelineAction& action, Kept& kept);
  void backward_of_inputs(const PipelineAction& action, Kept& kept);
  void forget_inputs(Kept& kept);
  std::pair<torch::autograd::edge_list, Tensors> roots_of(const PipelineAction& action, Kept& kept);
  void send_gradients(const PipelineAction& action, const Kept& kept, const Tensors& gradients);
  void finish_weights(const PipelineAction& action);
  void finish_given(int64_t stage);

  int64_t micro_batches_of_a_round() const;
  int64_t most_ahead(int64_t from, int64_t to) const;
  void pass(int64_t from, int64_t to, int64_t micro_batch, Tensors tensors);
  Tensors take(int64_t from, int64_t to, int64_t micro_batch);
  Asked& ask(int64_t from, const PipelineAction& action);
  void ask_ahead(size_t next);

  PipelineCore& core_;
  const bool has_backward_;
  const bool return_outputs_;
  const int64_t round_;
  std::vector<Given> given_;
  std::vector<Tensors> inputs_;  // by micro-batch
  Tensors targets_;
  std::vector<Tensors> outputs_;
  Tensors losses_;
  std::optional<PipelineAction> action_;   // in progress
  std::optional<PipelineAction> awaited_;  // another rank's, for what it sends
  std::map<Place, Kept> kept_;
  std::map<int, Tensors> passed_;              // within this rank, by tag
  std::map<int, Asked> asked_;                 // by tag
  std::map<int64_t, int64_t> backwards_left_;  // by stage
  std::vector<GradientAverage> averages_;
  int64_t bytes_kept_ = 0;
};

}  // namespace lockstep::pipeline::internal
