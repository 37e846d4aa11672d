#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// A file that grows record by record, each in one write(2), so that a process that ends at any moment leaves
/// whole records. What the disk refuses is lost, warned about once and counted; nothing throws for it. Made
/// for logs. Not thread-safe; one writer per file.
class AppendFile {
 public:
  enum class Kind { kLines, kBinary };

  /// `owner` begins the warning. The file is opened, and its folder made, at the first append().
  AppendFile(std::string owner, std::filesystem::path path, Kind kind);

  /// A line, as first_line() finds it.
  struct Line {
    std::string text;    ///< without its end
    bool ended = false;  ///< whether it has one
  };

  /// Opens the file, which append() also does. Changes nothing in it. False when that fails.
  bool open();
  /// The first line of the file; nothing when there is none, or it is no regular file (a pipe, a terminal),
  /// which is never read.
  std::optional<Line> first_line();
  /// Call before the first append() to a file of lines, when it is certain that the file is the owner's: cuts
  /// off a last line without end, which a machine that crashed has left. False when that fails. Opens the
  /// file.
  bool take_over();
  /// Appends the whole record, or nothing of it: then it is counted as lost, and false comes back. The next
  /// one is tried again, for disks are emptied.
  bool append(std::string_view record);
  /// Forces to the disk what was appended. False when that fails, or nothing is open.
  bool sync();
  /// Replaces each line by what `change` makes of it (without its end), or drops it; in a new file that takes
  /// the old one's place at once. False, and all as it was, when that fails. Takes the file over. What is no
  /// regular file stays as it is: its reader has the lines already.
  bool rewrite_lines(const std::function<std::optional<std::string>(std::string_view line)>& change);

  /// The owner has given the file this name.
  void set_path(std::filesystem::path path) { path_ = std::move(path); }

  int64_t lost() const { return lost_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  bool fail(const char* what);
  bool cut_partial_line();

  std::string owner_;
  std::filesystem::path path_;
  Kind kind_;
  UniqueFd fd_;
  bool is_regular_ = false;  // once open
  bool taken_over_ = false;
  int64_t lost_ = 0;
  bool warned_ = false;
};

}  // namespace lockstep
