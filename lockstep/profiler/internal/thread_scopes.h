#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/record_function.h>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep::profiler::internal {

/// A scope in a thread that Kineto does not record.
struct ThreadScope {
  std::string name;
  int64_t thread = 0;  // the system's number
  std::string thread_name;
  int64_t start_ns = 0;  // since 1970
  int64_t end_ns = 0;
};

/// Writes down the scopes (at::RecordScope::USER_SCOPE) of those threads, from construction to take(): of loaders, of
/// writers, of the user's own. Kineto could record these threads as well, but then loses what operators allocate. One of a
/// process at a time. Thread-safe.
class ThreadScopes {
 public:
  ThreadScopes();
  ThreadScopes(const ThreadScopes&) = delete;
  ThreadScopes& operator=(const ThreadScopes&) = delete;
  ~ThreadScopes() { take(); }

  /// The scopes that have ended; from then on there are no more.
  std::vector<ThreadScope> take();

  /// What outlives this where a scope is still open.
  struct Log {
    ForkGuard fork_guard;  // a scope may be open across a fork
    std::mutex mutex;
    bool closed = false;              // guarded by mutex
    std::vector<ThreadScope> scopes;  // guarded by mutex
  };

 private:
  std::shared_ptr<Log> log_;
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace lockstep::profiler::internal
