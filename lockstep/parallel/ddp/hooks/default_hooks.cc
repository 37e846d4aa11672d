#include <algorithm>

#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/internal/hook_operations.h>

namespace lockstep {
namespace {

/// to = from.to(to's dtype) / divisor, rounding twice as PyTorch's hook does (so the numbers are the same),
/// but in blocks that stay in the cache between the two.
void cast_and_divide(const at::Tensor& to, const at::Tensor& from, int divisor) {
  constexpr int64_t kBlock = 128 * 1024;
  for (int64_t begin = 0; begin < from.numel(); begin += kBlock) {
    const int64_t length = std::min(kBlock, from.numel() - begin);
    const at::Tensor block = to.narrow(0, begin, length);
    block.copy_(from.narrow(0, begin, length));
    if (divisor > 1) block.div_(divisor);
  }
}

HookFuture compress(c10::ScalarType dtype, const ProcessGroup& group, const GradBucket& bucket) {
  const at::NoGradGuard no_grad;
  const at::Tensor buffer = bucket.buffer();
  const at::Tensor compressed =
      hooks::internal::empty_for_exchange(buffer.numel(), buffer.options().dtype(dtype), group);
  cast_and_divide(compressed, buffer, get_world_size(group));
  return then(hooks::internal::sum(compressed, group), [buffer](const at::Tensor& reduced) {
    const hooks::internal::CallbackScope scope;
    return buffer.copy_(reduced);
  });
}

}  // namespace

HookFuture allreduce_hook(const ProcessGroup& process_group, GradBucket& bucket) {
  return hooks::internal::average(process_group, bucket.buffer());
}

HookFuture fp16_compress_hook(const ProcessGroup& process_group, GradBucket& bucket) {
  return compress(c10::ScalarType::Half, process_group, bucket);
}

HookFuture bf16_compress_hook(const ProcessGroup& process_group, GradBucket& bucket) {
  return compress(c10::ScalarType::BFloat16, process_group, bucket);
}

HookFuture noop_hook(const ProcessGroup&, GradBucket& bucket) {
  return completed_future(bucket.buffer());
}

HookFuture hooks::with_buffer_cast_to(c10::ScalarType dtype, GradBucket& bucket,
                                      const CommunicationHook& hook) {
  const at::NoGradGuard no_grad;
  const at::Tensor original = bucket.buffer();
  const at::Tensor cast = internal::empty_for_exchange(original.numel(), original.options().dtype(dtype), {});
  cast.copy_(original);
  GradBucket cast_bucket(bucket.index(), cast, bucket.parameters(), bucket.is_last());
  return then(hook(cast_bucket), [original](const at::Tensor& reduced) {
    const internal::CallbackScope scope;
    return original.copy_(reduced);
  });
}

}  // namespace lockstep
