#pragma once

#include <memory>
#include <vector>

#include <lockstep/ddp/options.h>

namespace lockstep {

class Reducer;

/// DistributedDataParallel's own mixed precision: while forward runs, the parameters hold their values in
/// param_dtype, so that it and backward compute in that; at all other times they are as the optimizer left
/// them. Gradients are reduced in reduce_dtype and come out in the parameters' own dtype.
/// torch/nn/parallel/distributed.py, _root_copy_hook, and
/// torch/distributed/algorithms/ddp_comm_hooks/mixed_precision_hooks.py. (PyTorch restores the parameters
/// only at the end of backward.) Used by one thread at a time.
class MixedPrecisionParameters {
 public:
  /// Casts the buffers, for good, and tells the reducer.
  MixedPrecisionParameters(const MixedPrecision& precision, const std::vector<NamedTensor>& parameters,
                           const std::vector<NamedTensor>& buffers, std::shared_ptr<Reducer> reducer);

  void before_forward();
  /// Also when forward has thrown, or has not begun.
  void after_forward();

 private:
  MixedPrecision precision_;
  std::vector<at::Tensor> parameters_;
  std::shared_ptr<Reducer> reducer_;
  std::vector<at::Tensor> full_;  // the parameters' data, during forward
  std::vector<std::shared_ptr<void>> accumulators_;
};

/// The tensor in this dtype, if it is a floating-point one.
at::Tensor cast_floating_point(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace lockstep
