// A program that links Lockstep::cuda, so that torch may be asked about CUDA in any order.

#include <iostream>

#include <ATen/Context.h>

#include <lockstep/device/cuda_library.h>

int main() {
  const bool devices = at::hasCUDA();  // too early for a program that does not link it
  std::cout << "devices: " << devices << ", NCCL: " << lockstep::load_cuda_library().nccl_version()
            << ", built: " << lockstep::nccl_is_built() << '\n';
}
