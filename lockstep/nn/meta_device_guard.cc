#include <algorithm>

#include <torch/library.h>

#include <lockstep/nn/meta_device_guard.h>

namespace lockstep {
namespace {

/// torch keeps it for modules whose initialisation is deferred, and has no kernels for it.
constexpr auto kMetaKey = c10::DispatchKey::DeferredInit;

/// Calls an operator as it is; where it makes a tensor of nothing but numbers, and no device is given, on the meta device.
void call_on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& parameters = op.schema().arguments();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(parameters.size());
  const bool of_numbers = std::none_of(arguments, stack->end(), [](const c10::IValue& value) {
    return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
  });
  for (size_t i = 0; of_numbers && i < parameters.size(); ++i) {
    c10::IValue& value = *(arguments + static_cast<std::ptrdiff_t>(i));
    if (parameters[i].name() == "device" && value.isNone()) value = c10::Device(c10::kMeta);
  }
  const c10::impl::ExcludeDispatchKeyGuard once(kMetaKey);
  op.callBoxed(stack);
}

/// The first guard registers it, so that programs without one have nothing of it.
c10::DispatchKey registered_key() {
  static const torch::Library* const library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kMetaKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_meta>());
    return made;  // never taken back: guards may live until the process ends
  }();
  (void)library;
  return kMetaKey;
}

}  // namespace

MetaDeviceGuard::MetaDeviceGuard() : include_(registered_key()) {}

}  // namespace lockstep
