#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Logging.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/nn/join.h>
#include <lockstep/nn/step_snapshot.h>
#include <lockstep/parallel/ddp/grad_bucket.h>
#include <lockstep/parallel/ddp/hooks/optimizer_overlap_hook.h>
#include <lockstep/parallel/ddp/options.h>

namespace lockstep {

class DelayedAllReduce;
class MixedPrecisionParameters;
class Reducer;
class Recoverable;

/// Takes the place of the broadcast of buffers: makes all ranks' buffers what they are to be. The end of the
/// next backward awaits the futures. torch's register_buffer_comm_hook.
using BufferCommHook = std::function<std::vector<HookFuture>(const std::vector<NamedTensor>& buffers)>;
enum class BufferCommHookLocation { kPreForward, kPostForward };

/// DistributedDataParallel without the module: what happens around forward and backward, on named tensors.
/// The template over the module's type is only a shell around it. Used by one thread at a time.
class DdpCore final {
 public:
  /// What it must know of the module.
  struct Model {
    std::vector<NamedTensor> parameters;  ///< in definition order, shared ones as often as named
    std::function<std::vector<NamedTensor>()> buffers;  ///< as they are now
    std::vector<std::string> sparse;                    ///< names of those with sparse gradients
    std::string name;                                   ///< the class's
    bool has_sync_batch_norm = false;
  };

  /// Verifies and broadcasts unless told not to; collective. `owner` is what takes part in a Join. See
  /// DistributedDataParallel.
  DdpCore(Model model, DistributedDataParallelOptions options, const Joinable& owner);
  DdpCore(const DdpCore&) = delete;
  DdpCore& operator=(const DdpCore&) = delete;
  ~DdpCore();

  /// Around forward: enter(), forward, leave() with its tensors, or abandon() when it has thrown, or what follows it up to the
  /// end of backward. `searched`: whether forward's result could be searched for tensors.
  void enter();
  void leave(const std::vector<at::Tensor>& outputs, bool searched);
  void abandon();
  /// Whether forward's results are to be joined in the graph; see join_in_graph().
  bool joins_outputs() const;
  /// Whether forward's inputs go through prepare_input(): moved to the device of device_ids, and cast to
  /// mixed precision's dtype.
  bool prepares_inputs() const;
  at::Tensor prepare_input(const at::Tensor& tensor) const;

  /// A scope of no_sync() begins. Scopes may overlap, and end in any order.
  void enter_no_sync() {
    ++no_sync_scopes_;
    synchronise_ = false;
  }
  void leave_no_sync() { synchronise_ = --no_sync_scopes_ == 0; }

  void register_comm_hook(CommunicationHook hook, const std::string& name);
  OptimizerPerParameter register_fused_optim(const OptimizerPerParameter::Factory& optim,
                                             const std::optional<std::vector<at::Tensor>>& optim_params);
  void register_buffer_comm_hook(BufferCommHook hook, BufferCommHookLocation location);
  void set_static_graph();
  bool will_sync_module_buffers() const;
  c10::DDPLoggingData logging_data() const;
  /// See DistributedDataParallel::update_process_group.
  int64_t update_process_group(const ProcessGroup& group, const std::vector<Recoverable>& states);
  void reset();

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options);
  at::Device device() const { return device_; }

  /// Throws when there is none because all parameters are delayed.
  Reducer& reducer() const;
  const DistributedDataParallelOptions& options() const { return options_; }
  /// Those whose gradients are averaged, delayed ones too, in the module's order: all but parameters_to_ignore.
  const std::vector<at::Tensor>& averaged_parameters() const { return averaged_; }
  /// Those that are synchronised: all but parameters_to_ignore.
  std::vector<NamedTensor> current_buffers() const;

 private:
  class Shadow;

  void check_parameters();
  void choose_devices(const std::vector<NamedTensor>& parameters);
  void sync_initial_state();
  bool ignored(const std::string& name) const;
  void sync_buffers_at(BufferCommHookLocation location, bool joined = false);
  bool agree_on_synchronising(bool joined);
  bool is_shadowed_already() const;
  void before_forward();
  void set_divisor();
  void take_snapshot();
  void undo_step();
  void tell(HeldTensors& held) const;

  Model model_;
  std::vector<at::Tensor> all_parameters_;  // those of parameters_to_ignore, too
  std::vector<at::Tensor> averaged_;
  DistributedDataParallelOptions options_;
  const Joinable& owner_;
  at::Device device_ = at::kCPU;  // the first parameter's
  bool is_multi_device_module_ = false;
  std::optional<at::Device> input_device_;  // device_ids[0]
  bool forward_sync_buffers_ = true;
  bool init_sync_buffers_ = true;
  std::shared_ptr<Reducer> reducer_;  // null when all parameters are delayed
  std::shared_ptr<DelayedAllReduce> delayed_;
  std::unique_ptr<MixedPrecisionParameters> mixed_precision_;
  BufferCommHook buffer_hook_;
  BufferCommHookLocation buffer_hook_location_ = BufferCommHookLocation::kPreForward;
  std::shared_ptr<StepSnapshot> snapshot_;
  int64_t snapshot_round_ = -1;
  int64_t marked_round_ = -1;                 // at whose begin mark_step() was called
  int64_t no_sync_scopes_ = 0;                // that live
  bool mixed_ = false;                        // another rank's state is in place in part
  bool synchronise_ = true;                   // require_backward_grad_sync
  bool buffers_may_differ_ = true;            // require_forward_param_sync
  bool divide_by_initial_world_size_ = true;  // in the Join that it is in
  const TellingHeldTensors telling_held_{[this](HeldTensors& held) { tell(held); }};
};

}  // namespace lockstep
