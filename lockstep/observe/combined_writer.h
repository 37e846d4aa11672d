#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/observe/metrics_writer.h>
#include <lockstep/observe/writing_rank.h>

namespace lockstep {

/// Several writers as one; each call goes to all of them, in their order.
///
///     CombinedWriter writer({std::make_shared<SummaryWriter>("runs/first"),
///                            std::make_shared<CsvWriter>("metrics.csv"),
///                            std::make_shared<PrintWriter>()});
///
/// On all ranks but 0 it calls none, so a writer of your own need not know its rank. A writer that throws
/// does not keep the others from what is theirs, and does not stop the training: its first error is a
/// warning, and all are counted. As thread-safe as its writers.
class CombinedWriter : public MetricsWriter {
 public:
  /// `writes`: whether this process writes; rank 0 alone unless told. The writers may be shared with others.
  /// Throws c10::ValueError for one that is null.
  explicit CombinedWriter(std::vector<std::shared_ptr<MetricsWriter>> writers,
                          std::optional<bool> writes = std::nullopt);

  void log_metrics(const Metrics& metrics, int64_t step) override;
  void log_hyperparameters(const Hyperparameters& hyperparameters) override;
  void log_artifact(const std::filesystem::path& file) override;
  void resume(int64_t next_step) override;
  void flush() override;
  void finalize(std::string_view status) override;

  /// How often writers have thrown.
  int64_t failures() const;

 private:
  void tell_all(const char* what, const std::function<void(MetricsWriter&)>& tell);

  WritingRank rank_;
  std::vector<std::shared_ptr<MetricsWriter>> writers_;
  std::vector<std::atomic<int64_t>> failures_;  // by writer
};

}  // namespace lockstep
