#include "bench.h"

#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/bench/bench.h>
#include <lockstep/collectives/hosts/cost_model.h>

namespace lockstep::cli {
namespace {

constexpr const char* kBenchExamples = R"(
Examples:
  lockstep bench                                        everything, two ranks, 1 KiB to 16 MiB
  lockstep bench all_reduce -b 4K -e 100M -f 4          one collective, from 4 KiB to at most 100 MiB
  lockstep bench all_gather --staged --nproc-per-node 4 four ranks, tensors that the peers don't see
  lockstep bench broadcast -t int64 -r 1 --json results.json
  lockstep run --nproc-per-node 4 --no-prefix lockstep bench pingpong barrier
                                                        in a job that a launcher started

Sizes take K, M, G and T (powers of 1024). Every result is checked: the exit status is 1 when one is wrong.
docs/bench.md explains the columns and how it is measured.)";

/// What needs more than CLI11 to become an option.
struct BenchArguments {
  bench::BenchOptions options;
  std::string begin, end;
  std::string nproc_per_node;
  bool arena = false, staged = false;
  bool in_place = false, out_of_place = false;
  double timeout = 300;
  std::string fit;
  bool forecast = false;
};

bench::BenchOptions options_from(const BenchArguments& arguments) {
  bench::BenchOptions options = arguments.options;
  if (!arguments.begin.empty()) options.min_bytes = bench::parse_size(arguments.begin, "--begin");
  if (!arguments.end.empty()) options.max_bytes = bench::parse_size(arguments.end, "--end");
  if (!arguments.nproc_per_node.empty()) options.nproc_per_node = arguments.nproc_per_node;
  if (arguments.staged) options.memory = bench::MemoryKind::kStaged;
  if (arguments.in_place != arguments.out_of_place) {
    options.in_place = arguments.in_place;
    options.out_of_place = arguments.out_of_place;
  }
  options.timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(arguments.timeout));
  return options;
}

void add_what_to_measure(CLI::App& bench, BenchArguments& arguments) {
  bench::BenchOptions& options = arguments.options;
  bench.add_option("COLLECTIVE", options.collectives,
                   "What to measure: " + bench::known_collectives() + "; all if none is named");
  bench.add_option("-b,--begin,--minbytes", arguments.begin, "Smallest size in bytes [1K]")
      ->type_name("SIZE");
  bench.add_option("-e,--end,--maxbytes", arguments.end, "Largest size in bytes [16M]")->type_name("SIZE");
  bench.add_option("-f,--factor,--stepfactor", options.step_factor, "From one size to the next")
      ->type_name("N")
      ->capture_default_str();
  bench.add_option("-n,--iters", options.iterations, "Timed iterations for each size")
      ->type_name("N")
      ->capture_default_str();
  bench.add_option("-w,--warmup,--warmup_iters", options.warmup, "Iterations before them")
      ->type_name("N")
      ->capture_default_str();
  bench
      .add_option("-t,-d,--dtype,--datatype", options.dtype,
                  "float, double, half, bfloat16, int8, uint8, int16, int32 or int64")
      ->type_name("TYPE")
      ->capture_default_str();
  bench.add_option("-o,--op", options.reduce_op, "sum, prod, min, max, avg, band, bor or bxor")
      ->type_name("OP")
      ->capture_default_str();
  bench.add_option("-r,--root", options.root, "The root of reduce, broadcast, gather and scatter")
      ->type_name("RANK")
      ->capture_default_str();
}

void add_how_to_measure(CLI::App& bench, BenchArguments& arguments) {
  bench
      .add_option("--nproc-per-node,--nproc_per_node", arguments.nproc_per_node,
                  "Ranks to start, a number, auto, cpu or gpu as for lockstep run; not within a job [2]")
      ->type_name("N");
  CLI::Option* arena =
      bench.add_flag("--arena", arguments.arena, "Tensors in memory that all ranks see (the default)");
  bench.add_flag("--staged", arguments.staged, "Tensors from anywhere")->excludes(arena);
  bench.add_flag("--in-place,--in_place", arguments.in_place, "Only in place");
  bench.add_flag("--out-of-place,--out_of_place", arguments.out_of_place, "Only out of place");
  bench
      .add_option("--json", arguments.options.json,
                  "Write the results there too; - is standard output, and the table goes to standard error")
      ->type_name("FILE");
  bench.add_option("--timeout", arguments.timeout, "Until a rank that is late is an error")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
}

void add_cost_model(CLI::App& bench, BenchArguments& arguments) {
  CLI::Option* fit = bench
                         .add_option("--fit", arguments.fit,
                                     "Measure nothing: fit the cost model of several hosts to the "
                                     "measurements in a JSON file, and write "
                                     "it to standard output, for LOCKSTEP_WIRE_MODEL")
                         ->type_name("FILE")
                         ->check(CLI::ExistingFile);
  bench
      .add_flag("--forecast", arguments.forecast,
                "Measure nothing: what the cost model forecasts for an all_reduce over up to 1,000 hosts")
      ->excludes(fit);
}

/// The model of the environment, or without one the default at two speeds.
void print_forecast() {
  if (environment::text("LOCKSTEP_WIRE_MODEL")) {
    std::cout << "Forecast by LOCKSTEP_WIRE_MODEL, not measured:\n\n"
              << hosts::forecast_table(hosts::read_cost_model());
    return;
  }
  for (const int gigabits : {10, 100}) {
    std::cout << (gigabits == 10 ? "" : "\n") << "Forecast for TCP at " << gigabits
              << " Gbit/s, not measured:\n\n"
              << hosts::forecast_table(hosts::CostModel::of_wire(gigabits));
  }
}

int run_bench(const BenchArguments& arguments) {
  if (arguments.forecast) {
    print_forecast();
  } else if (!arguments.fit.empty()) {
    std::cout << hosts::to_json(hosts::fit(hosts::read_measurements(arguments.fit)));
  } else {
    return bench::run(options_from(arguments));
  }
  return 0;
}

}  // namespace

void add_bench(CLI::App& program, int& status) {
  auto arguments = std::make_shared<BenchArguments>();
  CLI::App* bench =
      program.add_subcommand("bench", "Time the collectives between ranks, and check their results");
  bench->footer(kBenchExamples);
  add_what_to_measure(*bench, *arguments);
  add_how_to_measure(*bench, *arguments);
  add_cost_model(*bench, *arguments);
  bench->callback([arguments, &status] { status = run_bench(*arguments); });
}

}  // namespace lockstep::cli
