#include <array>
#include <atomic>
#include <cstring>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <lockstep/testing/simulated_device/device_memory.h>
#include <lockstep/testing/simulated_device/generator.h>
#include <lockstep/testing/simulated_device/host_memory.h>
#include <lockstep/testing/simulated_device/kernels.h>
#include <lockstep/testing/simulated_device/streams.h>

namespace lockstep::testing::simulated {
namespace {

std::atomic<int64_t> host_to_device_bytes{0};
std::atomic<int64_t> device_to_host_bytes{0};
std::atomic<int64_t> device_to_device_bytes{0};
std::atomic<int64_t> host_synchronizations{0};

/// How many kernels the calling thread is in. Their copies are no copies of the program's.
thread_local int in_kernel = 0;
struct InKernel {
  InKernel() { ++in_kernel; }
  ~InKernel() { --in_kernel; }
  InKernel(const InKernel&) = delete;
  InKernel& operator=(const InKernel&) = delete;
};

void count(std::atomic<int64_t>& bytes, const at::Tensor& copied) {
  if (in_kernel == 0) bytes += static_cast<int64_t>(copied.nbytes());
}

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "the simulated device has dense tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "the simulated device has dense tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// A CPU tensor over the same memory, for what runs in a stream's order. It does not keep the memory alive.
at::Tensor at_host_address(const at::Tensor& tensor) {
  void* begin = const_cast<void*>(tensor.const_data_ptr());
  if (on_device(tensor) && begin != nullptr) begin = DeviceMemory::host_address(begin);
  auto host = at::from_blob(begin, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

bool is_one_run_of_bytes(const at::Tensor& source, const at::Tensor& destination) {
  return source.dtype() == destination.dtype() && source.sizes() == destination.sizes() &&
         source.strides() == destination.strides() && destination.is_non_overlapping_and_dense() &&
         source.is_conj() == destination.is_conj() && source.is_neg() == destination.is_neg();
}

std::function<void()> copier(const at::Tensor& source, const at::Tensor& destination) {
  auto from = at_host_address(source), to = at_host_address(destination);
  if (is_one_run_of_bytes(source, destination)) {
    return [from, to] { std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes()); };
  }
  return [from, to] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    to.copy_(from);
  };
}

/// As in copy_device_to_device() of PyTorch's ATen/native/cuda/Copy.cu: the source's current stream copies,
/// when the destination's current stream has got here, and that one goes on when the copy is done.
void copy_between_devices(const at::Tensor& source, const at::Tensor& destination) {
  auto& sending = current_queue(source.device().index());
  auto& receiving = current_queue(destination.device().index());
  auto ready = std::make_shared<Recording>();
  auto copied = std::make_shared<Recording>();
  receiving.submit_or_run([ready] { ready->complete(); });
  sending.submit([ready, copied, copy = copier(source, destination)] {
    ready->wait();
    copy();
    copied->complete();
  });
  receiving.submit([copied] { copied->wait(); });
}

void copy_between_host_and_device(const at::Tensor& source, const at::Tensor& destination,
                                  bool non_blocking) {
  const auto& host = on_device(source) ? destination : source;
  const auto& device = on_device(source) ? source : destination;
  count(on_device(source) ? device_to_host_bytes : host_to_device_bytes, destination);
  auto& stream = current_queue(device.device().index());
  // A GPU copies to and from a run of page-locked bytes by itself; the host does the rest.
  bool alone =
      non_blocking && host.is_non_overlapping_and_dense() && host_memory().is_pinned(host.const_data_ptr());
  if (!alone) {
    count_host_synchronization();
    stream.run(copier(source, destination));
    return;
  }
  c10::Storage held;
  if (host_memory().owns(host.const_data_ptr())) held = host.storage();
  stream.submit([held, copy = copier(source, destination)] { copy(); });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) return destination;
  if (on_device(source) && on_device(destination)) {
    count(device_to_device_bytes, destination);
    if (source.device() == destination.device()) {
      current_queue(source.device().index()).submit_or_run(copier(source, destination));
    } else {
      copy_between_devices(source, destination);
    }
  } else {
    copy_between_host_and_device(source, destination, non_blocking);
  }
  return destination;
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format.has_value()) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  grow_storage(self.storage(), at::detail::computeStorageNbytesContiguous(self.sizes(), self.itemsize(),
                                                                          self.storage_offset()));
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data() == nullptr) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow_storage(self.storage(),
               at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return self.cpu().item();
}

/// Lets Module::to() give a parameter memory on another device. Without it torch takes only the devices that
/// it knows by name for dense.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return dense(self) && dense(from);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  InKernel kernel;
  std::optional<at::Tensor> host_bias;
  if (bias.has_value() && bias->defined()) host_bias = bias->cpu();
  return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed,
                         output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  InKernel kernel;
  int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [input_gradient, weight_gradient, bias_gradient] =
      at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), at::IntArrayRef{channels}, stride,
                               padding, dilation, transposed, output_padding, groups, wanted);
  auto moved = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(input.device()) : tensor;
  };
  return {moved(input_gradient), moved(weight_gradient), moved(bias_gradient)};
}

/// Operators that take small CPU tensors beside the device's, on CUDA too.
bool may_mix_devices(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::index", "aten::_index_put_impl_", "aten::index_put",
                                           "aten::index_put_", "aten::_unsafe_index"};
  return names.contains(op.schema().name());
}

/// Throws when a kernel would get tensors of several devices; 0-dimensional CPU tensors are numbers.
void check_one_device(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> first;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
    TORCH_CHECK(!first.has_value() || *first == tensor.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", *first,
                " and ", tensor.device(), "! (in ", op.schema().name(), ")");
    first = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor());
    if (argument.isTensorList()) {
      for (const auto& tensor : argument.toTensorVector()) look(tensor);
    }
  }
}

std::optional<c10::Device> device_among(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& argument : arguments) {
    if (argument.isTensor() && on_device(argument.toTensor())) return argument.toTensor().device();
  }
  return std::nullopt;
}

bool is_generator(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
}

/// All other operators: the CPU's kernels.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  InKernel kernel;
  const auto& parameters = op.schema().arguments();
  auto arguments = torch::jit::last(*stack, parameters.size());
  if (!may_mix_devices(op)) check_one_device(op, arguments);
  auto device = device_among(arguments);
  auto begin = stack->size() - parameters.size();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!is_generator(parameters[i])) continue;
    auto& argument = (*stack)[begin + i];
    if (argument.isGenerator()) {
      argument = host_generator(argument.toGenerator());
    } else if (argument.isNone() && device.has_value()) {
      argument = host_generator(default_generator(device->index()));
    }
  }
  // Its schema does not tell that it writes to the running statistics, so the fallback would lose them.
  std::vector<std::pair<at::Tensor, at::Tensor>> written;
  if (op.schema().name() == "aten::native_batch_norm") {
    for (const size_t position : {size_t{3}, size_t{4}}) {
      c10::IValue& running = (*stack)[begin + position];
      if (!running.isTensor() || !on_device(running.toTensor())) continue;
      written.emplace_back(running.toTensor(), running.toTensor().cpu());
      running = written.back().second;
    }
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  for (const auto& [to, from] : written) to.copy_(from);
}

}  // namespace

void grow_storage(const c10::Storage& storage, size_t bytes) {
  if (storage.nbytes() >= bytes) return;
  c10::DeviceGuard guard(storage.device());
  auto larger = device_memory().allocate(bytes);
  if (storage.nbytes() > 0) {
    current_queue(storage.device().index())
        .submit_or_run([to = larger.get(), from = storage.data(), kept = storage.nbytes()] {
          std::memcpy(DeviceMemory::host_address(to), DeviceMemory::host_address(from), kept);
        });
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(larger));
  impl->set_nbytes(bytes);
}

void count_host_synchronization() {
  if (in_kernel == 0) ++host_synchronizations;
}

Counters counted() {
  return {.host_to_device_bytes = host_to_device_bytes,
          .device_to_host_bytes = device_to_host_bytes,
          .device_to_device_bytes = device_to_device_bytes,
          .host_synchronizations = host_synchronizations};
}

void register_kernels() {
  using torch::Library;
  static auto* aten = new Library(Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  aten->impl("empty.memory_format", empty);
  aten->impl("empty_strided", empty_strided);
  aten->impl("as_strided", at::native::as_strided_tensorimpl);
  aten->impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(at::native::view));
  aten->impl("_reshape_alias", at::native::_reshape_alias);
  aten->impl("unfold", at::native::unfold);
  aten->impl("view_as_real", at::native::view_as_real);
  aten->impl("view_as_complex", at::native::view_as_complex);
  aten->impl("resize_", resize);
  aten->impl("set_.source_Tensor", set_tensor);
  aten->impl("set_.source_Storage", set_whole_storage);
  aten->impl("set_.source_Storage_storage_offset", set_storage);
  aten->impl("_copy_from", copy_from);
  aten->impl("_copy_from_and_resize", copy_from_and_resize);
  aten->impl("_local_scalar_dense", local_scalar_dense);
  aten->impl("record_stream", record_stream);
  aten->impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  aten->impl("convolution_overrideable", convolution);
  aten->impl("convolution_backward_overrideable", convolution_backward);
  // Where torch has one way for the CPU and another, made of smaller operators, for unknown devices: the
  // CPU's, whose bits tests compare with.
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "native_dropout", "native_dropout_backward"}) {
    aten->impl(name, torch::CppFunction::makeFromBoxedFunction<&fall_back>());
  }
  // Copies resolve these by themselves.
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto* lazy = new Library(Library::IMPL, "aten", key, __FILE__, __LINE__);
    lazy->impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
  static auto* all = new Library(Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

}  // namespace lockstep::testing::simulated
