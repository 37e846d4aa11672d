#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/flight/recorder.h>

namespace lockstep {

/// Keeps Lockstep's flight recorder informed of operations that another backend runs on its own: they are
/// recorded when they are called, and their ends when that backend tells. Knows nothing of CUDA. Thread-safe.
///
/// A work's future of type WorkResult (c10d::Work::getFutureResult) tells the end; ProcessGroupNCCL's
/// watchdog completes it. Where it does not (`watched` is false, or a work has no such future), works are
/// asked when the next operation begins, and by poll().
class OperationRecords {
 public:
  /// Called after an operation has failed, with "timeout" or "failure"; from any thread, also from a
  /// watchdog's.
  using OnFailure = std::function<void(const char* reason)>;

  OperationRecords(std::shared_ptr<const flight::ObservedGroup> group, bool watched, OnFailure on_failure);

  /// Runs `start`, which submits the operation, and records it. `operation.sequence` is numbered here,
  /// separately for point-to-point operations. What `start` throws goes on to the caller, with the operation
  /// named in it. A null work is one of a batch: the batch's own work follows, see end_batch().
  c10::intrusive_ptr<c10d::Work> run(flight::ObservedOperation operation,
                                     const std::function<c10::intrusive_ptr<c10d::Work>()>& start);
  /// Operations from here to end_batch() end with the batch's work.
  void begin_batch();
  c10::intrusive_ptr<c10d::Work> end_batch(const std::function<c10::intrusive_ptr<c10d::Work>()>& end);

  /// Asks the works whose end is not told.
  void poll();
  /// All operations that are not done have failed, for the group was aborted.
  void fail_all();

 private:
  struct State;  // shared with the futures, which may outlive this
  struct Pending {
    uint64_t key = 0;                     // in order of submission
    uint64_t record = 0;                  // the flight recorder's; 0 when that is off
    flight::ObservedOperation operation;  // without its tensors and purpose
    c10::intrusive_ptr<c10d::Work> work;  // null where a future tells
  };

  void watch(std::vector<Pending> operations, const c10::intrusive_ptr<c10d::Work>& work);

  std::shared_ptr<State> state_;
  const bool watched_;
};

}  // namespace lockstep
