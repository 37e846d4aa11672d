#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/observe/combined_writer.h>

namespace lockstep {

CombinedWriter::CombinedWriter(std::vector<std::shared_ptr<MetricsWriter>> writers,
                               std::optional<bool> writes)
    : rank_(writes), writers_(std::move(writers)), failures_(writers_.size()) {
  for (size_t i = 0; i < writers_.size(); ++i) {
    TORCH_CHECK_VALUE(writers_[i], "CombinedWriter: writer ", i, " is null");
  }
}

void CombinedWriter::tell_all(const char* what, const std::function<void(MetricsWriter&)>& tell) {
  if (!rank_.here()) return;
  for (size_t i = 0; i < writers_.size(); ++i) {
    try {
      tell(*writers_[i]);
    } catch (...) {
      if (failures_[i]++ > 0) continue;
      LOCKSTEP_LOG(kWarning) << "writer " << i << " of a CombinedWriter failed in " << what << ": "
                             << text_of(std::current_exception())
                             << "; the program goes on, and further failures of this writer are only counted";
    }
  }
}

void CombinedWriter::log_metrics(const Metrics& metrics, int64_t step) {
  tell_all("log_metrics", [&](MetricsWriter& writer) { writer.log_metrics(metrics, step); });
}

void CombinedWriter::log_hyperparameters(const Hyperparameters& hyperparameters) {
  tell_all("log_hyperparameters",
           [&](MetricsWriter& writer) { writer.log_hyperparameters(hyperparameters); });
}

void CombinedWriter::log_artifact(const std::filesystem::path& file) {
  tell_all("log_artifact", [&](MetricsWriter& writer) { writer.log_artifact(file); });
}

void CombinedWriter::resume(int64_t next_step) {
  tell_all("resume", [&](MetricsWriter& writer) { writer.resume(next_step); });
}

void CombinedWriter::flush() {
  tell_all("flush", [](MetricsWriter& writer) { writer.flush(); });
}

void CombinedWriter::finalize(std::string_view status) {
  tell_all("finalize", [&](MetricsWriter& writer) { writer.finalize(status); });
}

int64_t CombinedWriter::failures() const {
  int64_t sum = 0;
  for (const auto& count : failures_) sum += count;
  return sum;
}

}  // namespace lockstep
