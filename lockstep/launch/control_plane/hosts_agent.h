#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/control_plane/host_reporter.h>
#include <lockstep/launch/membership/membership.h>

/// `lockstep run` over several hosts.
namespace lockstep::launch {

struct HostsOptions {
  RunOptions run = {};
  MembershipOptions membership = {};
  int node_rank = -1;  // -1: any
  std::string endpoint_host = {};
  uint16_t endpoint_port = 0;
  std::optional<bool> coordinates =
      {};                          // this host's agent; nothing: if the endpoint is an address of its own
  std::string job_id = "none";     // TORCHELASTIC_RUN_ID
  std::string local_address = {};  // for its workers' messages; empty: as it reaches the coordinator
  bool tunnel = true;              // see ControlPlane::Options
  std::string secret = {};         // empty: none, after a warning
  /// How this host's ranks do, for those that watch the job. Called on a thread of its own, and may take long; empty:
  /// nothing is told.
  std::function<std::string(const KnownGeneration&)> report = {};
};

/// The secret in this file, or else in LOCKSTEP_JOB_SECRET; empty where there is neither. White space at the ends does
/// not count. Throws c10::ValueError for one that is too short to be safe, and for a file that can't be read.
std::string read_secret(const std::string& file);

/// A fresh secret: 64 hexadecimal digits.
std::string make_secret();

/// Runs the agent of this host until the job ends: the workers of each generation that this host belongs to. Returns
/// the exit status of `lockstep run`: that of run(); 1, too, when the coordinator was lost. Throws as run(). To be
/// called by the main thread of a program that does nothing else.
int run_on_hosts(HostsOptions options);

}  // namespace lockstep::launch
