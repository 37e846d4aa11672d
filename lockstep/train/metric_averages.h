#pragma once

#include <map>
#include <string>

#include <lockstep/collectives/process_group.h>
#include <lockstep/observe/metrics_writer.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep {

/// Means over samples, of this rank and then of all: each value counts as often as it has samples, so that
/// uneven last batches, and ranks with fewer samples or none, come out right to the last sample. Sums are
/// float64. Used by one thread at a time.
class MetricAverages {
 public:
  /// `value` is a mean over `samples` samples.
  void add(const std::string& name, double value, double samples);
  /// Adds what `other` holds.
  void add(const MetricAverages& other);
  void clear() { sums_.clear(); }
  bool empty() const { return sums_.empty(); }
  /// This rank's samples of a metric; 0 for one that it does not have.
  double samples(const std::string& name) const;

  /// This rank's means.
  Metrics local() const;
  /// What all ranks together hold, on all ranks the same bits. Ranks may have different names. Collective in
  /// `group`; without one a copy.
  MetricAverages of_all_ranks(const ProcessGroup& group) const;
  /// The means over all ranks' samples: of_all_ranks(group).local().
  Metrics reduce(const ProcessGroup& group) const;

  /// {NAME: [sum, samples]}
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  struct Sum {
    double values = 0;  // each times its samples
    double samples = 0;
  };
  std::map<std::string, Sum> sums_;
};

}  // namespace lockstep
