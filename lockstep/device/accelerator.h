#pragma once

#include <cstdint>
#include <optional>

#include <c10/core/Device.h>

namespace lockstep {

/// The kind of device beside the CPU that this process can compute on, as at::getAccelerator() names it; none
/// where there is none. It loads nothing, and never asks torch about CUDA before torch's CUDA library is in
/// the process: the answer to a question too early, "no", would stand for the rest of the process (see
/// set_device()). at::getAccelerator(), at::hasCUDA(), Tensor::is_pinned() and torch::manual_seed() do ask.
/// Thread-safe.
std::optional<c10::DeviceType> accelerator();

/// How many of its devices are visible; 0 without one. Thread-safe.
int accelerator_count();

/// Gives the memory that torch keeps of freed tensors back to the accelerator's devices, so that others, or
/// larger tensors, can have it; torch::cuda's emptyCache(). Does nothing without an accelerator, and for one
/// whose allocator keeps none. Thread-safe; never throws.
void empty_device_cache() noexcept;

/// Waits until everything that was enqueued on the device is done; nothing on the CPU.
void synchronize(c10::Device device);

/// Bytes of a device's memory that tensors take, at most, since the last reset_peak_device_memory(); none
/// where the device's allocator does not count.
std::optional<int64_t> peak_device_memory(c10::Device device);
void reset_peak_device_memory(c10::Device device);

}  // namespace lockstep
