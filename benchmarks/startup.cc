// The smallest program that communicates: one rank, one all_reduce. What a CPU program pays for its
// libraries; scripts/bench startup measures it from outside. By hand: bench_startup /tmp/rendezvous-file
#include <cstdio>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 2, "usage: bench_startup RENDEZVOUS_FILE");
  lockstep::InitOptions options;
  options.init_method = std::string("file://") + argv[1];
  options.rank = 0;
  options.world_size = 1;
  auto world = lockstep::init_process_group(options);
  at::Tensor numbers = at::ones({16});
  lockstep::all_reduce(numbers);
  return numbers.sum().item<float>() == 16 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_startup: %s\n", error.what());
  return 1;
}
