#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/optim/recoverable.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep {

/// torch.amp.GradScaler's arguments, with its names and defaults, and one more.
struct GradScalerOptions {
  c10::DeviceType device = c10::DeviceType::CUDA;  ///< where the losses are
  double init_scale = 65536.0;
  double growth_factor = 2.0;      ///< of the scale, after growth_interval steps without overflow
  double backoff_factor = 0.5;     ///< of the scale, after a step with one
  int64_t growth_interval = 2000;  ///< steps
  bool enabled = true;             ///< false: step() steps, and all else does nothing
  /// Ranks with different gradients, which are to skip the same steps; empty for the default group. Leave it
  /// out where all have the same ones, as DistributedDataParallel leaves them.
  std::optional<ProcessGroup> process_group = {};
};

/// Scales losses so that small gradients don't vanish in float16, and leaves out the steps in which large
/// ones overflowed: torch/amp/grad_scaler.py.
///
///     lockstep::GradScaler scaler({.device = at::kCPU});
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);                                   // only to clip, or to look at gradients
///     lockstep::clip_grad_norm_(model.parameters(), 1.0);
///     scaler.step(optimizer);                                       // left out if a gradient is inf or NaN
///     scaler.update();                                              // once, after all optimizers
///
/// All ranks must leave out the same steps. After DistributedDataParallel's backward() they do, and nothing is exchanged:
/// an infinity on one rank is one in all ranks' averages. Where ranks step on gradients of their own, `process_group`
/// makes them agree, by one all-reduce of two numbers in each unscale_(). So does, without being told, an optimizer whose
/// step() communicates (CollectiveOptimizer): ZeroRedundancyOptimizer, PostLocalSGDOptimizer, FullyShardedDataParallel's.
/// Then all members call unscale_() (or step()) equally often, a rank without gradients too. Scales start equal and stay
/// so, to the bit. Not inside of a Join with such an optimizer.
///
/// When agreeing fails, unscale_() and step() throw what all_reduce() throws; the scaler is then as it was
/// before the iteration, and gradients are undefined: zero_grad() and do the step again. After another
/// failure in the middle of an iteration call reset(). In DistributedDataParallel::update_process_group()
/// list it with the optimizers: a rank that is behind gets its state. A skipped step counts as done there.
///
/// Used by one thread at a time. Optimizers must live until update(). The texts of errors are torch's.
class GradScaler {
 public:
  /// With a CUDA device type and no CUDA it is disabled, with a warning. Throws c10::ValueError for a
  /// growth_factor of at most 1, a backoff_factor of at least 1, and on ranks that are not in process_group.
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// `outputs` times the scale. The first call puts the scale on the device of the outputs.
  at::Tensor scale(const at::Tensor& outputs);
  /// The same for what holds tensors: vectors, tuples, maps and whatever else tensor_tree.h lists, nested.
  /// Throws c10::ValueError for tensors behind pointers and views, which another tensor owns.
  template <class Outputs>
  requires(can_find_tensors<Outputs> && !internal::holds_none<Outputs>() &&
           !std::derived_from<Outputs, at::Tensor>) Outputs scale(Outputs outputs) {
    if (!enabled_) return outputs;
    int64_t foreign = 0;
    for_each_tensor(std::as_const(outputs), [&](const at::Tensor&) { ++foreign; });
    for_each_owned_tensor(std::as_const(outputs), [&](const at::Tensor&) { --foreign; });
    check_owned(foreign);
    std::optional<MultiDeviceReplicator> scales;
    for_each_owned_tensor(outputs, [&](at::Tensor& tensor) {
      start_at(tensor.device());
      if (!scales) scales.emplace(scale_);
      tensor = tensor * scales->on(tensor.device());
    });
    return outputs;
  }

  /// Divides the gradients of the optimizer's parameters by the scale, and notes whether one of them is
  /// infinite or NaN. At most once between updates; step() does it otherwise. Throws c10::ValueError for
  /// float16 gradients (parameters stay in float32), c10::Error for a ZeroRedundancyOptimizer that steps
  /// within backward().
  void unscale_(torch::optim::Optimizer& optimizer);

  /// optimizer.step() unless a gradient is infinite or NaN, on all ranks that agree; returns what it returns,
  /// or an undefined tensor. Throws c10::Error for a closure, for a second step before update(), and when
  /// there are no gradients.
  at::Tensor step(torch::optim::Optimizer& optimizer, torch::optim::Optimizer::LossClosure closure = nullptr);

  /// Ends the iteration: lowers the scale if a step was skipped, or raises it after growth_interval
  /// iterations without.
  void update();
  /// Ends the iteration with this scale. A tensor of one element on a device of the scaler's type.
  void update(double new_scale);
  void update(const at::Tensor& new_scale);

  /// Forgets what happened since the last update(): to do an iteration again that failed in the middle.
  void reset() { optimizers_.clear(); }

  double get_scale() const;  ///< waits for a GPU; 1 if disabled
  double get_growth_factor() const { return growth_factor_; }
  void set_growth_factor(double new_factor) { growth_factor_ = new_factor; }
  double get_backoff_factor() const { return backoff_factor_; }
  void set_backoff_factor(double new_factor) { backoff_factor_ = new_factor; }
  int64_t get_growth_interval() const { return growth_interval_; }
  void set_growth_interval(int64_t new_interval) { growth_interval_ = new_interval; }
  bool is_enabled() const { return enabled_; }

  /// Python's: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; empty if disabled. To
  /// be taken after update().
  StateDict state_dict() const;
  /// Does nothing if disabled. Throws c10::Error for an empty state and c10::ValueError for one that lacks a
  /// value; nothing has changed then.
  void load_state_dict(const StateDict& state);
  /// For DistributedDataParallel::update_process_group(group, {optimizer, scaler}). This must outlive it.
  operator Recoverable();  // NOLINT(google-explicit-constructor)

  /// The members of another group agree from now on; after a failure, with the group of the ranks that are
  /// left.
  void update_process_group(const ProcessGroup& process_group);

 private:
  /// Copies of a number on the devices where it is needed, made at the first use; _MultiDeviceReplicator.
  class MultiDeviceReplicator {
   public:
    explicit MultiDeviceReplicator(at::Tensor original) : original_(std::move(original)) {}
    at::Tensor& on(const c10::Device& device);
    std::vector<at::Tensor> copies() const;

   private:
    at::Tensor original_;
    std::vector<std::pair<c10::Device, at::Tensor>> copies_;
  };

  enum class Stage { kReady, kUnscaled, kStepped };
  struct OptimizerState {
    Stage stage = Stage::kReady;
    std::vector<at::Tensor> found_infs;  // 1 or 0 each, on the gradients' devices
  };

  static void check_owned(int64_t foreign);
  void start_at(const c10::Device& device);
  void check_scale(const char* function) const;
  int64_t growth_tracker() const;
  std::vector<at::Tensor> unscale_gradients(const torch::optim::Optimizer& optimizer) const;
  std::optional<ProcessGroup> group_of(const torch::optim::Optimizer& optimizer) const;
  std::vector<at::Tensor> agree(const std::vector<at::Tensor>& found_infs, const ProcessGroup& group) const;

  bool enabled_;
  c10::DeviceType device_;
  double init_scale_;
  double growth_factor_;
  double backoff_factor_;
  int64_t growth_interval_;
  int64_t init_growth_tracker_ = 0;
  std::optional<ProcessGroup> process_group_;
  at::Tensor scale_;           // float32, undefined until the first scale()
  at::Tensor growth_tracker_;  // int32: iterations without overflow in a row
  std::unordered_map<const torch::optim::Optimizer*, OptimizerState> optimizers_;  // since the last update
};

}  // namespace lockstep
