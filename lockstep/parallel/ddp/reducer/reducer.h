#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/parallel/ddp/options.h>
#include <lockstep/parallel/ddp/reducer/bucket_set.h>
#include <lockstep/parallel/ddp/reducer/bucket_sizes.h>
#include <lockstep/parallel/ddp/reducer/fingerprint.h>
#include <lockstep/parallel/ddp/reducer/gradient_hooks.h>
#include <lockstep/parallel/ddp/reducer/parameter_use.h>
#include <lockstep/parallel/ddp/reducer/reducer_settings.h>
#include <lockstep/parallel/ddp/reducer/reduction_round.h>
#include <lockstep/parallel/ddp/reducer/step_times.h>

namespace lockstep {

/// Averages gradients over a group while backward() is still computing others. docs/internals/reducer.md draws it.
///
/// Parameters are packed into *buckets*: flat memory that all ranks on the host see, cut into *slots*. The
/// kernels of backward() write gradients into their slots (GradientSlots); what lands elsewhere is copied
/// there when autograd has accumulated it. A full bucket is all-reduced at once, strictly in bucket order, by
/// the group's communication thread, or handed to a communication hook. The end of backward() waits for the
/// last one; gradients are then the averages, where they are. A gradient that the user holds, or whose memory
/// is the user's, stays the same tensor in the same memory, as in PyTorch.
///
/// A *round* is one such reduction of all parameters. It opens with the first gradient after a synchronised
/// forward and is finished by the callback that ends backward(). The first round uses one bucket and notes
/// the order in which gradients arrive; before the second forward buckets are built in rank 0's order. After
/// torch's reducer.cpp, whose errors it repeats with the parameters' names.
///
/// When a round fails, backward() throws the first cause, after `on_failure` has run; gradients are then
/// undefined, and update_process_group() makes it usable again.
///
/// On other devices than the CPU a bucket's reduction is ordered after the streams that its gradients came on, and
/// gradients are there in the order of the stream that was current when backward() was called, as all that
/// backward() leaves. They are copied into their slots, for their memory is the device's.
///
/// Used by one thread at a time, as a module is (autograd's threads for devices apart); several reducers may
/// work at once, each on a group of its own or in the same order on all ranks. Hooks hold it weakly.
class Reducer final : public std::enable_shared_from_this<Reducer>, public GradientObserver {
 public:
  using Parameter = ReducerSettings::Parameter;

  /// `parameters`: distinct, requiring gradients, the same on all ranks. `on_failure` runs before an error of
  /// a round leaves the reducer.
  static std::shared_ptr<Reducer> create(const std::vector<Parameter>& parameters,
                                         const DistributedDataParallelOptions& options,
                                         std::function<void()> on_failure = {});
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Reduces buckets by `hook` from now on. Once, before the first backward; and once after each
  /// update_process_group().
  void register_comm_hook(CommunicationHook hook, const std::string& name);
  /// Before the first backward; see the option.
  void set_static_graph();

  /// Before a synchronised forward. Throws if the last round is not finished: some parameters got no
  /// gradient; names them.
  void prepare_forward();
  /// Before every forward that may be followed by a backward: builds the buckets anew when that is due;
  /// collective then.
  void rebuild_buckets();
  /// After a forward: whether the backward passes to come are to reduce. `outputs`: forward's tensors, where
  /// they could be found; they tell when backward begins.
  void prepare_backward(bool synchronise, const std::vector<at::Tensor>& outputs);
  /// Leaves the round unfinished: what was launched is awaited, and its results are dropped.
  void reset();
  /// reset(), and the same parameters over another group, as new. A registered hook stays, with whatever
  /// group it has; register_comm_hook() replaces it.
  void update_process_group(const ProcessGroup& group);
  /// Times are taken in the first 10 rounds, and then in every so many.
  void set_sample_rate(int rounds);
  /// Throws if the last backward left a round unfinished, naming the parameters without a gradient.
  void check_finalized() const;

  // For ranks that have run out of inputs (join()):
  /// Takes part in one round, with zeros.
  void shadow_backward();
  /// The end of backward awaits these, too.
  void add_post_backward_futures(const std::vector<HookFuture>& futures);
  /// Divide the next round by this instead of the group's size; 0: by the group's size.
  void set_divisor(int64_t ranks);

  /// Called at the end of each backward, before its gradients are finished, and when a round fails.
  void set_on_backward_end(std::function<void()> callback);
  /// For mixed precision: gradients, of whatever dtype, are reduced in this one, and come out in the
  /// parameters' own.
  void set_reduce_dtype(at::ScalarType reduce);
  /// Watches the accumulators that the parameters have now, when their data were given another type: those of
  /// the forwards up to the next backward. Parameters have the same ones as long as the answer lives.
  [[nodiscard]] std::vector<std::shared_ptr<void>> watch_current_accumulators();

  /// The gradients' bytes in each bucket, in the order of their reduction.
  std::vector<size_t> bucket_bytes() const;
  /// Where gradients lie, which stays from step to step.
  std::vector<at::Tensor> bucket_memory() const;
  /// For tests: caps as if tuning had chosen them, at the next rebuild.
  void force_caps(const BucketCaps& caps);

  struct Report {
    std::vector<size_t> initial_bucket_bytes, bucket_bytes, bucket_parameters;
    BucketCaps caps;
    bool rebuilt = false, tuned = false, static_graph = false, can_set_static_graph = true;
    size_t unused_bytes = 0;
    std::vector<size_t> arrival_order;  // in the last round
    std::string hook, error;
    StepTimes last, average;
    int64_t rounds = 0;
  };
  Report report() const;
  /// Synchronised rounds that were finished.
  int64_t rounds() const;
  /// Those of them in which this rank had no inputs, since its last one with inputs: its optimizer has not applied them.
  int64_t shadowed_rounds() const;
  /// What this rank has shadowed has come to it from another one.
  void take_shadowed_rounds();
  /// Whether the last finished round's gradients have been applied, as a step with a learning rate of 0 is
  /// not: the parameters have changed since. (Samples some elements of each, for LibTorch's optimizers leave
  /// no other trace: they change parameters through data(), which counts no versions.)
  bool stepped_since_round() const;
  /// A communication hook steps the optimizer, so that a finished round is an applied one.
  void set_steps_in_backward();
  /// Counts on from here.
  void set_rounds(int64_t rounds);

 private:
  Reducer(const std::vector<Parameter>& parameters, const DistributedDataParallelOptions& options,
          std::function<void()> on_failure);
  void before_gradient(size_t index) override;
  void on_gradient(size_t index, const at::Tensor& incoming) override;
  bool as_new() const { return !round_.open() && rounds_ == rounds_at_restart_; }
  bool is_first_static_round() const {
    return settings_.options.static_graph && rounds_ == rounds_at_restart_;
  }
  void build_buckets();

  void begin_backward();
  void open_round();
  void mark_ready(size_t index, bool used, const at::Tensor& incoming = {});
  void take_nothing(size_t index);
  void queue_everything();  // static graph, first round
  void launch_full();
  void launch(size_t index);

  void queue_finish();
  void finish_round();
  void begin_round();
  void abandon_round();
  [[noreturn]] void fail_round(std::exception_ptr error);

  // reducer_report.cc
  std::string names_without_gradient() const;
  std::string unfinished_text() const;

  mutable std::mutex mutex_;
  ReducerSettings settings_;
  const std::function<void()> on_failure_;
  std::function<void()> on_backward_end_;
  GradientHooks hooks_;
  BucketSet buckets_;
  BucketSizes sizes_;
  ReductionRound round_;
  ParameterUse use_;
  StepClock clock_;

  bool synchronise_ = false;        // what backward is to do
  bool watching_outputs_ = false;   // the last forward's outputs tell when backward begins
  bool rebuilt_ = false;            // buckets are in the order of arrival
  bool hook_of_old_group_ = false;  // it may be replaced
  std::vector<HookFuture> post_backward_;
  std::vector<size_t> initial_bucket_bytes_;
  std::string error_;

  // Finished rounds:
  int64_t rounds_ = 0;
  int64_t rounds_at_restart_ = 0;      // when the reducer was as new
  int64_t shadowed_rounds_ = 0;        // the last ones
  std::vector<size_t> arrival_order_;  // in the last one
  Fingerprint fingerprint_;            // of the parameters at its end
  bool steps_in_backward_ = false;
};

}  // namespace lockstep
