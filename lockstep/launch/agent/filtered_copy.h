#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/append_file.h>
#include <lockstep/launch/agent/line_forwarder.h>

namespace lockstep::launch {

/// Writes those lines of the workers' output that contain one of some texts to a file of its own, each as torchrun does it:
/// with "[default0]:" in front, the role and the local rank. Not thread-safe.
class FilteredCopy {
 public:
  /// The file is made at once. What the disk refuses is lost, and said once.
  FilteredCopy(const std::string& file, std::vector<std::string> texts, const std::string& role, int nprocs);

  void feed(int local_rank, std::string_view bytes);
  /// Its stream has ended.
  void finish(int local_rank);

 private:
  void write(int local_rank, std::string_view lines);

  AppendFile file_;
  std::vector<std::string> texts_;
  std::string role_;
  std::vector<LineForwarder> ranks_;
};

}  // namespace lockstep::launch
