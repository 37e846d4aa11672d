#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/observe/metrics_writer.h>

/// TensorBoard's protocol buffers, serialised: tensorboard/compat/proto/{event,summary,tensor}.proto and
/// tensorboard/plugins/hparams/{api,plugin_data}.proto. Pure functions.
namespace lockstep::observe::internal {

/// When something was logged.
struct EventTime {
  double wall_time = 0;
  std::optional<int64_t> step = std::nullopt;
};

/// HistogramProto's fields.
struct Histogram {
  double min = 0;
  double max = 0;
  double num = 0;
  double sum = 0;
  double sum_squares = 0;
  std::vector<double> bucket_limits = {};
  std::vector<double> bucket_counts = {};
};

/// Events. A `summary` is what one of the functions below returned.
std::string file_version_event(const EventTime& time);
std::string session_start_event(const EventTime& time);
std::string summary_event(const EventTime& time, const std::string& summary);

/// Summaries, each with one value. `double_precision` counts with `new_style` only.
std::string scalar_summary(const std::string& tag, double value, bool new_style, bool double_precision);
std::string histogram_summary(const std::string& tag, const Histogram& histogram);
std::string image_summary(const std::string& tag, int64_t height, int64_t width, int64_t channels,
                          const std::string& png);
std::string text_summary(const std::string& tag, const std::string& text);

using DiscreteDomains = std::map<std::string, std::vector<Hyperparameters::mapped_type>>;
std::string experiment_summary(const Hyperparameters& hyperparameters, const Metrics& metrics,
                               const DiscreteDomains& domains);
std::string session_start_summary(const Hyperparameters& hyperparameters);
std::string session_end_summary(bool success);

}  // namespace lockstep::observe::internal
