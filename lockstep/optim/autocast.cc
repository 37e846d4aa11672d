#include <exception>

#include <ATen/autocast_mode.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/device/cuda_library.h>
#include <lockstep/optim/autocast.h>

namespace lockstep {
namespace {

using c10::DeviceType;
using c10::ScalarType;
using torch::autograd::AutogradContext;

// Where custom_fwd() leaves what custom_bwd() wants.
constexpr const char* kDtypeKey = "lockstep.autocast_dtype";
constexpr const char* kEnabledKey = "lockstep.fwd_used_autocast";

bool cuda_has_bfloat16() {
  static const bool kHas = [] {  // also where it is emulated, as torch.cuda.is_bf16_supported()
    try {
      at::ones({1}, at::TensorOptions(at::kCUDA).dtype(at::kBFloat16));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return kHas;
}

DeviceType checked(DeviceType device_type) {
  TORCH_CHECK(is_autocast_available(device_type), "User specified an unsupported autocast device_type '",
              c10::DeviceTypeName(device_type, /*lower_case=*/true), "'; CPU and CUDA have one");
  return device_type;
}

/// Whether a scope that is to be enabled can be.
bool can_enable(DeviceType device_type, ScalarType dtype) {
  if (device_type == at::kCUDA) {
    if (cuda_device_count() == 0) {
      TORCH_WARN_ONCE("CUDA is not available. Disabling autocast.");
      return false;
    }
    TORCH_CHECK(dtype != at::kBFloat16 || cuda_has_bfloat16(),
                "Current CUDA Device does not support bfloat16. Please switch dtype to float16.");
    return true;
  }
  if (dtype == at::kBFloat16 || dtype == at::kHalf) return true;
  const auto name = c10::DeviceTypeName(device_type);
  TORCH_WARN_ONCE("In ", name, " autocast, but the target dtype is not supported. Disabling autocast.\n",
                  name, " Autocast only supports dtypes of torch.bfloat16, torch.float16 currently; it is ",
                  dtype);
  return false;
}

Autocast remember(AutogradContext* context, DeviceType device_type, bool enabled) {
  const ScalarType dtype = get_autocast_dtype(device_type);
  context->saved_data[kDtypeKey] = static_cast<int64_t>(dtype);
  context->saved_data[kEnabledKey] = enabled;
  return Autocast(device_type, {.dtype = dtype, .enabled = enabled});
}

}  // namespace

Autocast::Autocast(DeviceType device_type, const AutocastOptions& options)
    : device_type_(checked(device_type)),
      enabled_before_(at::autocast::is_autocast_enabled(device_type)),
      dtype_before_(at::autocast::get_autocast_dtype(device_type)),
      cache_enabled_before_(at::autocast::is_autocast_cache_enabled()) {
  const ScalarType dtype = options.dtype.value_or(dtype_before_);
  const bool enabled = options.enabled && can_enable(device_type, dtype);
  at::autocast::set_autocast_enabled(device_type, enabled);
  at::autocast::set_autocast_dtype(device_type, dtype);
  at::autocast::increment_nesting();
  at::autocast::set_autocast_cache_enabled(options.cache_enabled.value_or(cache_enabled_before_));
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_type_, enabled_before_);
  at::autocast::set_autocast_dtype(device_type_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_enabled_before_);
}

bool is_autocast_available(DeviceType device_type) {
  return at::autocast::is_autocast_available(device_type);
}

bool is_autocast_enabled(DeviceType device_type) {
  return at::autocast::is_autocast_enabled(checked(device_type));
}

ScalarType get_autocast_dtype(DeviceType device_type) {
  return at::autocast::get_autocast_dtype(checked(device_type));
}

Autocast custom_fwd(AutogradContext* context, DeviceType device_type) {
  return remember(context, device_type, is_autocast_enabled(device_type));
}

Autocast custom_bwd(AutogradContext* context, DeviceType device_type) {
  const auto& saved = context->saved_data;
  TORCH_CHECK(saved.count(kEnabledKey) == 1,
              "custom_bwd: forward() did not call custom_fwd(), so it is not known whether it used autocast");
  return Autocast(device_type, {.dtype = static_cast<ScalarType>(saved.at(kDtypeKey).toInt()),
                                .enabled = saved.at(kEnabledKey).toBool()});
}

Autocast internal::custom_fwd_without_autocast(AutogradContext* context, DeviceType device_type) {
  return remember(context, device_type, /*enabled=*/false);
}

at::Tensor internal::cast_eligible(const at::Tensor& tensor, DeviceType device_type, ScalarType dtype) {
  const bool eligible = tensor.is_floating_point() && tensor.device().type() == device_type &&
                        tensor.scalar_type() != at::kDouble;
  return eligible ? tensor.to(dtype) : tensor;
}

}  // namespace lockstep
