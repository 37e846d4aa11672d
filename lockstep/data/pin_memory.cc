#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <lockstep/data/pin_memory.h>

namespace lockstep::data::internal {

std::optional<c10::Device> device_for_pinning() {
  if (!at::hasCUDA()) {
    TORCH_WARN_ONCE(
        "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't "
        "be used.");
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

PinningScope::PinningScope(c10::Device device)
    : before_(c10::impl::VirtualGuardImpl(device.type()).exchangeDevice(device)) {}

PinningScope::~PinningScope() {
  c10::impl::VirtualGuardImpl(before_.type()).uncheckedSetDevice(before_);
}

}  // namespace lockstep::data::internal
