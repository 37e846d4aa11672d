#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/hooks/internal/hook_operations.h>

namespace lockstep::hooks::internal {

at::Tensor empty_for_exchange(int64_t numel, const at::TensorOptions& options, const ProcessGroup& group) {
  return options.device().is_cpu() ? empty_shared({numel}, options, group) : at::empty({numel}, options);
}

HookFuture sum(const at::Tensor& tensor, const ProcessGroup& group) {
  return all_reduce(tensor, ReduceOp::SUM, group, /*async_op=*/true)->getFuture();
}

HookFuture average(const ProcessGroup& group, const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const int size = get_world_size(group);
  if (size > 1) tensor.div_(size);
  return then(sum(tensor, group), [tensor](const at::Tensor&) { return tensor; });
}

CallbackScope::CallbackScope() {
  // Matrix products don't do this themselves, unlike at::parallel_for.
  at::internal::lazy_init_num_threads();
}

}  // namespace lockstep::hooks::internal
