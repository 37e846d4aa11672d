#pragma once

#include <algorithm>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>
#include <lockstep/rendezvous/launch_environment.h>

/// --device of the examples.
inline void add_device_option(CLI::App& app, std::string& name) {
  app.add_option(
         "--device", name,
         "auto (CUDA where each rank has a device of its own, else the CPU), cpu, cuda, or cuda:N, which "
         "all ranks share")
      ->check([](const std::string& text) {
        const bool known = text == "auto" || text == "cpu" || text == "cuda" || text.starts_with("cuda:");
        return known ? "" : "--device is '" + text + "'; it takes auto, cpu, cuda or cuda:N";
      })
      ->capture_default_str();
}

/// Makes the device that was named this process's. Before anything else asks torch about CUDA: its answer
/// before its CUDA library is loaded, which this does, would be "there is none", for ever.
inline c10::Device use_device(const std::string& name) {
  c10::Device device(c10::kCPU);
  if (name == "auto") {
    const int ranks = lockstep::read_launch_environment(lockstep::environment::text).local_world_size;
    if (lockstep::cuda_device_count() >= std::max(1, ranks)) device = lockstep::local_device();
  } else if (name == "cuda") {
    device = lockstep::local_device();
    if (device.is_cpu()) device = c10::Device(c10::kCUDA, 0);  // set_device() says why not
  } else {
    device = c10::Device(name);
  }
  lockstep::set_device(device);
  return device;
}
