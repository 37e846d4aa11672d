#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include <lockstep/observe/json_lines_writer.h>
#include <lockstep/observe/metrics_writer.h>

namespace lockstep {

/// One trial of a sweep (`lockstep sweep`): the hyperparameters that this job is to try, and what the sweep
/// judges it by.
///
///     const auto trial = lockstep::trial();
///     torch::optim::AdamW optimizer(model.parameters(), trial.get("lr", 1e-3));
///     …
///     trial.report({{"validation/loss", loss}}, epoch);
///
/// Without a sweep get() returns its fallback and report() does nothing, so a program may have these lines
/// always. All ranks have the same parameters; rank 0 alone reports. A sweep that has heard enough ends the
/// job with SIGTERM. A Trainer reports by itself. Thread-safe; copies are cheap and are the same trial.
class Trial {
 public:
  /// `description` is what a sweep puts into LOCKSTEP_TRIAL; nothing: there is no sweep. Throws
  /// c10::ValueError when it is none.
  explicit Trial(const std::optional<std::string>& description);

  /// Whether a sweep has started this job.
  explicit operator bool() const { return writer_ != nullptr; }
  int64_t number() const { return number_; }  ///< in its study, from 0; -1 without a sweep
  const Hyperparameters& parameters() const { return parameters_; }

  /// The parameter of that name, or `fallback` where the sweep has none. T is an integer, a floating point
  /// number (whose parameter may be an integer), bool or std::string. Throws c10::ValueError where the
  /// parameter is something else.
  template <typename T>
  T get(const std::string& name, T fallback) const {
    if constexpr (std::is_same_v<T, bool>) {
      return boolean(name).value_or(fallback);
    } else if constexpr (std::is_integral_v<T>) {
      const auto found = integer(name);
      return found ? static_cast<T>(*found) : fallback;
    } else if constexpr (std::is_floating_point_v<T>) {
      const auto found = real(name);
      return found ? static_cast<T>(*found) : fallback;
    } else {
      return text(name).value_or(fallback);
    }
  }
  std::string get(const std::string& name, const char* fallback) const {
    return text(name).value_or(fallback);
  }

  /// Tells the sweep what has been reached. `step` grows from report to report and counts the same in all
  /// trials, epochs say, for trials are compared at equal steps.
  void report(const Metrics& metrics, int64_t step) const;

 private:
  std::optional<bool> boolean(const std::string& name) const;
  std::optional<int64_t> integer(const std::string& name) const;
  std::optional<double> real(const std::string& name) const;
  std::optional<std::string> text(const std::string& name) const;

  int64_t number_ = -1;
  Hyperparameters parameters_;
  std::shared_ptr<JsonLinesWriter> writer_;  // null without a sweep
};

/// The trial that this process is a part of, by its environment.
Trial trial();

}  // namespace lockstep
