#include "run.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/launch/agent.h>

#include "hosts_arguments.h"

namespace lockstep::cli {
namespace {

constexpr const char* kRunExamples = R"(
Examples:
  lockstep run --nproc-per-node 2 ./train --epochs 5    two processes on this machine
  lockstep run --nproc-per-node auto ./train            one for each GPU, or else for each core
  lockstep run --nproc-per-node 2 python train.py       any program that reads torchrun's environment
  lockstep run -n 2 -- ./train                          the same option as mpirun has it
  lockstep run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node-a:29400 --secret-file key -n 2 ./train
                                                        on two hosts, the same line on each

Options for lockstep run stand before PROGRAM; everything behind it belongs to the program.
Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of torchrun's
variables. When one fails, the others are ended and the exit status is 1; with Ctrl-C it is 130.
A second Ctrl-C kills. docs/troubleshooting.md says what messages mean, and what to do.)";

class StarterFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* command, std::string) const override {
    return "Usage: lockstep " + command->get_name() + " [OPTIONS] PROGRAM [ARGS...]\n";
  }
};

struct RunArguments {
  std::string nproc_per_node = "1";
  HostsArguments hosts;
  bool no_prefix = false;
  double grace_period = 30;
};

launch::RunOptions options_from(const RunArguments& arguments, const std::vector<std::string>& command) {
  launch::RunOptions options;
  options.nprocs = launch::parse_nprocs(arguments.nproc_per_node);
  options.command = command;
  options.master_port = arguments.hosts.master_port;
  options.prefix = !arguments.no_prefix;
  options.grace_period = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(arguments.grace_period));
  return options;
}

}  // namespace

void make_starter(CLI::App& command) {
  command.formatter(std::make_shared<StarterFormatter>());
  command.prefix_command();  // parsing stops at PROGRAM
}

std::vector<std::string> program_words(const CLI::App& command) {
  std::vector<std::string> words = command.remaining();
  if (words.empty()) throw CLI::RequiredError("PROGRAM");
  if (words.front().size() > 1 && words.front().starts_with('-')) {
    throw CLI::ExtrasError(std::vector<std::string>{words.front()});
  }
  return words;
}

void add_run(CLI::App& program, int& status) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* run =
      program.add_subcommand("run", "Start a program in several processes and see them to their end");
  make_starter(*run);
  run->footer(kRunExamples);
  run->add_option("--nproc-per-node,--nproc_per_node,-n,--np", arguments->nproc_per_node,
                  "Processes to start: a number, auto, cpu or gpu")
      ->envname("PET_NPROC_PER_NODE")
      ->type_name("N")
      ->capture_default_str();
  run->add_option("--grace-period,--grace_period,--shutdown-timeout,--shutdown_timeout",
                  arguments->grace_period,
                  "Seconds from the first failure or signal until what still runs is killed")
      ->envname("PET_SHUTDOWN_TIMEOUT")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  run->add_flag("--no-prefix,--no_prefix", arguments->no_prefix, "Do not mark output lines with their rank");
  add_hosts_arguments(*run, arguments->hosts);
  run->callback([run, arguments, &status] {
    const launch::RunOptions options = options_from(*arguments, program_words(*run));
    status = is_one_host(arguments->hosts) ? launch::run(options) : run_on_hosts(arguments->hosts, options);
  });
}

std::vector<std::string> run_words(const CLI::App& program, std::vector<std::string> words) {
  const CLI::App* command = program.get_subcommand(words.front());
  for (size_t i = 1; i < words.size() && words[i].starts_with('-'); ++i) {
    if (words[i] == "--") {
      words.erase(words.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    if (words[i] == "-np") words[i] = "--np";
    const CLI::Option* option = command->get_option_no_throw(words[i]);
    if (option != nullptr && option->get_items_expected_max() > 0) ++i;  // past its value
  }
  return words;
}

}  // namespace lockstep::cli
