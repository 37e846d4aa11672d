#include <array>
#include <atomic>

#include <lockstep/device/host_memory.h>

namespace lockstep {
namespace {

std::atomic<HostMemoryRegistrar*>& registrar_of(c10::DeviceType device) {
  static std::array<std::atomic<HostMemoryRegistrar*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all{};
  return all.at(static_cast<size_t>(device));
}

}  // namespace

void set_host_memory_registrar(c10::DeviceType device, HostMemoryRegistrar* registrar) {
  registrar_of(device).store(registrar, std::memory_order_release);
}

HostMemoryRegistrar* host_memory_registrar(c10::DeviceType device) {
  return registrar_of(device).load(std::memory_order_acquire);
}

}  // namespace lockstep
