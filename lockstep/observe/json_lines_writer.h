#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>

#include <lockstep/base/files/append_file.h>
#include <lockstep/observe/metrics_writer.h>
#include <lockstep/observe/writing_rank.h>

namespace lockstep {

struct JsonLinesWriterOptions {
  /// Whether this process writes; rank 0 alone unless told.
  std::optional<bool> writes = std::nullopt;
};

/// Everything that is logged as one JSON object a line (jsonlines.org):
///
///     {"hyperparameters":{"lr":0.1,"optimizer":"AdamW"},"wall_time":1763787342.0}
///     {"metrics":{"train/loss":0.3125},"step":100,"wall_time":1763787342.125}
///     {"artifact":"best/model.safetensors","wall_time":1763787343.5}
///     {"status":"finished","wall_time":1763787343.75}
///
/// `wall_time` is in seconds since 1970. JSON has no NaN and no infinities: they are the strings "NaN",
/// "Infinity" and "-Infinity", as in protobuf's JSON; Python's float() takes them.
///
/// An existing file is continued if its first line is such an object; give each run a file of its own. Each
/// line is one write(2) in the caller: a crash of the process loses none and leaves no half of one, and
/// flush() makes them safe from a crash of the machine. Thread-safe.
class JsonLinesWriter : public MetricsWriter {
 public:
  /// The file is made at the first line, by the rank that writes.
  explicit JsonLinesWriter(std::filesystem::path file, JsonLinesWriterOptions options = {});

  // All of these throw c10::ValueError when the file holds something else, and leave it as it is.

  void log_metrics(const Metrics& metrics, int64_t step) override;
  void log_hyperparameters(const Hyperparameters& hyperparameters) override;
  /// Notes the path; the file stays where it is.
  void log_artifact(const std::filesystem::path& file) override;
  /// Drops the lines of `next_step` and later.
  void resume(int64_t next_step) override;
  void flush() override;
  void finalize(std::string_view status) override;

  /// How many lines the disk has refused.
  int64_t lost() const;

 private:
  bool prepare();
  void append(const std::string& line);

  mutable std::mutex mutex_;
  WritingRank rank_;
  AppendFile file_;
  bool prepared_ = false;
  int64_t lost_ = 0;
};

}  // namespace lockstep
