// Shows that an installed Lockstep can be built against and run: a group of one sums four ones.
#include <iostream>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>

#include <lockstep/base/deadline.h>
#include <lockstep/lockstep.h>

int main() {
  auto world = lockstep::init_process_group({.rank = 0, .world_size = 1});
  at::Tensor tensor = at::ones({4});
  lockstep::all_reduce(tensor);
  std::cout << "sum: " << tensor.sum().item<float>() << '\n';
  return lockstep::Deadline::never().expired() ? 1 : 0;
}
