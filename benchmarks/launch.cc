// The least that a launcher can start: joins, sums once, and notes when. scripts/bench launch measures launchers with it.
// FOLDER gets a file RANK.PID that holds CLOCK_MONOTONIC in nanoseconds. With --stay it sums on until it is ended.
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>

#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 2 || (argc == 3 && std::string_view(argv[2]) == "--stay"),
              "usage: bench_launch FOLDER [--stay]");
  auto world = lockstep::init_process_group();
  at::Tensor numbers = at::ones({16});
  lockstep::all_reduce(numbers);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const std::string file =
      std::string(argv[1]) + "/" + std::to_string(world.rank()) + "." + std::to_string(::getpid());
  std::ofstream(file + ".new") << std::chrono::nanoseconds(now).count();
  std::filesystem::rename(file + ".new", file);
  while (argc == 3) {
    lockstep::all_reduce(numbers.fill_(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_launch: %s\n", error.what());
  return 1;
}
