#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/device/existing_device.h>

namespace lockstep {

c10::Device existing_device(c10::Device device, std::string_view who) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  TORCH_CHECK_VALUE(c10::impl::hasDeviceGuardImpl(device.type()), who, ": ", device.str(),
                    " was asked for, but torch has no such devices here: it is built without them, or their "
                    "library is not loaded");
  const auto* guard = c10::impl::getDeviceGuardImpl(device.type());
  if (!device.has_index()) device = guard->getDevice();
  TORCH_CHECK_VALUE(device.index() < guard->deviceCount(), who, ": there is no ", device.str(),
                    "; the number of visible devices is ", static_cast<int>(guard->deviceCount()));
  return device;
}

}  // namespace lockstep
