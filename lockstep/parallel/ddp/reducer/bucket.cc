#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <lockstep/collectives/functional.h>
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

void give_memory(Bucket& bucket, const ReducerSettings& settings) {
  at::NoGradGuard no_grad;
  const auto& parameters = settings.tensors;
  const size_t first = bucket.parameters.front();
  const auto dtype = settings.reduce_dtype.value_or(settings.dtypes[first]);
  const auto options = parameters[first].options().requires_grad(false).dtype(dtype);
  const size_t element = c10::elementSize(dtype);
  const size_t unit = settings.hook ? 1 : std::max<size_t>(1, kCacheLine / element);
  std::vector<size_t> begins;  // in elements
  size_t numel = 0;
  bucket.bytes = 0;
  for (const size_t index : bucket.parameters) {
    numel = (numel + unit - 1) / unit * unit;
    begins.push_back(numel);
    numel += parameters[index].numel();
    bucket.bytes += parameters[index].numel() * element;
  }
  const at::Tensor buffer = shared_zeros(settings.group(), static_cast<int64_t>(numel), options);
  bucket.views.clear();
  std::vector<size_t> offsets;
  for (size_t position = 0; position < begins.size(); ++position) {
    bucket.views.push_back(
        view_of(buffer, static_cast<int64_t>(begins[position]), parameters[bucket.parameters[position]]));
    offsets.push_back(begins[position] * element);
  }
  bucket.memory = std::make_shared<BucketMemory>(buffer, std::move(offsets),
                                                 buffer.is_cpu() ? arena_of(settings.group()) : nullptr);
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

void launch_reduction(Bucket& bucket, size_t index, bool last, const ReducerSettings& settings) {
  const c10::Device device = settings.tensors[bucket.parameters.front()].device();
  // The gradient that completed the bucket may be another device's, and come on another stream.
  const c10::OptionalDeviceGuard guard(device);
  bucket.streams.join(device);
  if (settings.hook) {
    std::vector<at::Tensor> members;
    for (const size_t parameter : bucket.parameters) members.push_back(settings.tensors[parameter]);
    GradBucket grad_bucket(index, bucket.sparse ? bucket.sparse_gradient : bucket.memory->buffer(),
                           std::move(members), last);
    bucket.future = settings.hook(grad_bucket);
    TORCH_CHECK(bucket.future, "the communication hook ", settings.hook_name, " returned no future");
  } else if (bucket.sparse) {
    bucket.sparse_gradient = bucket.sparse_gradient / settings.divides_by();
    bucket.work = all_reduce(bucket.sparse_gradient, ReduceOp::SUM, settings.group(), /*async_op=*/true);
  } else {
    c10d::AllreduceOptions options;
    options.reduceOp = settings.divides_sums() ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
    // The end of backward() follows the last bucket at once and runs it itself, which saves waking a thread.
    // On a device its stream goes on meanwhile.
    options.asyncOp = !last || !device.is_cpu();
    std::vector<at::Tensor> tensors{bucket.memory->buffer()};
    const BetweenHosts between_hosts(settings.options.between_hosts, bucket.feedback);
    bucket.work = settings.group()->allreduce(tensors, options);
  }
}

void await_reduction(Bucket& bucket, const ReducerSettings& settings) {
  at::NoGradGuard no_grad;
  if (bucket.work) {
    bucket.work->wait();
    // In lower precision the sum is rounded, then the mean, as in PyTorch.
    if (settings.divides_sums() && !bucket.sparse)
      at::Tensor(bucket.memory->buffer()).div_(settings.divides_by());
    return;
  }
  if (!bucket.future) return;
  bucket.future->waitAndThrow();
  const at::Tensor result = tensor_of(bucket.future->constValue());
  if (bucket.sparse) {
    bucket.sparse_gradient = result;
    return;
  }
  at::Tensor buffer = bucket.memory->buffer();
  TORCH_CHECK(result.numel() == buffer.numel(), "the communication hook ", settings.hook_name, " gave ",
              result.numel(), " elements for a bucket of ", buffer.numel());
  if (result.data_ptr() != buffer.data_ptr()) buffer.copy_(result.view_as(buffer));
}

std::chrono::nanoseconds duration_of(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    return std::chrono::nanoseconds(static_cast<int64_t>(work->getDuration() * 1e6));
  } catch (const c10::Error&) {
    return {};
  }
}

}  // namespace lockstep
