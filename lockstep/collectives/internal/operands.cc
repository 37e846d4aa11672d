#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>

#include <lockstep/base/fork_guard.h>
#include <lockstep/collectives/internal/operands.h>

namespace lockstep {
namespace {

/// Collectives write into tensors behind autograd's back, as PyTorch's do.
struct BelowAutograd {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

/// `to` becomes `from` times `factor`. Complex numbers count as pairs: as a complex number, with an imaginary
/// part of zero, the factor would make NaN of infinity.
void multiply(const at::Tensor& from, const at::Tensor& factor, const at::Tensor& to) {
  const bool pairs = from.is_complex() && !factor.is_complex();
  at::Tensor result = pairs ? at::view_as_real(to) : to;
  at::mul_out(result, pairs ? at::view_as_real(from.resolve_conj()) : from, factor.reshape({}));
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

/// From the first to behind the last byte of the tensor; nothing for an empty one.
std::pair<const char*, const char*> span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {nullptr, nullptr};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

}  // namespace

const at::Tensor& Operands::keep(at::Tensor tensor) {
  return kept_.emplace_back(std::move(tensor));
}

const at::Tensor& Operands::input(const at::Tensor& tensor) {
  if (is_plain(tensor)) return keep(tensor);
  const BelowAutograd guard;
  return keep(tensor.detach().resolve_conj().resolve_neg().contiguous());
}

const at::Tensor& Operands::output(const at::Tensor& tensor) {
  if (is_plain(tensor)) return keep(tensor);
  at::Tensor buffer = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  copy_back(tensor, buffer);
  return keep(std::move(buffer));
}

const at::Tensor& Operands::in_out(const at::Tensor& tensor) {
  if (is_plain(tensor)) return keep(tensor);
  const at::Tensor& buffer = copy(tensor);
  copy_back(tensor, buffer);
  return buffer;
}

const at::Tensor& Operands::copy(const at::Tensor& tensor) {
  const BelowAutograd guard;
  at::Tensor buffer = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  buffer.copy_(tensor);
  return keep(std::move(buffer));
}

const at::Tensor& Operands::scaled(const at::Tensor& tensor, const at::Tensor& factor) {
  const BelowAutograd guard;
  at::Tensor buffer = allocate_shared(channel_, tensor.numel(), tensor.scalar_type()).view(tensor.sizes());
  multiply(tensor.detach(), factor, buffer);
  return keep(std::move(buffer));
}

void Operands::scale(const at::Tensor& buffer, const at::Tensor& factor) {
  const BelowAutograd guard;
  multiply(buffer, factor, buffer);
}

const at::Tensor& Operands::shared(int64_t numel, at::ScalarType dtype) {
  return keep(allocate_shared(channel_, numel, dtype));
}

const at::Tensor& Operands::flattened(const std::vector<at::Tensor>& tensors) {
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
  int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    copy_back(tensor, buffer.narrow(0, at, tensor.numel()));
    at += tensor.numel();
  }
}

void Operands::copy_back(const at::Tensor& tensor, const at::Tensor& buffer) {
  copies_.emplace_back(tensor, buffer);
}

void Operands::finish() {
  if (copies_.empty()) return;
  const BelowAutograd guard;
  for (auto& [to, from] : copies_) to.copy_(from.view(to.sizes()));
}

at::Tensor allocate_shared(transport::GroupChannel& channel, int64_t numel, at::TensorOptions options) {
  auto arena = channel.transport().shared_arena();
  void* memory = arena->allocate(static_cast<size_t>(numel) * options.dtype().itemsize());
  // The memory keeps its arena alive, not the transport, which itself keeps the tensors of failed operations.
  return at::from_blob(
      memory, {numel},
      [arena, guard = ForkGuard()](void* data) {
        if (!guard.in_forked_child()) arena->deallocate(data);
      },
      options);
}

bool memory_overlaps(const at::Tensor& a, const at::Tensor& b) {
  const auto [a_begin, a_end] = span_of(a);
  const auto [b_begin, b_end] = span_of(b);
  return a_begin < b_end && b_begin < a_end;
}

}  // namespace lockstep
