#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/record_function.h>

#include <lockstep/profiler/event_list.h>

namespace lockstep::profiler::internal {

/// The C++ calls that led to each operator of the thread that makes it, and of those that autograd starts for that one;
/// Kineto gathers only Python's. Made after the begin of Kineto's recording and ended before its end, both hear of the
/// same operators. One of a process at a time; made and ended in one thread.
class CallStacks {
 public:
  CallStacks();
  CallStacks(const CallStacks&) = delete;
  CallStacks& operator=(const CallStacks&) = delete;
  ~CallStacks() { end(); }

  void end();
  /// Looks the calls up, and gives each event its own. `events`: of Kineto, in any order. Where there are more or fewer events
  /// of a name in a thread than calls, they get none, and the log says so. After end().
  void give_to(std::vector<FunctionEvent>& events) const;

  /// An operator and the calls that led to it. A training comes to the same ones in each step.
  struct Place {
    std::string name;
    std::vector<void*> frames;  // return addresses, the innermost first
    size_t hash;                // of the frames
    bool operator==(const Place&) const = default;
  };
  struct HashOfPlace {
    size_t operator()(const Place& place) const { return place.hash; }
  };
  struct Call {
    const Place* place;  // of Log::places
    uint64_t thread;     // torch's number
  };
  /// Written by CurrentLog::use() alone, until end().
  struct Log {
    std::unordered_set<Place, HashOfPlace> places;
    std::deque<Call> calls;  // of which there are many: none is moved when more come
  };

 private:
  std::shared_ptr<Log> log_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace lockstep::profiler::internal
