#pragma once

#include <utility>

#include <torch/nn/modules/batchnorm.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm_function.h>

namespace lockstep {

/// Batch normalisation over the batches of all ranks: sync_batch_norm() as a module. Inputs are (N, C) or
/// (N, C, …), on the CPU too (torch's wants a GPU).
///
///     lockstep::SyncBatchNorm norm(64);
///     lockstep::SyncBatchNorm norm(torch::nn::BatchNormOptions(64).momentum(0.01), group);
///
/// Parameters and buffers are those of torch::nn::BatchNorm2d, so one's checkpoint loads into the other, and
/// clone() keeps the group. It synchronises in training mode, with a default group, and over more than one
/// rank; otherwise it is plain batch normalisation. An empty `process_group` means the default group. All
/// ranks of the group must call it equally often, and one thread at a time. Where gradients queue before it
/// in the default group, a group of its own (new_group()) lets it overtake them.
///
/// forward() throws what sync_batch_norm() throws. torch/nn/modules/batchnorm.py, SyncBatchNorm.
class SyncBatchNormImpl : public torch::nn::BatchNormImplBase<0, SyncBatchNormImpl> {
 public:
  explicit SyncBatchNormImpl(const torch::nn::BatchNormOptions& options, ProcessGroup process_group = {})
      : BatchNormImplBase(options), process_group(std::move(process_group)) {}

  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  ProcessGroup process_group;

 protected:
  void _check_input_dim(const torch::Tensor& input) override;
};
TORCH_MODULE(SyncBatchNorm);

/// Makes all BatchNorm1d, 2d and 3d in `module`, and the module itself if it is one, normalise over the
/// batches of all ranks of `process_group` (the default group if empty), and gives each SyncBatchNorm in it
/// that group.
///
/// Python's puts other modules in their places. In C++ a forward() calls its members, whatever is registered
/// under their names, so here the modules stay, with their parameters, buffers and names, and their calls of
/// torch::batch_norm are intercepted in torch's dispatcher, for this process from the first conversion on.
/// Other calls of it cost one look-up more.
///
/// A converted module behaves as SyncBatchNorm, also after to(), load, train() and eval(), with these limits:
/// - A clone() is not converted, nor is a module after reset(): convert it again.
/// - It must be called with its own tensors: forward() does that.
/// - torch::nn::BatchNorm's own check refuses a batch of one value per channel on a rank, where SyncBatchNorm
///   is content if other ranks have more.
/// - Classes of your own that derive from torch::nn::BatchNormImplBase are not recognised; build them on
///   sync_batch_norm().
/// Calls in TorchScript modules and under functorch transforms are left alone.
///
/// Throws c10::ValueError when this rank is not in the group. Convert before other threads run forward
/// passes. SyncBatchNorm.convert_sync_batchnorm.
void convert_sync_batchnorm_(torch::nn::Module& module, const ProcessGroup& process_group = {});

/// The same for a std::shared_ptr to a module or a holder such as torch::nn::Sequential; returns it.
template <class Holder>
Holder convert_sync_batchnorm(Holder module, const ProcessGroup& process_group = {}) {
  convert_sync_batchnorm_(*module, process_group);
  return module;
}

}  // namespace lockstep
