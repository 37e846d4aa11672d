// Goes wrong in the way that its argument says, for the tests of the flight recorder. Standard input holds a
// rank where it is until the test ends it.
//
//     flight_driver --timeout SECONDS leave-out | other-operation | wait | abort
#include <chrono>
#include <iostream>
#include <limits>
#include <string>

#include <ATen/ops/ones.h>
#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/testing/driver.h>

namespace flight_driver {
namespace {

void wait_for_the_end_of_input() {
  std::cin.ignore(std::numeric_limits<std::streamsize>::max());
}

/// Tells the test that rank `rank` is there.
void say(int rank, const std::string& what) {
  std::cout << "rank " << rank << ' ' << what << std::endl;
}

/// Rank 1 does not come to the second all_reduce.
void leave_out(int rank) {
  const auto tensor = at::ones({2, 3});
  lockstep::all_reduce(tensor);
  if (rank == 1) {
    say(rank, "leaves out");
    return wait_for_the_end_of_input();
  }
  say(rank, "waits");
  lockstep::all_reduce(tensor);
}

/// Rank 1 calls a barrier where the others reduce.
void other_operation(int rank) {
  const auto tensor = at::ones({4});
  lockstep::all_reduce(tensor);
  if (rank == 1) {
    lockstep::barrier();
  } else {
    lockstep::all_reduce(tensor);
  }
}

/// Rank 0 waits in an all_reduce until the test lets rank 1 come.
void wait(int rank) {
  if (rank == 1) wait_for_the_end_of_input();
  say(rank, "begins");
  const auto tensor = at::ones({4});
  lockstep::all_reduce(tensor);
  say(rank, "has the sum " + std::to_string(tensor[0].item<int>()));
}

/// Rank 1 aborts the group while the others wait in a broadcast.
void abort(int rank) {
  const auto tensor = at::ones({4});
  lockstep::all_reduce(tensor);
  if (rank != 1) {
    say(rank, "waits");
    lockstep::broadcast(tensor, 0);
    lockstep::broadcast(tensor, 1);
    return;
  }
  wait_for_the_end_of_input();
  lockstep::abort();
}

}  // namespace

LOCKSTEP_DRIVER(flight_driver) try {
  std::string way;
  double timeout = 30;
  CLI::App app("Goes wrong in a chosen way");
  app.add_option("way", way)
      ->required()
      ->check(CLI::IsMember({"leave-out", "other-operation", "wait", "abort"}));
  app.add_option("--timeout", timeout, "seconds, of each operation");
  CLI11_PARSE(app, argc, argv);
  lockstep::InitOptions options;
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(timeout));
  auto world = lockstep::init_process_group(options);
  if (way == "leave-out") leave_out(world.rank());
  if (way == "other-operation") other_operation(world.rank());
  if (way == "wait") wait(world.rank());
  if (way == "abort") abort(world.rank());
  return 0;
} catch (const c10::Error& error) {
  std::cerr << "flight_driver: " << error.what_without_backtrace() << std::endl;
  return 1;
}

}  // namespace flight_driver
