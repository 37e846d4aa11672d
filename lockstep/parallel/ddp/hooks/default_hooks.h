#pragma once

#include <utility>

#include <c10/core/ScalarType.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/grad_bucket.h>

/// Communication hooks that average gradients, and those that shorten them to 16 bits for it.
///
///     model.register_comm_hook(nullptr, lockstep::bf16_compress_hook);   // nullptr: the default group
///
/// All of them reduce into the bucket's own buffer, which is their future's value, and throw what all_reduce
/// throws. torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py and debugging_hooks.py;
/// docs/communication_hooks.md is the guide.
namespace lockstep {

/// What DistributedDataParallel does without a hook: divides by the group's size, then sums. Dense or sparse.
HookFuture allreduce_hook(const ProcessGroup& process_group, GradBucket& bucket);

/// Casts to float16, divides by the group's size, sums, and casts back. Gradients above 65504 become
/// infinite, those below 6e-8 vanish.
HookFuture fp16_compress_hook(const ProcessGroup& process_group, GradBucket& bucket);
/// The same with bfloat16, which has float32's range and 8 bits of precision.
HookFuture bf16_compress_hook(const ProcessGroup& process_group, GradBucket& bucket);

/// No communication at all: gradients stay each rank's own, undivided, and the ranks drift apart. For finding
/// out how much time communication takes.
HookFuture noop_hook(const ProcessGroup& process_group, GradBucket& bucket);

namespace hooks {
/// Gives `hook` a bucket with a copy of this one's buffer in `dtype`, and casts its result back.
HookFuture with_buffer_cast_to(c10::ScalarType dtype, GradBucket& bucket, const CommunicationHook& hook);
}  // namespace hooks

/// A hook that casts the bucket to float16 for `hook`, any hook of the form (state, bucket), and the result
/// back: fp16_compress_wrapper(powerSGD_hook). fp16_compress_hook is fp16_compress_wrapper(allreduce_hook).
/// `hook` sees the parameters as they are.
template <class Hook>
auto fp16_compress_wrapper(Hook hook) {
  return [hook = std::move(hook)](const auto& state, GradBucket& bucket) -> HookFuture {
    return hooks::with_buffer_cast_to(c10::ScalarType::Half, bucket,
                                      [&](GradBucket& cast) -> HookFuture { return hook(state, cast); });
  };
}
/// The same with bfloat16.
template <class Hook>
auto bf16_compress_wrapper(Hook hook) {
  return [hook = std::move(hook)](const auto& state, GradBucket& bucket) -> HookFuture {
    return hooks::with_buffer_cast_to(c10::ScalarType::BFloat16, bucket,
                                      [&](GradBucket& cast) -> HookFuture { return hook(state, cast); });
  };
}

}  // namespace lockstep
