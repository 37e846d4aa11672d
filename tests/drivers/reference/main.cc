// Runs the examples of docs/reference; each checks its result.
//
//     lockstep run --nproc-per-node 4 ./reference_examples
#include <iostream>

#include <lockstep/lockstep.h>

#include "examples.h"

int main() try {
  reference::starting();
  auto world = lockstep::init_process_group();
  TORCH_CHECK_VALUE(world.size() == 4, "the examples are for 4 ranks, not ", world.size());
  reference::reductions(world.rank());
  reference::moving_data(world.rank());
  reference::point_to_point(world.rank());
  reference::waiting(world.rank());
  reference::objects(world.rank());
  reference::groups(world.rank());
  std::cout << "rank " << world.rank() << " has run all examples" << std::endl;
} catch (const c10::Error& error) {
  std::cerr << "reference_examples: " << error.what_without_backtrace() << std::endl;
  return 1;
}
