#include <ostream>

#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>

namespace lockstep {

void SyncBatchNormImpl::_check_input_dim(const torch::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "expected at least 2D input (got ", input.dim(), "D input)");
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  _check_input_dim(input);
  TORCH_CHECK_VALUE(input.size(1) != 0, "SyncBatchNorm number of input channels should be non-zero");
  double average_factor = options.momentum().value_or(0.0);
  if (is_training() && options.track_running_stats()) {
    num_batches_tracked.add_(1);
    if (!options.momentum()) average_factor = 1.0 / num_batches_tracked.item<double>();  // cumulative
  }
  const bool keep_running = !is_training() || options.track_running_stats();
  const torch::Tensor mean = keep_running ? running_mean : torch::Tensor();
  const torch::Tensor var = keep_running ? running_var : torch::Tensor();
  if (is_training()) {
    if (const ProcessGroup group = sync_batch_norm_group(process_group)) {
      return sync_batch_norm(input, weight, bias, mean, var, options.eps(), average_factor, group);
    }
  }
  const bool by_batch = is_training() || (!running_mean.defined() && !running_var.defined());
  return torch::nn::functional::detail::batch_norm(input, mean, var, weight, bias, by_batch, average_factor,
                                                   options.eps());
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "lockstep::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats()
         << ')';
}

}  // namespace lockstep
