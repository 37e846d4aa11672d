#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>

#include <lockstep/collectives/backend/internal/below_autograd.h>
#include <lockstep/collectives/backend/internal/operands.h>
#include <lockstep/collectives/backend/internal/shared_tensor.h>

namespace lockstep::collectives::internal {
namespace {

/// `to` becomes `from` times `factor`. Complex numbers count as pairs: as a complex number, with an imaginary
/// part of zero, the factor would make NaN of infinity.
void multiply(const at::Tensor& from, const at::Tensor& factor, const at::Tensor& to) {
  const bool pairs = from.is_complex() && !factor.is_complex();
  at::Tensor result = pairs ? at::view_as_real(to) : to;
  at::mul_out(result, pairs ? at::view_as_real(from.resolve_conj()) : from, factor.reshape({}));
}

/// Whether an operation may use the tensor's own memory.
bool is_usable(const at::Tensor& tensor) {
  return tensor.is_cpu() && is_plain(tensor);
}

}  // namespace

Operands::~Operands() {
  // To be kept for as long as the device uses the buffers, whatever became of the operation.
  if (device_) device_->area()->keep(std::move(device_));
}

const at::Tensor& Operands::keep(at::Tensor tensor) {
  return kept_.emplace_back(std::move(tensor));
}

DeviceCopies& Operands::on_device(c10::Device device) {
  if (!device_) device_ = std::make_shared<DeviceCopies>(area_, device);
  TORCH_INTERNAL_ASSERT(device_->device() == device, "tensors of one operation on ", device_->device(),
                        " and ", device);
  return *device_;
}

const at::Tensor& Operands::input(const at::Tensor& tensor) {
  if (is_usable(tensor)) return keep(tensor);
  if (!tensor.is_cpu()) return keep(on_device(tensor.device()).fetch(tensor));
  const BelowAutograd guard;
  return keep(tensor.detach().resolve_conj().resolve_neg().contiguous());
}

const at::Tensor& Operands::output(const at::Tensor& tensor) {
  if (is_usable(tensor)) return keep(tensor);
  at::Tensor buffer =
      tensor.is_cpu()
          ? at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous))
          : on_device(tensor.device()).host(tensor.sizes(), tensor.scalar_type());
  copy_back(tensor, buffer);
  return keep(std::move(buffer));
}

const at::Tensor& Operands::in_out(const at::Tensor& tensor) {
  if (is_usable(tensor)) return keep(tensor);
  const at::Tensor& buffer = copy(tensor);
  copy_back(tensor, buffer);
  return buffer;
}

const at::Tensor& Operands::copy(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return keep(on_device(tensor.device()).fetch(tensor));
  const BelowAutograd guard;
  at::Tensor buffer = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  buffer.copy_(tensor);
  return keep(std::move(buffer));
}

const at::Tensor& Operands::scaled(const at::Tensor& tensor, const at::Tensor& factor) {
  if (!tensor.is_cpu()) {
    const at::Tensor& buffer = copy(tensor);
    scale(buffer, factor);
    return buffer;
  }
  const BelowAutograd guard;
  at::Tensor buffer = shared(tensor.numel(), tensor.scalar_type()).view(tensor.sizes());
  multiply(tensor.detach(), factor, buffer);
  return keep(std::move(buffer));
}

void Operands::scale(const at::Tensor& buffer, const at::Tensor& factor) {
  const BelowAutograd guard;
  if (!device_) return multiply(buffer, factor, buffer);
  to_scale_.emplace_back(buffer, factor.is_cpu() ? factor.clone() : device_->fetch(factor));
}

const at::Tensor& Operands::shared(int64_t numel, at::ScalarType dtype) {
  if (device_) return keep(device_->host({numel}, dtype));
  return keep(allocate_shared(channel_.transport().shared_arena(), numel, dtype));
}

const at::Tensor& Operands::flattened(const std::vector<at::Tensor>& tensors) {
  if (!tensors.front().is_cpu()) return keep(on_device(tensors.front().device()).fetch_flat(tensors));
  const BelowAutograd guard;
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  const at::Tensor& flat = shared(numel, tensors.front().scalar_type());
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    flat.narrow(0, at, tensor.numel()).view(tensor.sizes()).copy_(tensor.detach());
    at += tensor.numel();
  }
  return flat;
}

void Operands::unflatten(const at::Tensor& buffer, const std::vector<at::Tensor>& tensors) {
  if (device_) {
    for (const at::Tensor& tensor : tensors) device_->will_bring(tensor);
    flat_results_.emplace_back(tensors, buffer);
    return;
  }
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    copy_back(tensor, buffer.narrow(0, at, tensor.numel()));
    at += tensor.numel();
  }
}

void Operands::copy_back(const at::Tensor& tensor, const at::Tensor& buffer) {
  if (device_) device_->will_bring(tensor);
  copies_.emplace_back(tensor, buffer);
}

void Operands::start_on_device(const Deadline& deadline) {
  if (!device_->await_fetched(channel_, deadline)) return;  // the next step throws why the group has failed
  const BelowAutograd guard;
  for (const auto& [buffer, factor] : to_scale_) multiply(buffer, factor, buffer);
}

void Operands::finish() {
  if (device_) {
    for (const auto& [to, from] : copies_) device_->bring(to, from);
    for (const auto& [to, from] : flat_results_) device_->bring_flat(to, from);
    device_->brought();
    return;
  }
  if (copies_.empty()) return;
  const BelowAutograd guard;
  for (auto& [to, from] : copies_) to.copy_(from.view(to.sizes()));
}

bool memory_overlaps(const at::Tensor& a, const at::Tensor& b) {
  return span_of(a).overlaps(span_of(b));
}

}  // namespace lockstep::collectives::internal
