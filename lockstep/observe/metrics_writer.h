#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <variant>

namespace lockstep {

/// Numbers by name: {"train/loss", 0.31}. A slash groups names in TensorBoard and MLflow.
using Metrics = std::map<std::string, double>;
/// What a run was started with, by name: {"lr", 0.1}, {"optimizer", "AdamW"}.
using Hyperparameters = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;

/// Where the numbers of a training go: the one interface of CsvWriter, JsonLinesWriter, CombinedWriter,
/// SummaryWriter (TensorBoard) and MlflowWriter, and of a writer of your own, which needs log_metrics() only:
///
///     class PrintWriter : public lockstep::MetricsWriter {
///      public:
///       void log_metrics(const lockstep::Metrics& metrics, int64_t step) override {
///         for (const auto& [name, value] : metrics) std::cout << step << ' ' << name << ' ' << value <<
///         '\n';
///       }
///     };
///
/// The library's own writers keep three promises, and a writer of your own should too:
/// - Only rank 0 writes, whichever rank calls (WritingRank; CombinedWriter promises it for writers of your
///   own).
/// - What goes wrong outside of the program (a full disk, a server that is away) is warned about once and
///   counted; it never throws, for a training must not stop for its log. Misuse throws.
/// - A method costs microseconds, whatever the server does, and as long as the disk takes a write at all;
///   except flush() and finalize().
///
/// One thread calls at a time; the library's own may be called by several.
class MetricsWriter {
 public:
  virtual ~MetricsWriter();

  /// `metrics` as they are at `step`, an optimizer step that never goes down but for resume(). NaN and
  /// infinities are values like others.
  virtual void log_metrics(const Metrics& metrics, int64_t step) = 0;
  /// What the run was started with; once, before the first metrics.
  virtual void log_hyperparameters(const Hyperparameters& /*hyperparameters*/) {}
  /// A file that belongs to the run (a checkpoint, a picture). It may be read later in the background: leave
  /// it as it is until finalize().
  virtual void log_artifact(const std::filesystem::path& /*file*/) {}
  /// The training was resumed, and its next step is `next_step`: what an earlier run, which then crashed, has
  /// logged for that step and later ones is void. Call it before the first log_metrics().
  virtual void resume(int64_t /*next_step*/) {}
  /// Returns when what was logged so far is safe from a crash, as far as that can be; whether a server has it
  /// is not waited for.
  virtual void flush() {}
  /// The run is over: "finished", "failed" or "killed". Flushes. Nothing may be logged afterwards.
  virtual void finalize(std::string_view /*status*/) {}

 protected:
  MetricsWriter() = default;
  MetricsWriter(const MetricsWriter&) = default;
  MetricsWriter& operator=(const MetricsWriter&) = default;
};

}  // namespace lockstep
