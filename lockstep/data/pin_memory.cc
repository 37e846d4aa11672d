#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <lockstep/data/pin_memory.h>
#include <lockstep/device/accelerator.h>

namespace lockstep::data::internal {

at::Tensor pinned(const at::Tensor& tensor) {
  // Asked here, as torch's own question would come too early where CUDA is not loaded yet.
  TORCH_CHECK(accelerator(),
              "pin_memory: there is no accelerator, so there is nothing to page-lock memory for. For a CUDA "
              "device, call lockstep::set_device() first");
  return tensor.pin_memory();
}

std::optional<c10::Device> device_for_pinning() {
  const auto type = accelerator();
  if (!type) {
    TORCH_WARN_ONCE(
        "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't "
        "be used.");
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(*type).getDevice();
}

PinningScope::PinningScope(c10::Device device)
    : before_(c10::impl::VirtualGuardImpl(device.type()).exchangeDevice(device)) {}

PinningScope::~PinningScope() {
  c10::impl::VirtualGuardImpl(before_.type()).uncheckedSetDevice(before_);
}

}  // namespace lockstep::data::internal
