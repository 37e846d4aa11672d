#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace lockstep::bench::internal {

/// So many units a second, of all ranks together.
struct Throughput {
  double value = 0;
  std::string unit;
};

/// What a program says about its throughput, found in what its processes write. Not thread-safe.
class ThroughputLog {
 public:
  /// Bytes of a rank's standard output (1) or error (2), as they come. A line that begins with "[rank N] ", as a host's
  /// launcher marks it, is rank N's.
  void feed(int rank, int stream, std::string_view bytes);
  /// All processes have ended: their unfinished lines are whole.
  void finish();

  /// The last line `LOCKSTEP_SCALING VALUE [UNIT]` of the lowest rank that has written one. The unit is
  /// samples/s unless it is told.
  std::optional<Throughput> marked() const;
  /// The last `samples/s=VALUE` of the Trainer's progress bar, which rank 0 draws.
  std::optional<Throughput> trainer() const;

 private:
  void take_line(int rank, std::string_view line);

  std::map<std::pair<int, int>, std::string> unfinished_;  // by rank and stream
  std::map<int, Throughput> marked_;                       // by rank
  std::optional<Throughput> trainer_;
};

}  // namespace lockstep::bench::internal
