#pragma once

#include <chrono>
#include <iosfwd>
#include <string>
#include <vector>

namespace lockstep::doctor {

struct DoctorOptions {
  bool json = false;
  bool strict = false;    ///< warnings fail too
  bool machine = true;    ///< look at the machine; otherwise only the self-test is run
  bool self_test = true;  ///< run two ranks
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of the self-test; at least 1 s
  /// See SelfTestOptions::argv. A process that is started with it must come here with machine = false.
  std::vector<std::string> self_test_argv = {};
  /// See probe_cuda(); empty: CUDA is not tried.
  std::vector<std::string> cuda_probe_argv = {};
};

/// Looks at this machine, writes the report to `out` and returns exit_status() of the findings. Throws
/// c10::ValueError for bad options.
int examine(const DoctorOptions& options, std::ostream& out);

}  // namespace lockstep::doctor
