#pragma once

#include <string>
#include <vector>

#include <CLI/App.hpp>
#include <CLI/Formatter.hpp>

#include <lockstep/launch/agent/remote_hosts.h>

namespace lockstep::cli {

/// Adds `lockstep run` to the program. `status` becomes its exit status when it was chosen.
void add_run(CLI::App& program, int& status);

/// Where `-H` starts a program, and with what. Of both commands that have it.
struct RemoteHostsArguments {
  std::vector<std::string> hosts;  // they add up, as mpirun's
  std::string shell = "ssh -T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=5";
  std::vector<std::string> passed_on;  // variables
};
/// Adds -H, --rsh and -x.
void add_remote_hosts_arguments(CLI::App& command, const std::string& help_of_hosts,
                                RemoteHostsArguments& arguments);

/// What `lockstep run OPTIONS PROGRAM` would do, where the options name hosts (-H). Throws CLI::Error and c10::ValueError as that
/// command does.
launch::RemoteRun parse_remote_run(std::vector<std::string> options, const std::vector<std::string>& program);

/// Of a command that starts a program: its options stand before PROGRAM, and the help says so.
void make_starter(CLI::App& command);

/// PROGRAM and its arguments, once such a command is parsed. Throws CLI::RequiredError where there is none, and
/// CLI::ExtrasError for an option that the command does not have.
std::vector<std::string> program_words(const CLI::App& command);

/// The words of a command line "run …" or "scaling …" as CLI11 takes them: of one dash it knows only single
/// letters, not mpirun's "-np"; a "--" before PROGRAM ends the command for it; and after "--name=" it takes the
/// next word for the value, where the empty one is meant. The words from PROGRAM on are left as they are.
std::vector<std::string> run_words(const CLI::App& program, std::vector<std::string> words);

}  // namespace lockstep::cli
