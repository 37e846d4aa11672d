#pragma once

#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/files/append_file.h>
#include <lockstep/observe/metrics_writer.h>
#include <lockstep/observe/writing_rank.h>

namespace lockstep {

struct CsvWriterOptions {
  /// Metrics that will come, in the order of their columns. Others get columns after them when they first
  /// come.
  std::vector<std::string> columns = {};
  /// Whether this process writes; rank 0 alone unless told.
  std::optional<bool> writes = std::nullopt;
};

/// Metrics as a table (RFC 4180), one row for each call of log_metrics():
///
///     step,wall_time,train/loss,validation/accuracy
///     100,1763787342.125,0.3125,
///     200,1763787343.5,0.25,0.875
///
/// `wall_time` is in seconds since 1970. What a call does not hold is empty; NaN and infinities are nan, inf
/// and -inf, and numbers have all digits that they need to be read back the same.
///
/// A metric that first comes later gets a column at the end: the file is then written anew, with the longer
/// header, and takes the old one's place at once. That costs as much as copying the file, once for each new
/// set of names; name them in `columns` to spare it.
///
/// An existing file is continued, with its columns; give each run a file of its own. Each row is one write(2)
/// in the caller: a crash of the process loses none and leaves no half of one, and flush() makes them safe
/// from a crash of the machine. Hyperparameters and artifacts have no place in it. Thread-safe.
class CsvWriter : public MetricsWriter {
 public:
  /// The file is made at the first row, by the rank that writes.
  explicit CsvWriter(std::filesystem::path file, CsvWriterOptions options = {});

  /// Throws c10::ValueError for a metric called "step" or "wall_time", for a name with a line break, and when
  /// the file holds something else than such a table.
  void log_metrics(const Metrics& metrics, int64_t step) override;
  /// Drops the rows of `next_step` and later.
  void resume(int64_t next_step) override;
  void flush() override;
  void finalize(std::string_view status) override;

  /// How many rows the disk has refused.
  int64_t lost() const;

 private:
  bool prepare();
  void add_columns(const Metrics& metrics);
  std::string header() const;

  mutable std::mutex mutex_;
  WritingRank rank_;
  AppendFile file_;
  bool prepared_ = false;
  int64_t lost_ = 0;  // rows; file_ counts headers, too
  std::vector<std::string> columns_;
};

}  // namespace lockstep
