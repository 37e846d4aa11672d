#include <algorithm>
#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/internal/gather/gathered_units.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>

namespace lockstep::fsdp::internal {

/// Ends when autograd calls it, or drops it.
class GatheredUnits::BackwardPass {
 public:
  BackwardPass(std::weak_ptr<GatheredUnits> units, int graph_task)
      : units_(std::move(units)), graph_task_(graph_task) {}
  BackwardPass(const BackwardPass&) = delete;
  BackwardPass& operator=(const BackwardPass&) = delete;
  ~BackwardPass() {
    if (const auto units = std::exchange(units_, {}).lock()) units->leave_backward(graph_task_);
  }
  void end() {
    if (const auto units = std::exchange(units_, {}).lock()) units->end_backward();
  }

 private:
  std::weak_ptr<GatheredUnits> units_;
  const int graph_task_;
};

GatheredUnits::GatheredUnits(GatheredWeights& weights, GradientReduction& reduction,
                             const FullyShardedDataParallelOptions& options)
    : weights_(weights),
      reduction_(reduction),
      keeps_all_(options.sharding_strategy == ShardingStrategy::SHARD_GRAD_OP),
      schedule_(weights.units(), options.limit_all_gathers ? 2 : 3, options.forward_prefetch,
                options.backward_prefetch) {
  reduction_.progress().all = 0;
}

void GatheredUnits::attach() {
  weights_.set_listener(weak_from_this());
  reduction_.set_listeners(
      [self = weak_from_this()](size_t weight) {
        if (const auto units = self.lock()) units->gradients_are_complete(weight);
      },
      [self = weak_from_this()] {
        if (const auto units = self.lock()) units->gradients_are_reduced();
      });
  observer_.emplace();
}

void GatheredUnits::begin_use() {
  const auto here = std::this_thread::get_id();
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard lock(transitions_);
  // A backward has several threads where it computes on a device: what is computed again in it may be in another one.
  if (graph_task_ != kNoTask && graph_task_ == task) {
    thread_ = here;
    return;
  }
  // A backward that fails on a device is over for its caller before the device's thread drops the callbacks.
  if (!weights_.device().is_cpu() && graph_task_ != kNoTask && task == kNoTask && here == forward_thread_) {
    graph_task_ = kNoTask;
    end_use();
  }
  std::thread::id other;
  TORCH_CHECK(
      thread_.compare_exchange_strong(other, here) || other == here,
      "FullyShardedDataParallel: another thread is in forward or backward of this model; where parameters "
      "are gathered, one thread at a time uses it");
  if (task == kNoTask) forward_thread_ = here;
}

void GatheredUnits::run_forward(const std::function<void()>& forward) {
  begin_use();
  const bool trains = c10::GradMode::is_enabled();
  std::exception_ptr error;
  try {
    if (forwards_++ == 0) {
      weights_.begin_pass();
      run(schedule_.begin(GatherPass::kForward, keeps_all_ && trains));
    }
    forward();
  } catch (...) {
    error = std::current_exception();
  }
  if (--forwards_ == 0) {
    schedule_.end(GatherPass::kForward);  // gives no steps: what is early in forward is so at a use
    if (graph_task_ == kNoTask || torch::autograd::get_current_graph_task_id() == kNoTask) {
      end_use();
      if (!failure_ && (!trains || error)) run(schedule_.free_all());
    }
  }
  rethrow_failure();
  if (error) std::rethrow_exception(error);
}

void GatheredUnits::close() {
  rethrow_failure();
  if (forwards_ == 0) run(schedule_.free_all());
}

bool GatheredUnits::in_pass() {
  if (forwards_ > 0) return thread_.load() == std::this_thread::get_id();
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == kNoTask) return false;
  if (task != graph_task_) begin_backward(task);
  return true;
}

void GatheredUnits::begin_backward(int graph_task) {
  begin_use();
  // A backward that fails drops its callbacks without a call.
  const auto pass = std::make_shared<BackwardPass>(weak_from_this(), graph_task);
  torch::autograd::Engine::get_default_engine().queue_callback([pass] { pass->end(); });
  graph_task_ = graph_task;
  run(schedule_.begin(GatherPass::kBackward, keeps_all_));
}

void GatheredUnits::leave_backward(int graph_task) {
  const std::lock_guard lock(transitions_);
  if (graph_task_ != graph_task) return;  // this thread is late: the next pass has begun
  graph_task_ = kNoTask;
  if (forwards_ == 0) end_use();
}

void GatheredUnits::end_backward() {
  const auto steps = schedule_.end(GatherPass::kBackward);
  leave_backward(graph_task_);
  rethrow_failure();
  run(steps);
  if (!keeps_all_) run(schedule_.free_all());
}

bool GatheredUnits::before_use(size_t unit) noexcept {
  if (failure_) return false;
  bool used = false;
  try {
    if (!in_pass()) return false;
    used = true;
    run(schedule_.use(unit));
    weights_.use_on_current_stream(unit);
  } catch (...) {
    fail(std::current_exception(), /*others_wait=*/true);
  }
  return used;
}

void GatheredUnits::gradients_are_complete(size_t weight) {
  rethrow_failure();  // before the reductions that it has made fail
  if (graph_task_ == kNoTask) return;
  // A frozen weight may be used after that, for the gradient of the input. A rank that lacks a gradient would not
  // gather again.
  const size_t unit = weights_.unit_of(weight);
  run(schedule_.gradients_are_complete(unit, weights_.has_frozen(unit)));
}

/// Not after a backward without reduction: another forward comes before the weights change, and still has them.
void GatheredUnits::gradients_are_reduced() {
  if (keeps_all_) run(schedule_.free_all());
}

void GatheredUnits::run(const GatherSchedule::Steps& steps) {
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto [kind, unit] = steps[i];
    try {
      switch (kind) {
        case GatherStep::Kind::kStart: {
          const bool early =
              i + 1 == steps.size() || steps[i + 1] != GatherStep{GatherStep::Kind::kFinish, unit};
          weights_.start(unit, reduction_.progress().own, early);
          break;
        }
        case GatherStep::Kind::kFinish:
          reduction_.progress().all = std::max(*reduction_.progress().all, weights_.finish(unit));
          break;
        case GatherStep::Kind::kFree:
          weights_.free(unit);
          break;
      }
    } catch (...) {
      // What is wrong with a gather that has ended, all ranks see.
      const bool may_wait = kind != GatherStep::Kind::kFinish || !weights_.device().is_cpu();
      fail(std::current_exception(), /*others_wait=*/may_wait);
      throw;
    }
  }
}

void GatheredUnits::fail(std::exception_ptr failure, bool others_wait) noexcept {
  if (failure_) return;
  failure_ = std::move(failure);
  try {
    weights_.refuse(text_of(failure_));
    const ShardGroups& groups = weights_.groups();
    if (others_wait) abort(groups.gathers());  // a group that has failed keeps its cause
    groups.spread_failure();
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kWarning) << "the ranks of a sharded model don't hear of a failure: " << text_of(error);
  }
}

}  // namespace lockstep::fsdp::internal
