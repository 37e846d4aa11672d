#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <ATen/record_function.h>

#include <lockstep/profiler/event_list.h>

namespace lockstep::profiler::internal {

/// The C++ calls that led to each operator of the thread that makes it, and of those that autograd starts for that one;
/// Kineto gathers only Python's. Made behind the begin of Kineto's recording and ended before its end, both hear of the
/// same operators. One of a process at a time; made and ended in one thread.
class CallStacks {
 public:
  CallStacks();
  CallStacks(const CallStacks&) = delete;
  CallStacks& operator=(const CallStacks&) = delete;
  ~CallStacks() { end(); }

  void end();
  /// Looks the calls up, and gives each event its own. `events`: of Kineto, in any order. After end().
  void give_to(std::vector<FunctionEvent>& events) const;

  struct Call {
    std::string name;
    uint64_t thread;            // torch's number
    std::vector<void*> frames;  // return addresses, the innermost first
  };
  /// Written by CurrentLog::use() alone, until end().
  struct Log {
    std::deque<Call> calls;  // of which there are many: none is moved when more come
  };

 private:
  std::shared_ptr<Log> log_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace lockstep::profiler::internal
