#include <exception>
#include <vector>

#include <ATen/ops/empty.h>

#include <lockstep/parallel/fsdp/internal/weight_windows.h>

namespace lockstep::fsdp::internal {

int WeightWindows::meet(bool flag) {
  std::vector<at::Tensor> tensors{at::empty({1}, at::kInt).fill_(flag ? 1 : 0)};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  try {
    group_->allreduce(tensors, options)->wait();
  } catch (...) {
    change([](WindowMachine& machine) { machine.fail(); });
    throw;
  }
  return tensors[0].item<int>();
}

void WeightWindows::write(const std::function<void()>& body) {
  change([](WindowMachine& machine) { machine.enter(); });
  meet(false);
  change([](WindowMachine& machine) { machine.all_have_entered(); });
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  change([](WindowMachine& machine) { machine.leave(); });
  const int failed = meet(error != nullptr);
  if (failed > 0) {
    change([](WindowMachine& machine) { machine.fail(); });
    if (error) std::rethrow_exception(error);
    TORCH_CHECK_WITH(DistBackendError, false, "FullyShardedDataParallel: ", failed,
                     failed == 1 ? " rank" : " ranks",
                     " failed while writing the weights, which can't be used any more; load a checkpoint "
                     "into a new model");
  }
  change([](WindowMachine& machine) { machine.all_have_left(); });
}

}  // namespace lockstep::fsdp::internal
