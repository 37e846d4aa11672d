#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/flight/operation_observer.h>

namespace lockstep::profiler::internal {

/// An operation of a group, as this process saw it. Times are nanoseconds since 1970.
struct LoggedOperation {
  const char* kind = "";
  size_t group = 0;  // index in OperationLog::Content::groups
  uint64_t sequence = 0;
  bool point_to_point = false;
  int peer = -1;  // group rank
  int tag = 0;
  bool asynchronous = false;
  std::string detail;
  std::string dtype;  // of the first tensor
  int64_t input_elements = 0;
  int64_t output_elements = 0;
  int64_t bytes = 0;    // of the larger side
  std::string where;    // "train.cc:31"
  std::string purpose;  // "DDP bucket 3 of 5", or empty
  std::string error;
  int64_t scheduled_ns = 0;
  int64_t started_ns = 0;  // 0: not yet
  int64_t ended_ns = 0;    // 0: not yet
};

/// Writes down the operations of all threads while it is attached. Thread-safe.
class OperationLog : public flight::OperationObserver {
 public:
  struct Content {
    std::vector<flight::ObservedGroup> groups;
    std::vector<LoggedOperation> operations;
  };

  void scheduled(uint64_t id, const flight::ObservedGroup& group,
                 const flight::ObservedOperation& operation) override;
  void started(uint64_t id) override;
  void ended(uint64_t id, const std::string* error) override;

  /// What there is, and forgets it.
  Content take();

 private:
  size_t place_of(const flight::ObservedGroup& group);

  std::mutex mutex_;
  Content content_;                  // guarded by mutex_
  std::map<uint64_t, size_t> open_;  // guarded by mutex_; by id, of those that have not ended
};

}  // namespace lockstep::profiler::internal
