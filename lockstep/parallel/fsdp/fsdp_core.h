#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/nn/named_tensor.h>
#include <lockstep/parallel/fsdp/options.h>
#include <lockstep/serialization/state_dict.h>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

namespace fsdp {

/// A rank's part of a whole tensor.
struct ShardedTensor {
  at::Tensor
      local;  ///< rows [row, row + local.size(0)) of the whole; for a number it has one element, or none
  int64_t row = 0;
  std::vector<int64_t> global_sizes;  ///< of the whole
};
using ShardedStateDict = std::vector<std::pair<std::string, ShardedTensor>>;

namespace internal {
class GradientReduction;
class ShardedWeights;
class WeightWindows;
}  // namespace internal

}  // namespace fsdp

/// FullyShardedDataParallel without the module's type: what happens around forward, backward and step, on named tensors.
/// Used by one thread at a time, but for evaluation in other threads, which may be refused.
class FsdpCore final {
 public:
  /// What it must know of the module.
  struct Model {
    std::vector<NamedTensor> parameters;  ///< in definition order, shared ones as often as named
    std::function<std::vector<NamedTensor>()> buffers;  ///< as they are now
    std::vector<fsdp::ParameterGroup> groups;           ///< all of the parameters that are not ignored
    std::string name;                                   ///< the class's
  };

  /// Collective. See FullyShardedDataParallel.
  FsdpCore(Model model, FullyShardedDataParallelOptions options);
  FsdpCore(const FsdpCore&) = delete;
  FsdpCore& operator=(const FsdpCore&) = delete;
  ~FsdpCore();

  /// Runs forward while the weights do not change. Throws when the last backward failed, and when a parameter of the module
  /// has other memory.
  void run_forward(const std::function<void()>& forward);
  bool prepares_inputs() const;
  at::Tensor prepare_input(const at::Tensor& tensor) const;

  void enter_no_sync();
  void leave_no_sync();

  /// This rank's rows, leaves for an optimizer: of each sharded parameter, in definition order.
  std::vector<NamedTensor> shards() const;
  /// Runs what changes shards while no rank reads the weights, and shows all ranks what it has made. Collective.
  void write(const std::function<void()>& change);
  at::Tensor clip_grad_norm_(double max_norm, double norm_type);
  /// Runs `action` while the module's parameters have whole values of their own. Collective.
  void summon_full_params(const std::function<void()>& action, bool writeback);

  std::vector<NamedTensor> full_state_dict(bool rank0_only);
  void load_full_state_dict(const std::vector<NamedTensor>& state);
  fsdp::ShardedStateDict sharded_state_dict() const;
  void load_sharded_state_dict(const fsdp::ShardedStateDict& state);
  StateDict full_optim_state_dict(const torch::optim::Optimizer& optimizer) const;
  void load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state) const;

  const ProcessGroup& process_group() const { return options_.process_group; }
  const FullyShardedDataParallelOptions& options() const { return options_; }

 private:
  void check_options();
  void collect_parameters();
  void log_strategy() const;
  void cast_buffers() const;
  std::vector<std::vector<size_t>> reduced_groups() const;
  StateDict map_optim_state(const StateDict& state,
                            const std::function<at::Tensor(size_t, const at::Tensor&)>& change) const;

  Model model_;
  FullyShardedDataParallelOptions options_;
  std::vector<NamedTensor> sharded_;  // each parameter once
  int no_sync_depth_ = 0;
  std::unique_ptr<fsdp::internal::ShardedWeights> weights_;
  std::unique_ptr<fsdp::internal::WeightWindows> windows_;
  std::shared_ptr<fsdp::internal::GradientReduction> reduction_;  // goes first
};

}  // namespace lockstep
