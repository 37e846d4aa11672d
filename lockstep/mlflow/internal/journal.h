#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/files/append_file.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::mlflow::internal {

/// What was logged to a run and may not have reached its server: a file of lines, each a JSON object.
///
///     {"sent":                 451,"create_tried":1,"run_id":"8f0c…        "}   how far sending has come
///     {"run":{"experiment":"mnist",…}}                                          what run this is
///     {"metrics":[["loss",0.25,1763787342125,100]]}                             what was logged
///
/// The first line is written over again and again, so it always has the same length. Callers append, one
/// thread sends; both may do so at once. A process that ends at any moment leaves a file from which the next
/// one goes on: at worst it sends again what the server has already, unknown to the sender. One process owns
/// the file, by flock(2).
class Journal {
 public:
  struct Line {
    std::string text;
    int64_t end;  ///< where the next one begins
  };

  /// Opens `path`, or makes it with `run` as its second line. Throws c10::Error when that fails, another
  /// process has it, or it is no such file.
  Journal(std::filesystem::path path, const std::string& run);

  /// One line, without its end. False when the disk refuses it: it is warned about once, and lost.
  bool append(std::string_view line);
  /// Lines from `begin` on, up to `bytes` of them, but one at least when there is one.
  std::vector<Line> read(int64_t begin, size_t bytes) const;
  /// The second line, as it is in the file.
  const std::string& run() const { return run_; }

  /// Where the first line that was not sent begins.
  int64_t sent() const;
  bool all_sent() const;
  /// Where the next line will begin.
  int64_t size() const;
  /// Everything before `end` has reached the server. When that is everything, a large file becomes small
  /// again.
  void set_sent(int64_t end);
  std::string run_id() const;
  void set_run_id(const std::string& run_id);
  /// Whether a run was asked for, so that there may be one, though no answer came.
  bool create_tried() const;
  void set_create_tried();

  /// Gives the file another name, unless that is taken.
  void rename(const std::filesystem::path& path);
  /// Removes the file; for when all is sent, and no thread appends any more.
  void remove();
  std::filesystem::path path() const;
  int64_t lost() const;

 private:
  std::string mark() const;
  void write_mark();

  mutable std::mutex mutex_;
  std::filesystem::path path_;
  AppendFile file_;
  UniqueFd fd_;  // for reading, for the first line, and for the lock; AppendFile can only append
  std::string run_;
  int64_t size_ = 0;
  int64_t sent_ = 0;
  bool create_tried_ = false;
  std::string run_id_;
};

}  // namespace lockstep::mlflow::internal
