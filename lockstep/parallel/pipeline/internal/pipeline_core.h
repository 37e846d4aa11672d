#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/pipeline/internal/tensor_messages.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>

namespace lockstep::pipeline::internal {

/// One weight that is parameters of several stages.
struct TiedWeight {
  std::string name;
  std::vector<int64_t> stages;    // ascending; a parameter that two stages of a rank share is there once
  std::vector<at::Tensor> local;  // of the stages that are here, by their places in `stages`; else undefined
};

/// What a pipeline is made of, as one rank knows it: its stages, which stage sends what to which, the schedule.
struct PipelineCore {
  /// Collective: see PipelineRunner.
  PipelineCore(std::vector<PipelineStage> own_stages, PipelineOptions given);

  /// In which other ranks may wait for this one.
  std::vector<ProcessGroup> groups() const;
  /// Ranks of this pipeline, and those of others that have this rank's stages, may wait for what does not come any more. Their
  /// errors have this rank's text, or the cause with which one of the groups has failed already.
  void fail(const std::string& text);

  /// The stage must be one of this rank's.
  const PipelineStage& stage(int64_t index) const { return stages[static_cast<size_t>(index / ranks)]; }
  int rank_of(int64_t index) const { return static_cast<int>(rank_of_stage(index, ranks)); }
  bool is_here(int64_t index) const { return rank_of(index) == rank; }
  /// Messages between two stages have this tag; backward ones go from a later stage to an earlier one.
  int tag_of(int64_t from, int64_t to, int64_t micro_batch) const;
  int tag_of_tied(int64_t from, int64_t to, size_t weight) const {
    return tag_of(from, to, options.n_microbatches + static_cast<int64_t>(weight));
  }
  /// Whether output number `output` of stage `from` goes to stage `to`.
  bool goes_to(int64_t from, size_t output, int64_t to) const;

  std::vector<PipelineStage> stages;  // of this rank, ascending
  PipelineOptions options;
  ProcessGroup group;
  int rank = 0;
  int64_t ranks = 1;
  int64_t num_stages = 1;
  std::vector<std::vector<std::vector<int64_t>>> outputs_to;  // by stage; empty: all to the next one
  std::vector<std::vector<int64_t>> sources, consumers;       // by stage, ascending
  std::vector<TiedWeight> tied;
  std::vector<PipelineAction> actions;
  std::unique_ptr<TensorMessages> messages;
  PipelineMemory memory;
  int64_t steps = 0;    // with backward, that are done
  std::string failure;  // of an earlier step; empty: none

 private:
  std::string own_fault() const;
  std::string fault_of_sync_batch_norms(const PipelineStage& stage) const;
  std::optional<c10::Device> agree_with_replicas();
  std::optional<c10::Device> agree();
  void check_replicas(const std::string& refused) const;
  void throw_if(const std::string& fault, size_t of_rank) const;
  std::set<std::pair<int, int>> ranks_that_send() const;
  void share_initial_values();
};

/// The average of parameters' gradients over their data parallel group, on its way. Those that have none on any rank get none.
class GradientAverage {
 public:
  GradientAverage(const std::vector<at::Tensor>& parameters, const ProcessGroup& group);
  void wait();

 private:
  /// Parameters of one dtype and device.
  struct Part {
    at::Tensor has_gradient;  // for each: 0 when it has none on any rank
    // Those that have none on this rank, by their index.
    std::vector<std::pair<size_t, at::Tensor>> without = {};
    Work work = {};
  };
  std::vector<Part> parts_;
};

/// Sums the gradients of tied weights over their stages. What they had before a step is put aside at the construction, so that
/// steps can accumulate, and put back by sum(), or without it at the end.
class TiedGradients {
 public:
  explicit TiedGradients(PipelineCore& core);
  TiedGradients(const TiedGradients&) = delete;
  TiedGradients& operator=(const TiedGradients&) = delete;
  ~TiedGradients();
  void sum();

 private:
  at::Tensor sum_of(const TiedWeight& weight, size_t index);
  void put_back(const at::Tensor& weight, at::Tensor& before, const at::Tensor& gradient);

  PipelineCore& core_;
  std::vector<std::vector<at::Tensor>> before_;
};

}  // namespace lockstep::pipeline::internal
