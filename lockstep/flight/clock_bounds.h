#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

/// How the clocks of several machines stand to one another, from what happened on them: an effect can't be before its cause,
/// so each pair of the two on different machines bounds the difference of their clocks. Needs no message of its own.
namespace lockstep::flight {

/// How far a clock is ahead of another, and within what that is known.
struct ClockOffset {
  int64_t ns = 0;
  int64_t error_ns = 0;
};

/// Collects such pairs. Clocks are known by any names. Used by one thread.
class ClockBounds {
 public:
  /// An effect, and what had to be before it, each by the clock of its own machine. Times up to a quarter of int64_t.
  void add(const std::string& clock_of_cause, int64_t cause_ns, const std::string& clock_of_effect,
           int64_t effect_ns);

  /// How far each clock is ahead of `reference`, with `reference` itself; without those that nothing connects with it from
  /// both sides. By these no effect is before its cause, unless the pairs contradict each other, as they do when clocks
  /// drift over hours: then the truth lies between them.
  std::map<std::string, ClockOffset> offsets(const std::string& reference) const;

 private:
  /// By cause and effect: the least by which the clock of the cause is behind that of the effect, as the closest pair tells.
  std::map<std::pair<std::string, std::string>, int64_t> slack_;
};

}  // namespace lockstep::flight
