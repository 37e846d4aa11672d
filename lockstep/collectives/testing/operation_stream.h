#pragma once

#include <atomic>
#include <deque>
#include <string>
#include <vector>

#include <lockstep/collectives/testing/random_cases.h>

namespace lockstep::testing {

/// A tensor for each slot of the case on this rank.
std::vector<GuardedTensor> make_tensors(const Place& place, const Case& c, Random& local,
                                        c10::Device device = c10::kCPU);
/// Makes the call with these tensors, without waiting for it if the case is asynchronous.
Started start(const Place& place, const Case& c, const std::vector<GuardedTensor>& tensors);

/// An endless stream of random operations of all kinds: the same on all ranks of a group, each of which makes
/// the next call after a random while. Up to kInFlight operations are in flight; results are checked as
/// operations complete, and what is wrong fails the test with the case and the seed.
///
/// Each operation comes once before any comes again. One thread.
class OperationStream {
 public:
  static constexpr size_t kInFlight = 6;

  /// `title` names the stream in messages, the seed included.
  OperationStream(Place place, uint64_t seed, std::string title);

  /// Makes the next call, and checks some earlier ones. Throws what the operations throw; may be called again
  /// then, for a send or receive that fails is no failure of the group.
  void step();
  /// Waits for all calls and checks them. Throws what they throw.
  void finish();
  /// After a failure: waits for all calls. What succeeded must be right; the others' errors are returned.
  std::vector<std::string> finish_failed();

  /// Calls made so far. May be read from any thread.
  int made() const { return made_.load(std::memory_order_relaxed); }
  /// Collective operations that succeeded (not the point-to-point ones).
  int64_t succeeded() const { return succeeded_; }
  /// Whether one failed.
  bool collective_failed() const { return collective_failed_; }

 private:
  struct Pending {
    Case c;
    int number;
    std::vector<GuardedTensor> tensors;
    Started started;
  };

  const Operation& next_operation();
  c10::Device next_device(const Operation& operation);
  void finish_first();
  void check(const Pending& pending);
  void note_failure(const Pending& pending);
  void report(const Pending& pending, const std::string& problems) const;

  Place place_;
  std::string title_;
  Random common_;  // the same on all ranks
  Random local_;
  std::vector<size_t> deck_;  // operations still to come in this round
  std::deque<Pending> pending_;
  std::atomic<int> made_{0};
  int64_t succeeded_ = 0;
  bool collective_failed_ = false;
};

}  // namespace lockstep::testing
