#pragma once

#include <cstddef>

#include <c10/core/Storage.h>

#include <lockstep/testing/simulated_device/simulated_device.h>

namespace lockstep::testing::simulated {

/// Registers the device's operators with torch's dispatcher, for the life of the process.
void register_kernels();

/// Gives a device storage at least `bytes`, and keeps what is in it.
void grow_storage(const c10::Storage& storage, size_t bytes);

/// Counts a wait of the host; not while a kernel runs, which waits for itself.
void count_host_synchronization();
/// What copies and waits have been counted.
Counters counted();

}  // namespace lockstep::testing::simulated
