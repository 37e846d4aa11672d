#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <lockstep/doctor/finding.h>

namespace lockstep::doctor {

struct SelfTestOptions {
  /// Arguments with which this program, started again, comes to run_self_test() (see SpawnOptions::argv).
  std::vector<std::string> argv = {};
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< then both ranks are killed
};

/// Starts two ranks as processes of their own and lets them run all_reduce, broadcast, send and recv of known
/// values, small and large, staged and in shared memory. In the ranks themselves it does not return. A SIGINT
/// or SIGTERM that comes meanwhile is raised again when they have ended. Call from one thread.
Finding run_self_test(const SelfTestOptions& options);

}  // namespace lockstep::doctor
