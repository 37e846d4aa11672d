#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// `lockstep run -H`: agents on several hosts, started by ssh or another remote shell.
namespace lockstep::launch {

struct RemoteHost {
  std::string name;  // as the remote shell takes it: HOST or USER@HOST
  int processes = 1;

  /// Without USER@.
  std::string address() const { return name.substr(name.find('@') + 1); }
  /// This one, which needs no remote shell.
  bool is_here() const;

  bool operator==(const RemoteHost&) const = default;
};

/// From "HOST[:SLOTS],…", with one slot where none are given. `processes`: how many there shall be on all hosts, which are
/// filled in their order; 0: one for each slot. Throws c10::ValueError.
std::vector<RemoteHost> parse_remote_hosts(const std::string& text, int processes);

struct RemoteRun {
  struct Agent {
    RemoteHost host;
    std::vector<std::string> words;  // its command line
  };
  std::vector<Agent> agents;
  std::vector<std::string> shell;  // the remote shell, and its options
  std::string secret;
  std::vector<std::string> variables;  // "NAME=value", for the agents and what they start
  std::chrono::nanoseconds grace_period = std::chrono::seconds(30);
  // Descriptors for what the agents write to their standard output and error.
  std::array<int, 2> output = {1, 2};
  // As RunOptions::observe_output, of agents in place of ranks: what the ranks write is in it with their marks.
  std::function<void(int, int, std::string_view)> observe_output = {};
};

/// What starts the agent: its own words on this host, otherwise the remote shell's, which change to this process's folder there.
std::vector<std::string> start_words(const RemoteRun& run, const RemoteRun::Agent& agent);

/// Starts the agents, passes on what they write, and sees them to their end. They get the secret and the variables by standard
/// input, which no other user of a host sees. Signals to this process reach them there, too, and its end: when it is
/// killed, or a shell's connection is lost, so that an agent's input ends or is silent for a minute, that agent ends its job.
///
/// Ends all agents when one could not be started, or its shell was lost, and says why, with that shell's last lines. Returns
/// the exit status of `lockstep run`: that of the agent that was the first to fail; 1 for a lost shell, 128 + N when signal N
/// ended the run. To be called by the main thread of a program that does nothing else.
int run_on_remote_hosts(const RemoteRun& run);

/// In an agent that run_on_remote_hosts() has started: puts secret and variables into the environment, gives what it starts
/// /dev/null as standard input, and does from now on what comes there. Where nothing comes any more, and its workers have not
/// ended in the grace period and some seconds, it ends all the same. Before there are other threads. Throws c10::ValueError
/// where standard input says something else.
void obey_remote_launcher();

}  // namespace lockstep::launch
