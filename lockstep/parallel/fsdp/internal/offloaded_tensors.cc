#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/parallel/fsdp/internal/offloaded_tensors.h>

namespace lockstep::fsdp::internal {
namespace {

constexpr size_t kFirstFileBytes = size_t{1} << 20;
constexpr size_t kMostFileBytes = size_t{256} << 20;  // but for a tensor that is larger
constexpr size_t kAlignment = 64;

/// A function of its own, so that it tells where a tensor lies.
void release_offloaded(void* owner) {
  delete static_cast<std::shared_ptr<OffloadFile>*>(owner);
}

}  // namespace

bool OffloadedTensors::has(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().data_ptr().get_deleter() == &release_offloaded;
}

void OffloadedTensors::take(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || has(tensor)) return;
  const at::NoGradGuard no_grad;
  const size_t bytes = (tensor.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
  if (!file_ || bytes > file_bytes_ - used_) {
    const size_t next = std::clamp(2 * file_bytes_, kFirstFileBytes, kMostFileBytes);
    file_bytes_ = std::max(next, bytes);
    used_ = 0;
    file_ = OffloadFile::create(directory_, file_bytes_);
    file_->unlink();
  }
  const at::Tensor there = at::for_blob(file_->data() + used_, tensor.sizes())
                               .context(new std::shared_ptr<OffloadFile>(file_), &release_offloaded)
                               .options(at::TensorOptions(tensor.scalar_type()))
                               .make_tensor();
  used_ += bytes;
  there.copy_(tensor);
  tensor.set_data(there);
}

std::vector<at::Tensor> tensors_of(torch::optim::OptimizerParamState& state) {
  namespace optim = torch::optim;
  if (auto* sgd = dynamic_cast<optim::SGDParamState*>(&state)) return {sgd->momentum_buffer()};
  if (auto* adam = dynamic_cast<optim::AdamParamState*>(&state)) {
    return {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()};
  }
  if (auto* adamw = dynamic_cast<optim::AdamWParamState*>(&state)) {
    return {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()};
  }
  if (auto* rmsprop = dynamic_cast<optim::RMSpropParamState*>(&state)) {
    return {rmsprop->square_avg(), rmsprop->momentum_buffer(), rmsprop->grad_avg()};
  }
  if (auto* adagrad = dynamic_cast<optim::AdagradParamState*>(&state)) return {adagrad->sum()};
  return {};
}

}  // namespace lockstep::fsdp::internal
