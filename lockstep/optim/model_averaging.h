#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/collectives/process_group.h>

/// Averaging parameters now and then, instead of gradients in each step.
/// torch/distributed/algorithms/model_averaging. All members of the group call the same functions in the same
/// order; they throw what all_reduce throws.
namespace lockstep {

/// Replaces each parameter by its mean over the group, by one all-reduce of a flat copy (as much memory again
/// as the parameters). Parameters of several dtypes are averaged in the one that holds all of them. Does
/// nothing on ranks that are no member. `process_group`: empty means the default group.
void average_parameters(const std::vector<at::Tensor>& params, const ProcessGroup& process_group = {});

/// Those that have a gradient.
std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& params);
std::vector<at::Tensor> get_params_to_average(const std::vector<torch::optim::OptimizerParamGroup>& params);

/// average_parameters() of those that have a gradient.
void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& params,
                                            const ProcessGroup& process_group = {});
void average_parameters_or_parameter_groups(const std::vector<torch::optim::OptimizerParamGroup>& params,
                                            const ProcessGroup& process_group = {});

/// Counts steps and averages in some of them. Without a `process_group` it averages over the default group, whichever that is
/// in each step: another one after shrink_group(). Used by one thread at a time.
class ModelAverager {
 public:
  explicit ModelAverager(ProcessGroup process_group = {});
  ModelAverager(const ModelAverager&) = delete;
  ModelAverager& operator=(const ModelAverager&) = delete;
  virtual ~ModelAverager() = default;

  /// Called once in each iteration, after the optimizer's step: averages a model's parameters, or those of an
  /// optimizer's groups, if it is time (those that have a gradient), and counts the step.
  void average_parameters(const std::vector<at::Tensor>& params);
  void average_parameters(const std::vector<torch::optim::OptimizerParamGroup>& params);

  /// Steps counted so far; belongs into checkpoints, as PostLocalSGDOptimizer does.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }
  const ProcessGroup& process_group() const { return process_group_; }  ///< as it was given

 protected:
  /// The group to average over in this step; nothing for none.
  virtual std::optional<ProcessGroup> group_of_step(int64_t step) = 0;

 private:
  template <class Params>
  void average_if_it_is_time(const Params& params);

  ProcessGroup process_group_;
  int64_t step_ = 0;
};

/// Averages over the group every `period` steps, after `warmup_steps`: in steps warmup_steps, warmup_steps +
/// period, …, counted from 0. For post-local SGD (https://arxiv.org/abs/1808.07217), where DDP averages
/// gradients within subgroups only. torch.distributed.algorithms.model_averaging.averagers.
class PeriodicModelAverager final : public ModelAverager {
 public:
  /// Throws c10::ValueError for a period below 1 and a negative warmup_steps.
  explicit PeriodicModelAverager(int64_t period, int64_t warmup_steps = 0, ProcessGroup process_group = {});

 private:
  std::optional<ProcessGroup> group_of_step(int64_t step) override;

  int64_t period_;
  int64_t warmup_steps_;
};

/// Averages over groups of several sizes at several periods: {{4, 8}, {16, 16}} over groups of 8 neighbouring
/// ranks every 4 steps, and over all 16 every 16 steps, then without the smaller ones. Hierarchical SGD
/// (https://arxiv.org/abs/2010.12998);
/// torch/distributed/algorithms/model_averaging/hierarchical_model_averager.py.
class HierarchicalModelAverager final : public ModelAverager {
 public:
  /// `period_group_size_dict`: (period, group size) in ascending order; the last size is that of
  /// `process_group`. Makes groups, so all processes of the default group call it. Throws c10::ValueError for
  /// an empty list, a first period below 1, another last size, and a negative warmup_steps, and what
  /// new_subgroups() throws. When the default group has become another one, the first average in that makes
  /// the groups anew, with the same sizes. Where it has fewer ranks they do not fit, and that average throws
  /// c10::ValueError on all ranks before anything is changed or counted.
  explicit HierarchicalModelAverager(const std::vector<std::pair<int64_t, int>>& period_group_size_dict,
                                     int64_t warmup_steps = 0, ProcessGroup process_group = {});

  /// Each period with this rank's group.
  const std::vector<std::pair<int64_t, ProcessGroup>>& period_process_group_dict() const { return groups_; }

 private:
  std::optional<ProcessGroup> group_of_step(int64_t step) override;
  void make_groups(const ProcessGroup& parent);

  std::vector<std::pair<int64_t, int>> sizes_;  // by period
  ProcessGroup parent_;                         // of groups_
  std::vector<std::pair<int64_t, ProcessGroup>> groups_;
  int64_t warmup_steps_;
};

}  // namespace lockstep
