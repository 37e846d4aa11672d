#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/parallel/ddp/options.h>

namespace lockstep {

/// Parameters that are reduced together, apart from the buckets, in one operation that starts when the
/// gradient of another parameter is computed: so that it runs when nothing else communicates. Their gradients
/// are views of one buffer, unless the user has put others in their place; these are copied there and back.
/// torch/nn/parallel/distributed.py, _register_delay_all_reduce_hook.
///
/// The end of backward awaits the operation (PyTorch does not). Gradients that come after it has started stay
/// this rank's own. Used by one thread at a time.
class DelayedAllReduce : public std::enable_shared_from_this<DelayedAllReduce> {
 public:
  /// Broadcasts the parameters of rank 0; collective.
  static std::shared_ptr<DelayedAllReduce> create(const std::vector<NamedTensor>& parameters,
                                                  const at::Tensor& trigger, const ProcessGroup& group,
                                                  std::optional<HostCompression> between_hosts);

  /// After a forward: gives the gradients their places again, where the user has dropped them; zeroed.
  void after_forward();
  /// Awaits an operation whose backward an exception has ended, and drops its result.
  void abandon();
  void update_process_group(const ProcessGroup& group);
  /// Where the gradients lie.
  const at::Tensor& buffer() const { return buffer_; }

 private:
  DelayedAllReduce(const std::vector<NamedTensor>& parameters, const ProcessGroup& group,
                   std::optional<HostCompression> between_hosts);
  void start();

  std::vector<at::Tensor> parameters_;
  ProcessGroup group_;
  std::optional<HostCompression> between_hosts_;
  std::shared_ptr<ErrorFeedback> feedback_ = std::make_shared<ErrorFeedback>();
  at::Tensor buffer_;
  std::vector<at::Tensor> views_;
  c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace lockstep
