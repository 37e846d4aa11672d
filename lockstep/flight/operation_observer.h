#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

/// What the backends tell of their operations: to the flight recorder always, and to the observers that are attached, a
/// profiler's for example. The functions are thread-safe. Without an observer they cost what the
/// recorder costs, and the look at one atomic variable.
namespace lockstep::flight {

/// The members of a group; made once for each group.
struct ObservedGroup {
  std::string name;
  std::vector<int> ranks;               // global, in group order
  int rank = 0;                         // this process's, within the group
  std::string key = {};                 // the same on all members, and no other group's; empty: the name
  std::vector<std::string> hosts = {};  // each member's, in group order; empty: not known
};

/// Where a call stands in a program's source. The texts live as long as the process.
struct CodePlace {
  CodePlace() = default;
  CodePlace(const std::source_location& where)
      : file(where.file_name()), function(where.function_name()), line(where.line()) {}

  const char* file = "";  // empty: not known
  const char* function = "";
  uint32_t line = 0;
};

/// What is known about an operation when it is submitted.
struct ObservedOperation {
  const char* kind = "";  // "all_reduce"; static storage
  uint64_t sequence = 0;  // of the group's collectives, or of its point-to-point operations; from 1
  bool point_to_point = false;
  int peer = -1;  // group rank: destination, source or root; -1: none, or any source
  int tag = 0;
  std::string detail;  // "SUM", split sizes, or empty
  const std::vector<at::Tensor>* inputs =
      nullptr;  // not to be kept beyond the call, but for sizes and dtypes
  const std::vector<at::Tensor>* outputs = nullptr;
  std::chrono::milliseconds timeout{};
  CodePlace where;
  std::string_view purpose;   // "DDP bucket 3 of 5"; empty: the caller's own; not to be kept beyond the call
  bool asynchronous = false;  // the caller goes on: that it is pending does not mean that the caller waits
};

/// Hears of each operation of this process: scheduled, then started, then ended; one that is given up before it starts
/// ends without. Each call comes in the thread in which it happens, several at once for several operations, so that
/// what it does takes the operation's time. Must not throw, and must neither use a group nor attach or detach.
/// Of operations that began before attach() it hears nothing, or their end with an id that was never scheduled.
class OperationObserver {
 public:
  virtual ~OperationObserver() = default;
  /// `id`: no other operation of this process has it.
  virtual void scheduled(uint64_t id, const ObservedGroup& group, const ObservedOperation& operation) = 0;
  virtual void started(uint64_t id) = 0;
  /// `error`: null where it succeeded.
  virtual void ended(uint64_t id, const std::string* error) = 0;
};

/// From now on. A forked child begins without observers.
void attach(std::shared_ptr<OperationObserver> observer);
/// Operations of which a thread is telling at this moment may still be told. Does nothing for one that is not attached.
void detach(const std::shared_ptr<OperationObserver>& observer);

// What a backend calls.

/// Whether scheduled() keeps or tells what it hears; else a backend need not find it out. Throws as scheduled() does.
bool is_watching();

/// Tells of a new operation and returns its id, for the functions below; 0, which they ignore, when there is neither a
/// recorder nor an observer. Throws c10::ValueError at the process's first call when LOCKSTEP_FLIGHT_RECORDS is
/// malformed (watch_signal() does so before).
uint64_t scheduled(const std::shared_ptr<const ObservedGroup>& group, const ObservedOperation& operation);
void started(uint64_t id);
void completed(uint64_t id);
/// After the first end, others of the same operation are ignored, where the recorder is on.
void failed(uint64_t id, const std::string& error);

}  // namespace lockstep::flight
