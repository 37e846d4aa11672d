#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>

namespace lockstep {
namespace {

/// Type and index of the device that set_device() was given last; -1: none.
std::atomic<int> chosen{-1};

constexpr int kIndices = 1 << 8;

struct CardIdentities {
  std::mutex mutex;
  std::array<CardIdentity, c10::COMPILE_TIME_MAX_DEVICE_TYPES> of_type;
};

/// Never destroyed, for a library's own end may be later.
CardIdentities& card_identities() {
  static auto& all = *new CardIdentities;
  return all;
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
  TORCH_CHECK_VALUE(
      index < cuda_devices, "LOCAL_RANK is ", index, ", but this process sees ", cuda_devices,
      " CUDA device(s); start no more processes per host than it has devices, see what "
      "CUDA_VISIBLE_DEVICES hides, or call set_device(c10::Device(c10::kCUDA, 0)): that is right "
      "where every process sees only its own device, and makes ranks share one card otherwise");
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
}

c10::Device local_device() {
  const int devices = cuda_device_count();
  if (devices == 0) return c10::Device(c10::kCPU);  // whatever the environment says
  return choose_device(read_launch_environment(environment::text), devices);
}

void set_device(c10::Device device) {
  if (device.is_cpu()) return;
  if (device.is_cuda()) {
    // By name it is loaded even where no device node is to be seen, for a reason better than "there is none".
    const int devices = cuda_device_count();
    TORCH_CHECK_VALUE(devices > 0, device.str(), " was asked for, but ", why_no_cuda());
    TORCH_CHECK_VALUE(
        device.has_index() && device.index() < devices, device.str(), " is not one of the ", devices,
        " visible CUDA devices; name one by its index, or call set_device() to choose by LOCAL_RANK");
  } else {
    TORCH_CHECK_VALUE(device.is_privateuseone() && c10::impl::hasDeviceGuardImpl(device.type()),
                      "set_device takes a CPU or CUDA device, not ", device.str());
    const int devices = c10::impl::getDeviceGuardImpl(device.type())->deviceCount();
    TORCH_CHECK_VALUE(device.has_index() && device.index() < devices, device.str(), " is not one of the ",
                      devices, " devices of its kind; name one by its index");
  }
  c10::impl::getDeviceGuardImpl(device.type())->setDevice(device);
  chosen = static_cast<int>(device.type()) * kIndices + device.index();
}

c10::Device set_device() {
  auto device = local_device();
  set_device(device);
  return device;
}

std::optional<c10::Device> chosen_device() {
  if (const int known = chosen.load(); known >= 0) {
    return c10::Device(static_cast<c10::DeviceType>(known / kIndices),
                       static_cast<c10::DeviceIndex>(known % kIndices));
  }
  if (!cuda_is_loaded()) return std::nullopt;
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.deviceCount() == 0) return std::nullopt;
  const c10::DeviceIndex current = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice().index();
  if (current == 0 && !hooks.hasPrimaryContext(current)) return std::nullopt;
  return c10::Device(c10::kCUDA, current);
}

void set_card_identity(c10::DeviceType type, CardIdentity identity) {
  CardIdentities& all = card_identities();
  std::lock_guard lock(all.mutex);
  all.of_type.at(static_cast<size_t>(type)) = std::move(identity);
}

std::string card_identity(c10::Device device) {
  CardIdentities& all = card_identities();
  CardIdentity identity;
  {
    std::lock_guard lock(all.mutex);
    identity = all.of_type.at(static_cast<size_t>(device.type()));
  }
  return identity ? identity(device.index()) : "";
}

}  // namespace lockstep
