#pragma once

#include <memory>
#include <vector>

#include <lockstep/parallel/ddp/options.h>

namespace lockstep {

class Reducer;

/// DistributedDataParallel's own mixed precision: from the begin of forward to the end of backward the
/// parameters hold their values in param_dtype, so that both compute in that (autograd saves a parameter as
/// it is, not a copy); at all other times they are as the optimizer left them. Gradients are reduced in
/// reduce_dtype and come out in the parameters' own dtype. torch/nn/parallel/distributed.py, _root_copy_hook,
/// and torch/distributed/algorithms/ddp_comm_hooks/mixed_precision_hooks.py. Used by one thread at a time.
class MixedPrecisionParameters {
 public:
  /// Casts the buffers, for good, and tells the reducer.
  MixedPrecisionParameters(const MixedPrecision& precision, const std::vector<NamedTensor>& parameters,
                           const std::vector<NamedTensor>& buffers, std::shared_ptr<Reducer> reducer);
  MixedPrecisionParameters(const MixedPrecisionParameters&) = delete;  // the reducer calls this one
  MixedPrecisionParameters& operator=(const MixedPrecisionParameters&) = delete;
  ~MixedPrecisionParameters();

  /// The parameters hold the values in param_dtype from here, unless they do from a forward whose backward is
  /// yet to come.
  void before_forward();
  /// `backward_follows`: it will restore the parameters at its end. A forward without one restores them,
  /// unless it came between another and its backward.
  void after_forward(bool backward_follows);
  /// Gives the parameters their own values again.
  void restore();

 private:
  MixedPrecision precision_;
  std::vector<at::Tensor> parameters_;
  std::shared_ptr<Reducer> reducer_;
  bool pending_ = false;                             // a backward is yet to come
  std::vector<at::Tensor> full_;                     // the parameters' own data, while they hold others
  std::vector<std::shared_ptr<void>> accumulators_;  // of these others; the graphs of all forwards share them
};

/// The tensor in this dtype, if it is a floating-point one.
at::Tensor cast_floating_point(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace lockstep
