#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/ddp/grad_bucket.h>

/// The optimizer's step during backward(): as soon as a bucket's gradients are averaged, their owners update
/// the parameters and send them to all, while other gradients are still being computed or reduced. When
/// backward() returns, the step is made; the loop calls no step().
///
///     ZeroRedundancyOptimizer zero(model.parameters(), optimizer_class<torch::optim::Adam>(options),
///                                  {.overlap_with_ddp = true});
///     model.register_comm_hook(state, hook_with_zero_step(hook, zero));
///
/// torch/distributed/algorithms/ddp_comm_hooks/ddp_zero_hook.py, with two differences. Parameters are shared
/// out one by one from the beginning, not by bucket (so there is no `shard_buckets`): therefore the first
/// iterations make steps, too, while torch waits until the buckets are built for good; and there may be
/// several parameter groups. Buckets must be dense, and none may be skipped (skip_all_reduce_unused_params).
/// In iterations under no_sync() there is no step. A backward() that ends with an exception may leave some
/// parameters stepped and others not.
namespace lockstep {

/// What the modified hooks do after the hook that averages. Used by the thread that runs backward().
class OverlappedZeroStep {
 public:
  /// `interleaved`: steps each bucket as soon as the next one is ready, else all of them after the last one.
  OverlappedZeroStep(ZeroRedundancyOptimizer& zero, bool interleaved);

  /// `averaged`: the future of the bucket's average. Returns it. The last bucket's call returns when all
  /// parameters are there, and throws what the collectives throw.
  HookFuture operator()(const HookFuture& averaged, const GradBucket& bucket);

 private:
  struct Pending {
    HookFuture averaged;
    std::vector<at::Tensor> parameters;
  };
  void step_first();

  ZeroRedundancyOptimizer& zero_;
  const bool interleaved_;
  size_t next_bucket_ = 0;
  std::deque<Pending> pending_;
};

/// `hook(state, bucket)`, a communication hook, modified to make the optimizer's step: backward() runs
/// through, then bucket by bucket is stepped while later buckets are still being reduced. Preferable where
/// communication is slow compared to computation. `zero` must outlive the hook's use. Throws c10::ValueError
/// unless it has overlap_with_ddp.
template <class Hook>
auto hook_with_zero_step(Hook hook, ZeroRedundancyOptimizer& zero) {
  return [hook = std::move(hook), step = std::make_shared<OverlappedZeroStep>(zero, /*interleaved=*/false)](
             auto&& state, GradBucket& bucket) { return (*step)(hook(state, bucket), bucket); };
}

/// The same, but a bucket is stepped within backward(), when the bucket after it is ready (by then its
/// reduction is usually done): updated parameters travel while backward() computes. Preferable where
/// communication is fast, and the usual choice on one machine.
template <class Hook>
auto hook_with_zero_step_interleaved(Hook hook, ZeroRedundancyOptimizer& zero) {
  return [hook = std::move(hook), step = std::make_shared<OverlappedZeroStep>(zero, /*interleaved=*/true)](
             auto&& state, GradBucket& bucket) { return (*step)(hook(state, bucket), bucket); };
}

}  // namespace lockstep
