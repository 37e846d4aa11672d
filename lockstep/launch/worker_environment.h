#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::launch {

/// The environment that a worker is started with: a copy of this process's, then changed. Not thread-safe.
class WorkerEnvironment {
 public:
  /// A copy of this process's environment, without what an outer launcher put there for this process alone
  /// (its exit status table, the secret of its agents, the mark of a spawned process).
  static WorkerEnvironment inherited();

  void set(const std::string& name, const std::string& value) { variables_[name] = value; }
  void unset(const std::string& name) { variables_.erase(name); }
  bool has(const std::string& name) const { return variables_.count(name) != 0; }
  std::optional<std::string> get(const std::string& name) const {
    const auto found = variables_.find(name);
    return found == variables_.end() ? std::nullopt : std::optional(found->second);
  }
  const std::map<std::string, std::string>& variables() const { return variables_; }
  /// "NAME=value" for execve(2).
  std::vector<std::string> strings() const;

 private:
  std::map<std::string, std::string> variables_;
};

/// What a worker must know, under torchrun's names
/// (torch/distributed/elastic/agent/server/local_elastic_agent.py): RANK, LOCAL_RANK, WORLD_SIZE,
/// MASTER_ADDR, MASTER_PORT, TORCHELASTIC_… and the rest; and LOCKSTEP_AGENT_STORE, where the launcher's
/// store is even when the program sets an address of its own (see read_launch_environment).
struct RankVariables {
  int local_rank = 0;
  int nprocs = 1;                        // workers on this host
  int first_rank = 0;                    // of this host's workers
  int world_size = 1;                    // workers on all hosts
  int first_role_rank = 0;               // of this host's workers, among those of all hosts with its role
  int role_world_size = 1;               // how many these are
  int group_rank = 0;                    // of this host
  int group_size = 1;                    // hosts
  std::string store_host = "127.0.0.1";  // where the launcher's own store is, or the tunnel to it
  uint16_t store_port = 0;
  std::string run_id = {};
  std::string role = "default";
  int restart_count = 0;
  int max_restarts = 0;

  void apply(WorkerEnvironment& environment) const;
};

/// A fresh name for one run: 16 hexadecimal digits.
std::string make_run_id();

/// Where the program `name` is: looked for along PATH as execvp(3) does when it holds no slash. Throws
/// c10::ValueError that says why (missing, a directory, not executable) and what to do.
std::string find_program(const std::string& name);

}  // namespace lockstep::launch
