#include <exception>

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/device/cuda_library.h>

namespace lockstep {
namespace {

/// Null where the device's allocator is none that keeps memory.
c10::DeviceAllocator* allocator_of(c10::DeviceType type) {
  if (type == c10::kCPU) return nullptr;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index()
                            : c10::impl::getDeviceGuardImpl(device.type())->getDevice().index();
}

}  // namespace

std::optional<c10::DeviceType> accelerator() {
  if (at::isPrivateUse1HooksRegistered()) return c10::kPrivateUse1;
  if (cuda_is_loaded() && at::detail::getCUDAHooks().hasCUDA()) return c10::kCUDA;
  return std::nullopt;
}

int accelerator_count() {
  const auto type = accelerator();
  return type ? c10::impl::getDeviceGuardImpl(*type)->deviceCount() : 0;
}

void empty_device_cache() noexcept {
  try {
    const auto type = accelerator();
    if (auto* allocator = type ? allocator_of(*type) : nullptr) allocator->emptyCache();
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kWarning) << "the device's unused memory could not be given back: " << text_of(error);
  }
}

void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(index_of(device));
}

std::optional<int64_t> peak_device_memory(c10::Device device) {
  auto* allocator = allocator_of(device.type());
  if (allocator == nullptr) return std::nullopt;
  const auto stats = allocator->getDeviceStats(index_of(device));
  return stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].peak;
}

void reset_peak_device_memory(c10::Device device) {
  if (auto* allocator = allocator_of(device.type())) allocator->resetPeakStats(index_of(device));
}

}  // namespace lockstep
