#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/files/append_file.h>

namespace lockstep::launch {

/// Writes those lines of the workers' output that contain one of some texts to a file of its own, each as torchrun does it:
/// with "[default0]:" in front, the role and the local rank. A carriage return ends a line, too, so each state of a progress
/// bar is one. Not thread-safe.
class FilteredCopy {
 public:
  static constexpr size_t kLongestLine =
      1 << 20;  // bytes; what a line has after them is neither searched nor written

  /// The file is made at once. What the disk refuses is lost, and said once.
  FilteredCopy(const std::string& file, std::vector<std::string> texts, const std::string& role, int nprocs);

  void feed(int local_rank, std::string_view bytes);
  /// Its stream has ended.
  void finish(int local_rank);

 private:
  struct Line {
    std::string text;
    bool returned = false;  // a carriage return has ended the line before; a newline next belongs to that
  };

  /// The line is over: adds it to those that are to be written, if it is wanted.
  void end_line(int local_rank, std::string& chosen);

  AppendFile file_;
  std::vector<std::string> texts_;
  std::string role_;
  std::vector<Line> lines_;  // of each local rank
};

}  // namespace lockstep::launch
