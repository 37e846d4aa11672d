#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/grad_bucket.h>

/// What the communication hooks have in common.
namespace lockstep::hooks::internal {

/// An uninitialised flat tensor for a collective of `group`, where peers can read it. Arena memory that was
/// freed is handed out again as it is, so one for each bucket and step costs no page faults.
at::Tensor empty_for_exchange(int64_t numel, const at::TensorOptions& options, const ProcessGroup& group);

/// Starts the sum of `tensor` over the ranks, in place.
HookFuture sum(const at::Tensor& tensor, const ProcessGroup& group);

/// Divides `tensor` by the group's size, then starts its sum, in place; `tensor` is the future's value.
/// default_hooks.py, _allreduce_fut.
HookFuture average(const ProcessGroup& group, const at::Tensor& tensor);

/// Makes a thread that runs callbacks ready for tensor operations: as many threads as the program set, and
/// (while this object lives) no record for autograd.
class CallbackScope {
 public:
  CallbackScope();

 private:
  at::NoGradGuard no_grad_;
};

}  // namespace lockstep::hooks::internal
