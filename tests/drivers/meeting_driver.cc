// Joins a process group as its options say, sums the ranks over it, and prints the sum; the tests start it in
// every way.
//
//     meeting_driver [--init-method METHOD] [--rank R] [--world-size N] [--timeout SECONDS]
//     [--set NAME=VALUE]... [--save FOLDER] [--spawn N [--numbered]] [--hold | --until-end | --forever [--fail-last R]]
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <poll.h>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/launch/spawn.h>
#include <lockstep/testing/driver.h>

namespace meeting_driver {
namespace {

struct Settings {
  std::string init_method;
  int rank = -1;
  int world_size = -1;
  double timeout = 30;
  std::vector<std::string> variables;
  std::string save;
  int spawn = 0;
  bool numbered = false;
  bool hold = false;
  bool until_end = false;
  bool forever = false;
  int fail_last = -1;
};

int64_t sum_of_ranks(int rank) {
  const auto tensor = at::full({}, rank, at::kLong);
  lockstep::all_reduce(tensor);
  return tensor.item<int64_t>();
}

/// Sums again and again, and checks each sum, until rank 0's standard input ends.
void sum_until_end(int rank, int64_t world_size) {
  constexpr int64_t kNumel = 50'000;
  bool ended = false;
  for (int64_t round = 0; !ended; ++round) {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    const bool ends = rank == 0 && ::poll(&input, 1, 0) > 0;
    const auto tensor = at::full({kNumel}, round + rank, at::kLong);
    const auto end = at::full({}, ends ? 1 : 0, at::kLong);
    lockstep::all_reduce(tensor);
    lockstep::all_reduce(end);
    const int64_t sum = world_size * round + world_size * (world_size - 1) / 2;
    TORCH_CHECK(tensor.eq(sum).all().item<bool>(), "sum ", round, " is not ", sum);
    ended = end.item<int64_t>() == 1;
  }
  std::cout << "all sums were right" << std::endl;
}

/// The processes of all other ranks; a descriptor becomes readable when its process ends.
std::vector<lockstep::UniqueFd> processes_of_others(int rank, int world_size) {
  std::vector<at::Tensor> pids(static_cast<size_t>(world_size));
  for (auto& pid : pids) pid = at::empty({}, at::kLong);
  lockstep::all_gather(pids, at::full({}, static_cast<int64_t>(::getpid()), at::kLong));
  std::vector<lockstep::UniqueFd> others;
  for (int other = 0; other < world_size; ++other) {
    const auto pid = static_cast<pid_t>(pids[static_cast<size_t>(other)].item<int64_t>());
    if (other != rank) others.push_back(lockstep::launch::require_pidfd(pid));
  }
  return others;
}

/// Leaves the group with an error, and lets the process end once all others have ended: as an interpreter,
/// which takes its time.
void fail_last(lockstep::DefaultGroup world, const std::vector<lockstep::UniqueFd>& others) {
  try {
    const auto ended = std::move(world);
    TORCH_CHECK(false, "no such data");
  } catch (...) {
    for (const auto& other : others) {
      pollfd wait{other.get(), POLLIN, 0};
      ::poll(&wait, 1, -1);
    }
    throw;
  }
}

void meet(const Settings& settings) {
  for (const std::string& variable : settings.variables) {
    const size_t equals = variable.find('=');
    ::setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
  }
  lockstep::InitOptions options;
  options.init_method = settings.init_method;
  options.rank = settings.rank;
  options.world_size = settings.world_size;
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(settings.timeout));
  auto world = lockstep::init_process_group(options);
  std::cout << "rank " << world.rank() << " of " << world.size() << " (pid " << ::getpid() << ") has the sum "
            << sum_of_ranks(world.rank()) << std::endl;
  if (settings.fail_last >= 0) {
    const auto others = processes_of_others(world.rank(), world.size());
    if (settings.fail_last == world.rank()) fail_last(std::move(world), others);
  }
  if (settings.until_end) sum_until_end(world.rank(), world.size());
  while (settings.forever) sum_of_ranks(world.rank());
  if (settings.hold) std::cin.ignore(std::numeric_limits<std::streamsize>::max());
}

}  // namespace

LOCKSTEP_DRIVER(meeting_driver) try {
  Settings settings;
  CLI::App app("Sums the ranks of a group");
  app.add_option("--init-method", settings.init_method, "env://, tcp://HOST:PORT or file:///PATH");
  app.add_option("--rank", settings.rank, "as the environment says unless given");
  app.add_option("--world-size", settings.world_size, "as the environment says unless given");
  app.add_option("--timeout", settings.timeout, "seconds, of the meeting and of each operation");
  app.add_option("--set", settings.variables,
                 "NAME=VALUE: an environment variable that the program itself sets")
      ->allow_extra_args(false);
  app.add_option("--save", settings.save, "save a checkpoint into this new folder, and do nothing else");
  app.add_option("--spawn", settings.spawn, "start so many processes by spawn(), which do the rest");
  app.add_flag("--numbered", settings.numbered,
               "spawned processes give their rank and the world's size as options");
  app.add_flag("--hold", settings.hold, "stay in the group until standard input ends");
  app.add_flag("--until-end", settings.until_end, "sum and check until standard input of rank 0 ends");
  app.add_flag("--forever", settings.forever, "sum again and again");
  app.add_option("--fail-last", settings.fail_last,
                 "the rank that fails then, and whose process ends after the others'");
  CLI11_PARSE(app, argc, argv);
  if (!settings.save.empty()) {
    lockstep::save_checkpoint(settings.save, {}, {}, {});
    std::cout << "saved" << std::endl;
    return 0;
  }
  if (settings.spawn == 0) {
    meet(settings);
    return 0;
  }
  lockstep::spawn(
      [&](int rank) {
        if (settings.numbered) {
          settings.rank = rank;
          settings.world_size = settings.spawn;
        }
        meet(settings);
      },
      settings.spawn);
  return 0;
} catch (const c10::Error& error) {
  std::cerr << "meeting_driver: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const lockstep::ProcessException& error) {
  std::cerr << "meeting_driver: " << error.what() << std::endl;
  return 1;
}

}  // namespace meeting_driver
