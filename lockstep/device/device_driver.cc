// Answers device_test.py: what one process says of CUDA. What torch knows of it can be asked once.

#include <fstream>
#include <iostream>
#include <string>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/testing/driver.h>

namespace device_driver {
namespace {

bool maps(const std::string& library) {
  std::ifstream file("/proc/self/maps");
  for (std::string line; std::getline(file, line);) {
    if (line.find(library) != std::string::npos) return true;
  }
  return false;
}

void answer(const std::string& question) {
  if (question == "ask torch too early") {
    std::cout << "torch says: " << at::hasCUDA() << '\n';
  } else if (question == "is it loaded") {
    std::cout << "loaded: " << lockstep::cuda_is_loaded() << ", mapped: " << maps("libtorch_cuda.so") << '\n';
  } else if (question == "count") {
    std::cout << "devices: " << lockstep::cuda_device_count() << '\n';
  } else if (question == "choose") {
    std::cout << "device: " << lockstep::set_device().str() << '\n';
  } else if (question == "chosen") {
    const auto chosen = lockstep::chosen_device();
    std::cout << "chosen: " << (chosen ? chosen->str() : "none") << '\n';
  } else if (question == "load") {
    std::cout << "NCCL: " << lockstep::load_cuda_library().nccl_version() << '\n';
  } else if (question == "problem") {
    std::cout << "problem: " << lockstep::load_cuda_library().problem() << '\n';
  } else if (question == "use") {
    std::cout << "usable devices: " << lockstep::cuda_library().device_count() << '\n';
  } else if (question == "registrar") {
    auto* registrar = lockstep::host_memory_registrar(c10::kCUDA);
    alignas(4096) static char page[4096];
    std::cout << "registrar: " << (registrar != nullptr);
    if (registrar != nullptr) std::cout << ", locks: " << registrar->lock(page, sizeof page);
    std::cout << '\n';
  } else {
    lockstep::set_device(c10::Device(question));
    std::cout << question << " is set\n";
  }
}

}  // namespace

LOCKSTEP_DRIVER(device_driver) {
  for (int i = 1; i < argc; ++i) {
    try {
      answer(argv[i]);
    } catch (const c10::ValueError& error) {
      std::cout << "ValueError: " << error.what_without_backtrace() << '\n';
    } catch (const c10::Error& error) {
      std::cout << "Error: " << error.what_without_backtrace() << '\n';
    }
  }
  return 0;
}

}  // namespace device_driver
