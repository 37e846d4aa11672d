#pragma once

#include <c10/core/Device.h>

#include <lockstep/base/environment.h>
#include <lockstep/device/device.h>

namespace lockstep::benchmarks {

/// The device that is measured: LOCKSTEP_BENCH_DEVICE (cuda:0), else the CPU. Makes it this process's: to be
/// called first of all.
inline c10::Device use_device() {
  const c10::Device device(environment::text("LOCKSTEP_BENCH_DEVICE").value_or("cpu"));
  lockstep::set_device(device);
  return device;
}

}  // namespace lockstep::benchmarks
