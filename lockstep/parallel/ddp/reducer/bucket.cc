#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/from_blob.h>

#include <lockstep/parallel/ddp/reducer/bucket.h>

namespace lockstep {
namespace {

constexpr size_t kCacheLine = 64;

/// The gradient's place has the parameter's own memory order where that has no gaps, else it is contiguous
/// (the "gradient layout contract" of torch/csrc/autograd/functions/accumulate_grad.h). It shares the
/// bucket's storage but is no view in autograd's books: LibTorch's Optimizer::zero_grad() calls detach_() on
/// gradients, which views refuse.
at::Tensor view_of(const at::Tensor& buffer, int64_t offset, const at::Tensor& parameter) {
  at::AutoDispatchBelowADInplaceOrView no_view_tracking;
  if (parameter.is_non_overlapping_and_dense()) {
    return buffer.as_strided(parameter.sizes(), parameter.strides(), offset);
  }
  return buffer.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

}  // namespace

void give_memory(Bucket& bucket, const std::vector<at::Tensor>& parameters, const BucketLayout& layout) {
  at::NoGradGuard no_grad;
  const auto options =
      parameters[bucket.parameters.front()].options().requires_grad(false).dtype(layout.dtype);
  const size_t element = c10::elementSize(layout.dtype);
  const size_t unit = layout.aligned ? std::max<size_t>(1, kCacheLine / element) : 1;
  std::vector<size_t> begins;  // in elements
  size_t numel = 0;
  bucket.bytes = 0;
  for (const size_t index : bucket.parameters) {
    numel = (numel + unit - 1) / unit * unit;
    begins.push_back(numel);
    numel += parameters[index].numel();
    bucket.bytes += parameters[index].numel() * element;
  }
  const at::Tensor buffer = shared_zeros(layout.group, static_cast<int64_t>(numel), options);
  bucket.views.clear();
  std::vector<size_t> offsets;
  for (size_t position = 0; position < begins.size(); ++position) {
    bucket.views.push_back(
        view_of(buffer, static_cast<int64_t>(begins[position]), parameters[bucket.parameters[position]]));
    offsets.push_back(begins[position] * element);
  }
  bucket.memory = std::make_shared<BucketMemory>(buffer, std::move(offsets),
                                                 buffer.is_cpu() ? arena_of(layout.group) : nullptr);
}

void abandon_memory(Bucket& bucket) {
  bucket.views.clear();
  if (auto memory = std::exchange(bucket.memory, {})) memory->abandon();
}

at::Tensor slot_tensor(Bucket& bucket, size_t position) {
  const at::Tensor& view = bucket.views[position];
  if (view.numel() == 0) return view;
  const MemoryBlock block = bucket.memory->take(position);
  TORCH_INTERNAL_ASSERT(block.memory != nullptr);
  lend(block);
  // Told the device, it need not ask the driver whose memory this is.
  return at::from_blob(block.memory, view.sizes(), view.strides(), &give_back, view.options(), view.device());
}

at::Tensor empty_sparse_gradient(const at::Tensor& parameter) {
  // An embedding's: one sparse dimension, the rows.
  return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(),
                                          parameter.options().requires_grad(false).layout(c10::kSparse));
}

bool lies_in_slot(const Bucket& bucket, size_t position, const at::Tensor& gradient) {
  const at::Tensor& view = bucket.views[position];
  if (gradient.const_data_ptr() != view.const_data_ptr() || gradient.scalar_type() != view.scalar_type()) {
    return false;
  }
  for (int64_t i = 0; i < view.dim(); ++i) {  // autograd leaves dimensions of one any stride, too
    if (view.size(i) != 1 && gradient.stride(i) != view.stride(i)) return false;
  }
  return true;
}

bool held_by_others(const at::Tensor& gradient, const at::Tensor& incoming) {
  size_t autograds = 0;
  if (incoming.defined() && incoming.has_storage() && incoming.storage().is_alias_of(gradient.storage())) {
    // A view holds its base, too: the gradient of a Linear's weight is one.
    autograds = incoming.is_view() ? 2 : 1;
  }
  return gradient.use_count() > 1 || gradient.storage().use_count() > 1 + autograds;
}

std::chrono::nanoseconds duration_of(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    return std::chrono::nanoseconds(static_cast<int64_t>(work->getDuration() * 1e6));
  } catch (const c10::Error&) {
    return {};
  }
}

}  // namespace lockstep
