// Trains a step on the CPU, as most programs do, and says what of CUDA came into the process with it.

#include <fstream>
#include <iostream>
#include <memory>
#include <string>

#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/testing/driver.h>

LOCKSTEP_DRIVER(cpu_training_driver) {
  const at::Device device = lockstep::set_device();
  auto world = lockstep::init_process_group();
  at::Tensor tensor = torch::ones({8});
  lockstep::all_reduce(tensor);
  torch::manual_seed(1);
  auto linear = std::make_shared<torch::nn::LinearImpl>(4, 2);
  lockstep::DistributedDataParallel<torch::nn::LinearImpl> model(linear);
  torch::optim::SGD optimizer(linear->parameters(), 0.1);
  model(torch::ones({3, 4}, device)).sum().backward();
  optimizer.step();
  bool mapped = false;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("libtorch_cuda.so") != std::string::npos ||
        line.find("liblockstep_cuda.so") != std::string::npos)
      mapped = true;
  }
  std::cout << device.str() << ' ' << tensor[0].item<float>() << ' ' << lockstep::get_backend() << ' '
            << (mapped ? "CUDA is mapped" : "no CUDA") << '\n';
  return 0;
}
