#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/rendezvous/world.h>

namespace lockstep {
class DefaultGroup;
}

namespace lockstep::doctor {

/// Two ranks, the lower first.
using Pair = std::pair<int, int>;

/// What one rank found out with another one.
struct PairMeasurement {
  std::string error;    ///< empty: everything worked
  double latency = 0;   ///< seconds, median: all_reduce of 4 bytes
  double transfer = 0;  ///< seconds, median: all_reduce of 1 MiB, staged
};

/// What the job's check does with process groups. An interface, so that a test can put ranks in its place
/// that fail, are slow or don't answer.
class JobProbe {
 public:
  virtual ~JobProbe() = default;
  /// Joins the default group. Throws std::exception when that fails.
  virtual void join() = 0;
  /// all_reduce and broadcast of known values over all ranks. Throws when one fails.
  virtual void test_all() = 0;
  /// This rank's wall clock minus rank 0's, in seconds.
  virtual double clock_offset() = 0;
  /// Tests the pair to which this rank belongs, if any; `pairs` have no rank in common, and all ranks of the
  /// job call it with the same ones. Returns within about the timeout. Throws nothing.
  virtual PairMeasurement test_pairs(const std::vector<Pair>& pairs) = 0;
};

/// The real one. An operation that takes longer than `timeout` fails, and one pair's test takes no longer
/// than two of them.
class LockstepProbe : public JobProbe {
 public:
  LockstepProbe(World world, std::chrono::milliseconds timeout);
  ~LockstepProbe() override;
  void join() override;
  void test_all() override;
  double clock_offset() override;
  PairMeasurement test_pairs(const std::vector<Pair>& pairs) override;

 private:
  PairMeasurement test_pair(const Pair& pair);

  World world_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<DefaultGroup> group_;
};

/// The rounds of a tournament: each pair of the ranks 0 to world_size−1 is in exactly one, and no rank is
/// twice in a round. Pure. (The circle method: one rank stays, the others move on by one place.)
std::vector<std::vector<Pair>> tournament(int world_size);

}  // namespace lockstep::doctor
