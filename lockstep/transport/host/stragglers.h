#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/training/training_phases.h>

namespace lockstep::transport {

/// What a rank has told of its last window.
struct RankPhases {
  int rank = 0;
  PhaseTimes times;
};

/// A rank for which the others wait. Times in nanoseconds a step.
struct Straggler {
  int rank = 0;
  TrainingPhase phase = TrainingPhase::kNone;  // in which it takes most more than the others
  double step = 0;
  double own = 0;  // without waiting
  double others_own = 0;
  double in_phase = 0;
  double others_in_phase = 0;
};

/// The rank that is slow, if one is: the time that it takes itself, without waiting, is more than a fifth of a step above what
/// most others take, and most others wait at least half of that longer than it does. So work that is uneven without others
/// waiting for it names no rank, and neither does what most ranks do. A rank is compared with those whose steps take as long
/// as its own, within a tenth: they train together.
std::optional<Straggler> find_straggler(const std::vector<RankPhases>& ranks);

/// Looks at one window after the other, and says when that changes. Used by one thread.
class StragglerWatch {
 public:
  /// So many windows in a row must agree to replace what was said last.
  static constexpr int kWindowsToChange = 3;

  struct Change {
    std::optional<Straggler> slow;  // nothing: none is any more
    int before = -1;                // the rank that was; −1: none
  };
  /// The first straggler is told of at once; later another one, another phase, or none, once it lasts.
  std::optional<Change> look(const std::vector<RankPhases>& ranks);

 private:
  using Key = std::optional<std::pair<int, TrainingPhase>>;
  bool ever_ = false;
  Key said_;
  Key next_;
  int seen_ = 0;  // windows of next_ in a row
};

/// "it takes 103 ms a step without waiting, the others 3.1 ms; most of it in forward (101 ms, the others 1.2 ms)"
std::string describe(const Straggler& straggler);

}  // namespace lockstep::transport
