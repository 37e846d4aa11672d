#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <lockstep/parallel/fsdp/internal/gather/access_observer.h>
#include <lockstep/parallel/fsdp/internal/gather/gather_schedule.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_weights.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>
#include <lockstep/parallel/fsdp/options.h>

namespace lockstep::fsdp::internal {

/// FULL_SHARD and SHARD_GRAD_OP by gathering: units of weights (the groups of the auto-wrap policy) are whole while they
/// are used.
///
/// - LibTorch has no module hooks, so use is what operators show: an AccessObserver hears of each operator that is given a
///   parameter, or a view of it, before its kernel, in forward as in backward. GatherSchedule decides what is gathered and
///   freed then; GatheredWeights does it.
/// - A pass is a forward, or a graph task of autograd, in which the parameters' values may be used. Outside of one they are
///   not there.
/// - An observer can't throw. When a gather fails, what is not whole throws its cause to any kernel that reads it, forward and
///   the end of backward throw the cause itself, and so does all that follows: no step is taken. The groups fail on all ranks.
/// - Gathers have a group of their own, in which all ranks come in the same order, which finish() checks. Ranks may lack
///   gradients, and then start reductions later: each gather tells how many a rank has started, and a rank waits 0.1 s in
///   a backward, and no longer, for a reduction that others have perhaps not started.
///
/// Used by one thread at a time, and autograd's threads in its backward.
class GatheredUnits final : public AccessListener, public std::enable_shared_from_this<GatheredUnits> {
 public:
  /// `weights` and `reduction` outlive it.
  GatheredUnits(GatheredWeights& weights, GradientReduction& reduction,
                const FullyShardedDataParallelOptions& options);
  /// From now on accesses are seen. When a shared_ptr has it.
  void attach();

  /// Runs it as a pass. Throws what it throws, or the failure of a gather.
  void run_forward(const std::function<void()>& forward);
  /// Throws the failure of an earlier gather, if there is one.
  void rethrow_failure() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  /// The same, and else frees all, unless a forward is under way: the weights are to change.
  void close();

 private:
  class BackwardPass;

  bool before_use(size_t unit) noexcept override;
  void after_use(size_t unit) noexcept override { schedule_.release(unit); }
  void gradients_are_complete(size_t weight);
  void gradients_are_reduced();

  /// Whether this thread is in a pass.
  bool in_pass();
  void begin_backward(int graph_task);
  void leave_backward(int graph_task);
  void end_backward();
  void begin_use();
  void end_use() { thread_ = std::thread::id(); }
  void run(const GatherSchedule::Steps& steps);
  void fail(std::exception_ptr failure, bool others_wait) noexcept;

  GatheredWeights& weights_;
  GradientReduction& reduction_;
  const bool keeps_all_;  // between forward and backward
  GatherSchedule schedule_;
  std::optional<AccessObserver> observer_;
  std::mutex transitions_;                                   // held where a pass begins or a backward ends
  std::atomic<std::thread::id> thread_ = std::thread::id();  // of the pass
  std::thread::id forward_thread_;  // of the last forward outside of a backward; guarded by transitions_
  int forwards_ = 0;                // within each other
  std::atomic<int> graph_task_ = kNoTask;
  std::exception_ptr failure_;

  static constexpr int kNoTask = -1;
};

}  // namespace lockstep::fsdp::internal
