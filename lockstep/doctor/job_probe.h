#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/rendezvous/world.h>

namespace lockstep::doctor {

/// Two ranks, the lower first.
using Pair = std::pair<int, int>;

/// What one rank found out with another one.
struct PairMeasurement {
  std::string error;    ///< empty: everything worked
  double latency = 0;   ///< seconds, median: all_reduce of 4 bytes
  double transfer = 0;  ///< seconds, median: all_reduce of 1 MiB, staged
};

/// What one rank found out about the wire between its host and another one.
struct WireMeasurement {
  std::string error = {};       ///< empty: everything worked
  double rate = 0;              ///< bytes a second that it sends to the other
  int64_t segments = 0;         ///< TCP segments that its host sent meanwhile, …
  int64_t resent_segments = 0;  ///< … and those that it sent again, because they were lost
  // Of the lower rank alone:
  double latency = 0;       ///< seconds, median: half of a message's way there and back
  double clock_offset = 0;  ///< seconds: the other's wall clock minus this one's
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
  /// What carries this rank's messages to other hosts: "UCX 1.13.1 (tcp/eth0)"; empty in a job on one host.
  virtual std::string wire() = 0;
  /// The same for ranks of which no two are on one host.
  virtual WireMeasurement test_wires(const std::vector<Pair>& pairs) = 0;
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
  std::string wire() override;
  WireMeasurement test_wires(const std::vector<Pair>& pairs) override;

 private:
  /// In a group of the two alone, so that a third rank that does not answer is not needed. `limit`: no new operations
  /// are to be begun then. Returns the error, if any.
  std::string in_group_of(const Pair& pair,
                          const std::function<void(const ProcessGroup&, Deadline limit)>& test);
  PairMeasurement test_pair(const Pair& pair);
  WireMeasurement test_wire(const Pair& pair);

  World world_;
  std::chrono::milliseconds timeout_;
  std::unique_ptr<DefaultGroup> group_;
};

/// The rounds of a tournament: each pair of the ranks 0 to world_size−1 is in exactly one, and no rank is
/// twice in a round. Pure. (The circle method: one rank stays, the others move on by one place.)
std::vector<std::vector<Pair>> tournament(int world_size);

}  // namespace lockstep::doctor
