#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/nn/collective_optimizer.h>
#include <lockstep/nn/model_tensors.h>
#include <lockstep/nn/named_tensor.h>
#include <lockstep/parallel/fsdp/any_wrapper.h>
#include <lockstep/parallel/fsdp/options.h>
#include <lockstep/parallel/fsdp/sharded_tensor.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/state_loading.h>

namespace torch::optim {
class Optimizer;
}

namespace lockstep {

namespace fsdp {

/// What make_optimizer() makes, of whatever class.
class OptimizerOfRows : public CollectiveOptimizer {};

namespace internal {
class GatheredUnits;
class GradientReduction;
class OffloadedTensors;
class ShardGroups;
class ShardedWeights;
class WeightWindows;
struct ShardedWeight;
struct WeightDtypes;
}  // namespace internal

}  // namespace fsdp

/// FullyShardedDataParallel without the module's type: what happens around forward, backward and step, on named tensors.
/// Used by one thread at a time, but for forward without backward and states that need no communication.
class FsdpCore final {
 public:
  /// What it must know of the module.
  struct Model {
    std::vector<NamedTensor> parameters;  ///< in definition order, shared ones as often as named
    std::function<std::vector<NamedTensor>()> buffers;  ///< as they are now
    std::vector<fsdp::ParameterGroup>
        groups;  ///< all of the parameters that are not ignored, but for those of parts
    std::vector<fsdp::InitUnit> units;  ///< in which tensors on the meta device get values
    std::vector<fsdp::Part> parts;      ///< whose weights and groups it takes over
    std::vector<at::Tensor>
        full_precision;  ///< parameters and buffers that mixed precision leaves as they are
    std::string name;    ///< the class's
  };

  /// Collective. See FullyShardedDataParallel.
  FsdpCore(Model model, FullyShardedDataParallelOptions options);
  FsdpCore(const FsdpCore&) = delete;
  FsdpCore& operator=(const FsdpCore&) = delete;
  ~FsdpCore();

  /// Runs forward while the weights do not change. Throws when the last backward failed, and when a parameter of the module
  /// has other memory.
  void run_forward(const std::function<void()>& forward);
  /// The same of a part, which may be called within the whole's.
  void run_forward_of_part(const std::function<void()>& forward);

  void enter_no_sync();
  void leave_no_sync();
  /// Drop what has added up under no_sync: all of it, or that of an optimizer's parameters.
  void drop_sums();
  void drop_sums(const torch::optim::Optimizer& optimizer);

  /// The leaves for an optimizer, in definition order: this rank's rows of each sharded parameter, and the ignored ones.
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  /// Runs what changes shards while no rank reads the weights, and shows all ranks what it has made. When `check` throws on
  /// some rank before, all throw. Collective.
  void write(
      const std::function<void()>& change, const std::function<void()>& check = [] {});
  /// write() of an optimizer's step. With cpu_offload its state goes to a file, parameter by parameter where it is new.
  void step(torch::optim::Optimizer& optimizer, const std::function<void()>& update);
  at::Tensor clip_grad_norm_(double max_norm, double norm_type);
  /// Runs `action` while the module's parameters have whole values of their own. Collective.
  void summon_full_params(const std::function<void()>& action, bool writeback);

  StateDict full_state_dict(bool rank0_only);
  void load_full_state_dict(const StateDict& state);
  fsdp::ShardedStateDict sharded_state_dict() const;
  void load_sharded_state_dict(const std::vector<fsdp::ShardedStateDict>& states);
  StateDict full_optim_state_dict(const torch::optim::Optimizer& optimizer, bool rank0_only) const;
  PreparedLoad prepare_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state,
                                             const LoadStateDictOptions& options) const;
  void load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state) const;
  StateDict sharded_optim_state_dict(const torch::optim::Optimizer& optimizer) const;
  void load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
                                     const std::vector<StateDict>& states) const;

  const ProcessGroup& process_group() const { return options_.process_group; }
  const FullyShardedDataParallelOptions& options() const { return options_; }
  /// Whether parameters are gathered for each forward and backward, so that these are collective.
  bool gathers() const { return units_ != nullptr; }
  /// Where the module computes.
  c10::Device device() const { return device_; }

 private:
  friend class fsdp::AnyWrapper;

  c10::Device choose_device() const;
  void check_options() const;
  void check_parts() const;
  void check_usable() const;
  void take_groups_of_parts();
  using WeightsOfParts = std::unordered_map<const c10::TensorImpl*, const fsdp::internal::ShardedWeight*>;
  WeightsOfParts weights_of_parts() const;
  void take_parts_over();
  std::vector<NamedTensor> buffers_left() const;
  void collect_parameters();
  void collect_tensors_without_values();
  bool gives_values() const;
  void wrap(std::vector<std::vector<size_t>> groups, const std::vector<fsdp::internal::WeightDtypes>& dtypes);
  void move_values();
  void init(const fsdp::InitUnit& unit) const;
  void place_buffers();
  bool state_is_offloaded(const torch::optim::Optimizer& optimizer) const;
  void offload_state(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter);
  void step_one_by_one(torch::optim::Optimizer& optimizer, const std::function<void()>& update);
  at::Tensor clip_gradients(double max_norm, double norm_type);
  PreparedLoad prepare_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
                                                const std::vector<StateDict>& states) const;
  void load_on_all(const std::function<PreparedLoad()>& prepare) const;
  std::vector<fsdp::internal::WeightDtypes> dtypes() const;
  void collect_leaves();
  void verify_same_layout(const std::vector<std::vector<size_t>>& groups,
                          const std::vector<fsdp::internal::WeightDtypes>& dtypes) const;
  ModelTensors leaves_as_model() const;
  at::Tensor count_nonzero_gradients() const;
  void log_strategy() const;
  void cast_buffers();
  bool are_to_be_gathered() const;
  std::vector<std::vector<size_t>> places_of_groups() const;
  std::vector<std::vector<size_t>> reduced_groups(
      const std::vector<fsdp::internal::WeightDtypes>& dtypes) const;
  std::unique_ptr<fsdp::internal::ShardedWeights> make_weights(
      const std::vector<fsdp::internal::WeightDtypes>& dtypes,
      const std::optional<std::filesystem::path>& offload) const;
  /// One tensor of a weight's state: state["state"][parameter][what].
  struct PlaceInState {
    size_t weight;
    const std::string& parameter;
    const std::string& what;
  };
  using ChangeOfPart = std::function<c10::IValue(const PlaceInState& place, const c10::IValue& value)>;
  StateDict map_optim_state(const StateDict& state, const ChangeOfPart& change,
                            const std::vector<KeyMap>& key_map = {}) const;
  void check_is_of_rows(const torch::optim::Optimizer& optimizer) const;
  StateDict optim_state_of_rows(const torch::optim::Optimizer& optimizer) const;
  void tell(HeldTensors& held) const;

  Model model_;
  FullyShardedDataParallelOptions options_;
  c10::Device device_ = at::kCPU;
  std::vector<NamedTensor> sharded_;  // each parameter once
  std::vector<bool> without_values_;  // of these: on the meta device
  std::vector<NamedTensor> buffers_without_values_;
  std::vector<NamedTensor> parameters_;                            // the leaves
  std::vector<at::Tensor> ignored_;                                // those of them that are not sharded
  std::unordered_map<std::string, at::ScalarType> buffer_dtypes_;  // their own, of those that were cast
  int no_sync_depth_ = 0;
  std::atomic<int64_t> marked_ = -1;  // after which reduced backward mark_step() was called
  std::shared_ptr<const fsdp::internal::ShardGroups> groups_;
  std::unique_ptr<fsdp::internal::ShardedWeights> weights_;
  std::unique_ptr<fsdp::internal::WeightWindows> windows_;
  std::unique_ptr<fsdp::internal::OffloadedTensors> offloaded_;  // with cpu_offload
  std::shared_ptr<fsdp::internal::GradientReduction> reduction_;
  std::shared_ptr<fsdp::internal::GatheredUnits> units_;  // null where nothing is gathered; goes first
  const TellingHeldTensors telling_held_{[this](HeldTensors& held) { tell(held); }};
};

}  // namespace lockstep
