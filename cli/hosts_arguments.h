#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/App.hpp>

#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/remote_hosts.h>

namespace lockstep::cli {

/// torchrun's name of a run that has none.
inline constexpr const char* kNoRunId = "none";

/// What `lockstep run` is told about hosts, by torchrun's options.
struct HostsArguments {
  std::string nnodes = "1";
  int node_rank = -1;
  std::string rdzv_backend = "static";
  std::string rdzv_endpoint;
  std::string rdzv_id = kNoRunId;
  std::string rdzv_conf;
  std::string master_addr = "127.0.0.1";
  uint16_t master_port = 0;
  std::string local_addr;
  bool standalone = false;
  int max_restarts = 0;
  std::string secret_file;
  bool no_tunnel = false;
  bool started_by_shell = false;  // by lockstep run -H
};

/// The number that is, or is a part of, this option's value. Throws c10::ValueError unless it is from `low` to `high`.
int checked_number(const std::string& option, const std::string& text, int low, int high);

void add_hosts_arguments(CLI::App& command, HostsArguments& arguments);

/// Takes from the scheduler's variables what the user has not said, where that is certain (read_host_roles), and prints it.
void take_host_roles(const CLI::App& command, HostsArguments& arguments);

/// Names the keys of --rdzv-conf that change nothing, on standard error; of a job of -H once. Throws c10::ValueError where
/// --rdzv-conf is no KEY=VALUE,….
void tell_of_unused_conf(const HostsArguments& arguments);

/// One host and no restarts: what needs no agent.
bool is_one_host(const HostsArguments& arguments);

/// Runs this host's agent. Throws c10::ValueError for arguments that make no sense together, and where this program was
/// built without OpenSSL.
int run_on_hosts(const HostsArguments& arguments, const launch::RunOptions& options);

/// For `lockstep run -H`: the options by which the agents of several hosts meet, the first of which is `first`. Throws as
/// run_on_hosts().
std::vector<std::string> meeting_options(const CLI::App& command, const HostsArguments& arguments,
                                         const launch::RemoteHost& first);
/// What they know each other by: the user's secret, or a fresh one.
std::string secret_for_agents(const HostsArguments& arguments);

/// Prints what would run with these, on this host, for --dry-run. Throws as run_on_hosts().
void print_dry_run(const HostsArguments& arguments, const launch::RunOptions& options);

/// Adds `lockstep secret`.
void add_secret(CLI::App& program);

}  // namespace lockstep::cli
