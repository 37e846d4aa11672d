#include "scaling.h"

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/bench/scaling.h>
#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/remote_hosts.h>

#include "run.h"

namespace lockstep::cli {
namespace {

constexpr const char* kScalingExamples = R"(
Examples:
  lockstep scaling ./train --epochs 1                   1, 2, 4, … ranks, up to one for each core (or GPU)
  lockstep scaling --ranks 1,2,3 --repeats 3 -- ./train three runs each, the median counts
  lockstep scaling --work per-rank ./train --steps 100  a program in which each rank does as much, however many
  lockstep scaling --plot scaling.svg --json scaling.json ./train
  lockstep scaling -H node-a:4,node-b:4 ./train         1, 2, 4, 8 ranks; the hosts are filled in their order

Throughput is what the program says: the last line "LOCKSTEP_SCALING VALUE [UNIT]" of rank 0, for all ranks
together, or else samples/s of the Trainer's progress bar; or else the time of the whole run tells it. The
program's output goes to standard error. docs/bench.md explains the columns.)";

struct ScalingArguments {
  bench::ScalingOptions options;
  std::string ranks;
  std::string nproc_per_node = "auto";
  bool no_barrier = false;
  double grace_period = 30;
  RemoteHostsArguments remote;
};

/// As lockstep run -H does it.
int run_over_hosts(const ScalingArguments& arguments, const launch::RunOptions& job) {
  std::vector<std::string> options = {
      "--host=" + c10::Join(",", arguments.remote.hosts), "--nproc-per-node=" + std::to_string(job.nprocs),
      "--grace-period=" + std::to_string(arguments.grace_period), "--rsh=" + arguments.remote.shell};
  for (const std::string& variable : arguments.remote.passed_on) options.push_back("--export=" + variable);
  if (!job.prefix) options.push_back("--no-prefix");
  launch::RemoteRun run = parse_remote_run(std::move(options), job.command);
  run.output = job.output;
  run.observe_output = job.observe_output;
  return launch::run_on_remote_hosts(run);
}

/// One for each slot of the hosts, or what the user has said.
int most_ranks(const ScalingArguments& arguments, const std::string& hosts) {
  if (hosts.empty() || arguments.nproc_per_node != "auto")
    return launch::parse_nprocs(arguments.nproc_per_node);
  int slots = 0;
  for (const launch::RemoteHost& host : launch::parse_remote_hosts(hosts, 0)) slots += host.processes;
  return slots;
}

bench::ScalingOptions scaling_options_from(const ScalingArguments& arguments) {
  bench::ScalingOptions options = arguments.options;
  options.hosts = c10::Join(",", arguments.remote.hosts);
  options.ranks = arguments.ranks.empty() ? bench::powers_of_two(most_ranks(arguments, options.hosts))
                                          : bench::parse_rank_list(arguments.ranks);
  if (!options.hosts.empty()) {
    options.run_job = [&arguments](const launch::RunOptions& job) { return run_over_hosts(arguments, job); };
  }
  if (!arguments.no_barrier) options.lockstep = std::filesystem::read_symlink("/proc/self/exe");
  options.grace_period = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(arguments.grace_period));
  return options;
}

}  // namespace

void add_scaling(CLI::App& program, int& status, const std::function<void()>& before_program) {
  auto arguments = std::make_shared<ScalingArguments>();
  CLI::App* scaling =
      program.add_subcommand("scaling", "Run a program with 1, 2, 4, … ranks and tell what more ranks bring");
  make_starter(*scaling);
  scaling->footer(kScalingExamples);
  CLI::Option* most =
      scaling
          ->add_option("--nproc-per-node,--nproc_per_node,-n", arguments->nproc_per_node,
                       "The most ranks: a number, auto, cpu or gpu, as for lockstep run; with "
                       "-H auto is one for each slot")
          ->type_name("N")
          ->capture_default_str();
  scaling->add_option("--ranks", arguments->ranks, "The numbers of ranks, 1,2,4 say")
      ->type_name("LIST")
      ->excludes(most);
  scaling->add_option("--repeats", arguments->options.repeats, "Runs with each number of ranks")
      ->type_name("N")
      ->capture_default_str();
  const std::map<std::string, bench::Scaling> scalings = {{"fixed", bench::Scaling::kStrong},
                                                          {"per-rank", bench::Scaling::kWeak}};
  scaling
      ->add_option("--work", arguments->options.scaling,
                   "Where time tells the throughput: fixed (more ranks share the same work) or per-rank "
                   "(each does as much) [fixed]")
      ->type_name("KIND")
      ->transform(CLI::CheckedTransformer(scalings).description(""));
  scaling->add_flag("--no-barrier,--no_barrier", arguments->no_barrier,
                    "Do not measure the barrier's latency");
  scaling
      ->add_option("--json", arguments->options.json,
                   "Write the results there too; - is standard output, and the table goes to standard error")
      ->type_name("FILE");
  scaling->add_option("--plot", arguments->options.plot, "Draw the speedup there, as SVG")->type_name("FILE");
  scaling
      ->add_option("--grace-period,--grace_period", arguments->grace_period,
                   "Seconds from a run's first failure or signal until what still runs is killed")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  add_remote_hosts_arguments(*scaling, "Hosts to run on, each with its slots; ranks fill them in their order",
                             arguments->remote);
  scaling->callback([scaling, arguments, before_program, &status] {
    arguments->options.command = program_words(*scaling);
    const bool for_hosts =
        scaling->get_option("--rsh")->count() + scaling->get_option("--export")->count() > 0;
    TORCH_CHECK_VALUE(!for_hosts || !arguments->remote.hosts.empty(), "--rsh and -x are for -H");
    arguments->options.before_program = before_program;
    status = bench::scale(scaling_options_from(*arguments));
  });
}

}  // namespace lockstep::cli
