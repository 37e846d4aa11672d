#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <lockstep/ddp/options.h>

namespace lockstep {

class Reducer;

/// DistributedDataParallel without the module: what happens around forward and backward, on named tensors.
/// The template over the module's type is only a shell around it. Used by one thread at a time.
class DdpCore {
 public:
  using Buffers = std::function<std::vector<NamedTensor>()>;

  /// `parameters` in definition order (shared ones may appear twice; those that need no gradient are left
  /// alone), and a function that gives the module's buffers as they are now. Verifies and broadcasts unless
  /// told not to.
  DdpCore(std::vector<NamedTensor> parameters, Buffers buffers, DistributedDataParallelOptions options);

  void before_forward();
  void after_forward();

  bool synchronises() const { return synchronise_; }
  void set_synchronises(bool synchronise) { synchronise_ = synchronise; }
  const Reducer& reducer() const { return *reducer_; }
  const DistributedDataParallelOptions& options() const { return options_; }

 private:
  Buffers buffers_;
  DistributedDataParallelOptions options_;
  std::shared_ptr<Reducer> reducer_;
  bool synchronise_ = true;         // require_backward_grad_sync
  bool buffers_may_differ_ = true;  // require_forward_param_sync
};

}  // namespace lockstep
