#pragma once

#include <chrono>

#include <lockstep/base/environment.h>
#include <lockstep/collectives/process_group.h>

#include "command_loop.h"

namespace lockstep::benchmarks {

/// The driver's ranks meet at a file beside their pipes, where no port can be taken; over several hosts and by
/// hand the environment says where.
inline InitOptions init_options() {
  InitOptions options;
  options.timeout = std::chrono::minutes(2);
  if (const auto backend = environment::text("LOCKSTEP_BENCH_BACKEND")) options.backend = *backend;
  if (const auto channel = environment::text(kChannel); channel && !environment::text("MASTER_ADDR")) {
    options.init_method = "file://" + *channel + "/rendezvous";
    options.rank = static_cast<int>(environment::integer("RANK", 0).value_or(-1));
    options.world_size = static_cast<int>(environment::integer("WORLD_SIZE", 1).value_or(-1));
  }
  return options;
}

}  // namespace lockstep::benchmarks
