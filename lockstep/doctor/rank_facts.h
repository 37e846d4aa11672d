#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::doctor {

/// What a rank tells the others about itself. A plain value.
struct RankFacts {
  int rank = 0;
  int64_t pid = 0;
  std::string hostname;
  std::string host;  ///< HostIdentity::key(): the same text on one host
  int64_t user = 0;
  int local_rank = -1;               ///< -1: no launcher said it
  std::vector<int> cores;            ///< by the affinity mask
  std::optional<double> core_quota;  ///< of the control group
  std::vector<int> host_cores;       ///< online
  int gpus = 0;                      ///< device files on the host
  std::string cpu;                   ///< its model
  std::string executable;            ///< path
  std::string executable_fingerprint;
  std::string lockstep_version;
  std::string lockstep_fingerprint;
  std::string torch_version;  ///< with CUDA version and commit
  std::string torch_fingerprint;
  std::string program;              ///< path that was asked for; empty: none
  std::string program_fingerprint;  ///< empty: it can't be read
  std::map<std::string, std::string> environment;
  std::string kernel;                 ///< release
  std::string interface;              ///< for messages to other hosts; empty: none
  std::string address;                ///< its
  int mtu = 0;                        ///< its; 0: unknown
  std::optional<int> ports;           ///< how many LOCKSTEP_PORT_RANGE has; nothing: any
  int64_t memory = 0;                 ///< bytes that are available
  std::optional<int64_t> open_files;  ///< ulimit -n; nothing: unlimited, or unknown
};

/// This process's. `program`: a further file to compare, or empty. `meeting_host`: World::meeting_host.
RankFacts gather_rank_facts(int rank, const std::string& program, const std::string& meeting_host = "");

/// As JSON, for the others.
std::string to_json(const RankFacts& facts);
/// Nothing when the text is not from to_json(). Fields that are missing (another version of Lockstep wrote
/// it) keep their defaults.
std::optional<RankFacts> parse_rank_facts(const std::string& json);

}  // namespace lockstep::doctor
