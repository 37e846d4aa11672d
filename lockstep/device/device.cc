#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/device/device.h>

namespace lockstep {
namespace {

/// Zero on a build without CUDA, and as long as torch's CUDA library is not loaded: this library does not
/// link it.
int usable_cuda_devices() {
  const auto& hooks = at::detail::getCUDAHooks();
  return hooks.hasCUDA() ? static_cast<int>(hooks.deviceCount()) : 0;
}

}  // namespace

c10::Device choose_device(const LaunchEnvironment& environment, int cuda_devices) {
  if (cuda_devices <= 0) return c10::Device(c10::kCPU);
  bool alone = environment.world_size <= 1;
  TORCH_CHECK_VALUE(
      environment.local_rank >= 0 || alone, "this host has CUDA devices, but LOCAL_RANK is not set, and ",
      "rank ", environment.rank, " of ", environment.world_size,
      " does not tell which of them is this process's; set LOCAL_RANK (lockstep run and torchrun do), or "
      "call set_device with a device");
  int index = environment.local_rank < 0 ? 0 : environment.local_rank;
  TORCH_CHECK_VALUE(index < cuda_devices, "LOCAL_RANK is ", index, ", but this process sees ", cuda_devices,
                    " CUDA device(s); start no more processes per host than it has devices, see what "
                    "CUDA_VISIBLE_DEVICES hides, or, where every process sees only its own device, call "
                    "set_device(c10::Device(c10::kCUDA, 0))");
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

c10::Device local_device() {
  int devices = usable_cuda_devices();
  if (devices == 0) return c10::Device(c10::kCPU);  // whatever the environment says
  return choose_device(read_launch_environment(environment::text), devices);
}

void set_device(c10::Device device) {
  if (device.is_cpu()) return;
  TORCH_CHECK_VALUE(device.is_cuda(), "set_device takes a CPU or CUDA device, not ", device.str());
  int devices = usable_cuda_devices();
  TORCH_CHECK_VALUE(devices > 0, device.str(),
                    " was asked for, but torch has no usable CUDA device here: it is a CPU ",
                    "build, its CUDA library is not loaded, or no driver or device is visible");
  TORCH_CHECK_VALUE(
      device.has_index() && device.index() < devices, device.str(), " is not one of the ", devices,
      " visible CUDA devices; name one by its index, or call set_device() to choose by LOCAL_RANK");
  c10::impl::getDeviceGuardImpl(c10::kCUDA)->setDevice(device);
}

c10::Device set_device() {
  auto device = local_device();
  set_device(device);
  return device;
}

}  // namespace lockstep
