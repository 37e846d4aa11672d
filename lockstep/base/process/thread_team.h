#pragma once

#include <functional>
#include <memory>
#include <string>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep {

/// Threads for parts of one computation, for as long as it lives. Thread-safe: a run waits for the one before.
/// In a forked child the threads are made anew.
class ThreadTeam {
 public:
  /// `name`: of each thread, at most 15 characters; a literal. Throws std::system_error where the system gives no more threads.
  ThreadTeam(int count, const char* name);
  ~ThreadTeam();

  /// Calls work(i) for all i < count, work(i) always on thread i, and returns when all have returned. They
  /// run with the caller's thread-local state (grad mode, autocast, …), and share the caller's number of
  /// intra-op threads. Throws what the first that failed threw, with where(i) added to its message.
  void run(int count, const std::function<void(int)>& work, const std::function<std::string(int)>& where);

 private:
  struct Members;
  const int count_;
  const char* const name_;
  ForkGuard fork_guard_;
  std::unique_ptr<Members> members_;
};

}  // namespace lockstep
