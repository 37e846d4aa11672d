// Joins a process group as its options say, sums the ranks over it, and prints the sum; the tests start it in
// every way.
//
//     meeting_driver [--init-method METHOD] [--rank R] [--world-size N] [--timeout SECONDS] [--hold |
//     --forever]
#include <chrono>
#include <cstdint>
#include <iostream>
#include <limits>
#include <string>
#include <unistd.h>

#include <ATen/ops/full.h>
#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

namespace {

struct Settings {
  std::string init_method;
  int rank = -1;
  int world_size = -1;
  double timeout = 30;
  bool hold = false;
  bool forever = false;
};

int64_t sum_of_ranks(int rank) {
  const auto tensor = at::full({}, rank, at::kLong);
  lockstep::all_reduce(tensor);
  return tensor.item<int64_t>();
}

void meet(const Settings& settings) {
  lockstep::InitOptions options;
  options.init_method = settings.init_method;
  options.rank = settings.rank;
  options.world_size = settings.world_size;
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(settings.timeout));
  auto world = lockstep::init_process_group(options);
  std::cout << "rank " << world.rank() << " of " << world.size() << " (pid " << ::getpid() << ") has the sum "
            << sum_of_ranks(world.rank()) << std::endl;
  while (settings.forever) sum_of_ranks(world.rank());
  if (settings.hold) std::cin.ignore(std::numeric_limits<std::streamsize>::max());
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app("Sums the ranks of a group");
  app.add_option("--init-method", settings.init_method, "env://, tcp://HOST:PORT or file:///PATH");
  app.add_option("--rank", settings.rank, "as the environment says unless given");
  app.add_option("--world-size", settings.world_size, "as the environment says unless given");
  app.add_option("--timeout", settings.timeout, "seconds, of the meeting and of each operation");
  app.add_flag("--hold", settings.hold, "stay in the group until standard input ends");
  app.add_flag("--forever", settings.forever, "sum again and again");
  CLI11_PARSE(app, argc, argv);
  meet(settings);
} catch (const c10::Error& error) {
  std::cerr << "meeting_driver: " << error.what_without_backtrace() << std::endl;
  return 1;
}
