#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <lockstep/base/log.h>
#include <lockstep/parallel/ddp/hooks/zero_hook.h>

namespace lockstep {
namespace {

/// The averages, each in its parameter's sizes and memory order, as the bucket's elements stand.
std::vector<at::Tensor> gradients_of(const at::Tensor& bucket, const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(
      bucket.layout() == c10::kStrided,
      "a sparse gradient can't be stepped while DDP reduces: leave its parameter out of the "
      "ZeroRedundancyOptimizer with `overlap_with_ddp=True`, or build the embedding with sparse(false)");
  const at::Tensor flat = bucket.flatten();
  std::vector<at::Tensor> gradients;
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor part = flat.narrow(0, offset, parameter.numel()).to(parameter.scalar_type());
    gradients.push_back(parameter.is_non_overlapping_and_dense()
                            ? part.as_strided(parameter.sizes(), parameter.strides())
                            : part.view(parameter.sizes()));
    offset += parameter.numel();
  }
  return gradients;
}

}  // namespace

OverlappedZeroStep::OverlappedZeroStep(ZeroRedundancyOptimizer& zero, bool interleaved)
    : zero_(zero), interleaved_(interleaved) {
  TORCH_CHECK_VALUE(zero.overlap_with_ddp(),
                    "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this "
                    "hook properly");
}

HookFuture OverlappedZeroStep::operator()(const HookFuture& averaged, const GradBucket& bucket) {
  if (bucket.index() == 0) {
    if (next_bucket_ != 0) {
      LOCKSTEP_LOG(kWarning)
          << "the last backward() ended before its last bucket, because of an exception or "
             "of `skip_all_reduce_unused_params`; ZeroRedundancyOptimizer has not updated "
             "all parameters";
    }
    pending_.clear();
    next_bucket_ = 0;
  }
  TORCH_CHECK(bucket.index() == next_bucket_, "Bucket indices are not in incremental order: ", bucket.index(),
              " instead of ", next_bucket_, "; the hook can't be used with `skip_all_reduce_unused_params`");
  ++next_bucket_;
  pending_.push_back({averaged, bucket.parameters()});
  // All in the thread that runs backward(), so that all ranks start the same operations in the same order.
  if (interleaved_ && pending_.size() > 1) step_first();
  if (bucket.is_last()) {
    while (!pending_.empty()) step_first();
    zero_.finish_step();
    next_bucket_ = 0;
  }
  return averaged;
}

void OverlappedZeroStep::step_first() {
  const Pending bucket = std::move(pending_.front());
  pending_.pop_front();
  bucket.averaged->waitAndThrow();
  const at::Tensor average = tensor_of(bucket.averaged->constValue());
  zero_.start_step(bucket.parameters, gradients_of(average, bucket.parameters));
}

}  // namespace lockstep
