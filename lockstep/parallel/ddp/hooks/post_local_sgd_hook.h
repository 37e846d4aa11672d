#pragma once

#include <cstdint>
#include <memory>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/grad_bucket.h>

/// Post-local SGD: gradients are averaged over all ranks at first, and over a subgroup after that, while a
/// model averager brings the parameters of all together now and then. Lin et al. 2018
/// (https://arxiv.org/abs/1808.07217); torch/distributed/algorithms/ddp_comm_hooks/post_localSGD_hook.py.
namespace lockstep {

/// The settings of post_localSGD_hook and its count of iterations, for one model. A handle: copies share the
/// count. Thread-safe.
class PostLocalSGDState {
 public:
  /// `process_group`: all ranks; empty means the default group. `subgroup`: empty means those of them that are on
  /// this host, for which the hook makes a group when it first needs one. Gradients are averaged over it from
  /// iteration `start_localSGD_iter` on, or with post_local_gradient_allreduce = false left as they are.
  PostLocalSGDState(ProcessGroup process_group, ProcessGroup subgroup, int64_t start_localSGD_iter,
                    bool post_local_gradient_allreduce = true);

  const ProcessGroup& process_group() const;
  const ProcessGroup& subgroup() const;
  int64_t start_localSGD_iter() const;
  bool post_local_gradient_allreduce() const;
  /// Iterations so far; ends at start_localSGD_iter, as in PyTorch.
  int64_t iter() const;

 private:
  friend HookFuture post_localSGD_hook(const PostLocalSGDState& state, GradBucket& bucket);
  struct Data;
  std::shared_ptr<Data> data_;
};

/// Averages the bucket over the process group or the subgroup. It is the future's value. Throws what
/// all_reduce and split_group throw.
HookFuture post_localSGD_hook(const PostLocalSGDState& state, GradBucket& bucket);

}  // namespace lockstep
