#include "run.h"

#include <chrono>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/launch/agent.h>

namespace lockstep::cli {
namespace {

constexpr const char* kRunExamples = R"(
Examples:
  lockstep run --nproc-per-node 2 ./train --epochs 5    two processes on this machine
  lockstep run --nproc-per-node auto ./train            one for each GPU, or else for each core
  lockstep run --nproc-per-node 2 python train.py       any program that reads torchrun's environment

Options for lockstep run stand before PROGRAM; everything behind it belongs to the program.
Each process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and the rest of torchrun's
variables. When one fails, the others are ended and the exit status is 1; with Ctrl-C it is 130.
A second Ctrl-C kills.)";

class RunFormatter : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: lockstep run [OPTIONS] PROGRAM [ARGS...]\n";
  }
};

struct RunArguments {
  std::string nproc_per_node = "1";
  uint16_t master_port = 0;
  bool no_prefix = false;
  double grace_period = 30;
};

launch::RunOptions options_from(const RunArguments& arguments, const std::vector<std::string>& command) {
  launch::RunOptions options;
  options.nprocs = launch::parse_nprocs(arguments.nproc_per_node);
  options.command = command;
  options.master_port = arguments.master_port;
  options.prefix = !arguments.no_prefix;
  options.grace_period = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(arguments.grace_period));
  return options;
}

}  // namespace

void add_run(CLI::App& program, int& status) {
  auto arguments = std::make_shared<RunArguments>();
  CLI::App* run =
      program.add_subcommand("run", "Start a program in several processes and see them to their end");
  run->formatter(std::make_shared<RunFormatter>());
  run->footer(kRunExamples);
  run->prefix_command();  // parsing stops at PROGRAM
  run->add_option("--nproc-per-node,--nproc_per_node", arguments->nproc_per_node,
                  "Processes to start: a number, auto, cpu or gpu")
      ->envname("PET_NPROC_PER_NODE")
      ->type_name("N")
      ->capture_default_str();
  run->add_option("--master-port,--master_port", arguments->master_port,
                  "Port on 127.0.0.1 where the processes meet; 0 takes a free one")
      ->envname("PET_MASTER_PORT")
      ->type_name("PORT")
      ->capture_default_str();
  run->add_option("--grace-period,--grace_period,--shutdown-timeout,--shutdown_timeout",
                  arguments->grace_period,
                  "Seconds from the first failure or signal until what still runs is killed")
      ->envname("PET_SHUTDOWN_TIMEOUT")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  run->add_flag("--no-prefix,--no_prefix", arguments->no_prefix, "Do not mark output lines with their rank");
  run->callback([run, arguments, &status] {
    const std::vector<std::string> command = run->remaining();
    if (command.empty()) throw CLI::RequiredError("PROGRAM");
    if (command.front().size() > 1 && command.front().starts_with('-')) {
      throw CLI::ExtrasError(std::vector<std::string>{command.front()});
    }
    status = launch::run(options_from(*arguments, command));
  });
}

}  // namespace lockstep::cli
