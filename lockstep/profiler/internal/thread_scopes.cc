#include <array>
#include <pthread.h>
#include <unistd.h>
#include <utility>

#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <lockstep/base/process/per_process.h>
#include <lockstep/profiler/internal/thread_scopes.h>

namespace lockstep::profiler::internal {
namespace {

// A callback of RecordFunction is a plain function, so the log that it writes to is found here. A forked child, which
// inherits the callback, records nothing.
struct CurrentScopeLog {
  std::mutex mutex;
  std::weak_ptr<ThreadScopes::Log> log;  // guarded by mutex
};
PerProcess<CurrentScopeLog> current_scope_log;

struct OpenScope : at::ObserverContext {
  std::shared_ptr<ThreadScopes::Log> log;
  ThreadScope scope;
};

std::unique_ptr<at::ObserverContext> begin_thread_scope(const at::RecordFunction& function) {
  if (torch::profiler::impl::profilerEnabled()) return nullptr;  // Kineto has it
  auto open = std::make_unique<OpenScope>();
  {
    CurrentScopeLog& current = current_scope_log.get();
    const std::lock_guard lock(current.mutex);
    open->log = current.log.lock();
  }
  if (open->log == nullptr) return nullptr;
  std::array<char, 16> name{};
  ::pthread_getname_np(::pthread_self(), name.data(), name.size());
  open->scope.name = function.name();
  open->scope.thread = ::gettid();
  open->scope.thread_name = name.data();
  open->scope.start_ns = c10::getTime();
  return open;
}

void end_thread_scope(const at::RecordFunction& /*function*/, at::ObserverContext* context) {
  if (context == nullptr) return;
  auto& open = static_cast<OpenScope&>(*context);
  if (open.log->fork_guard.in_forked_child()) return;
  open.scope.end_ns = c10::getTime();
  const std::lock_guard lock(open.log->mutex);
  if (!open.log->closed) open.log->scopes.push_back(std::move(open.scope));
}

}  // namespace

ThreadScopes::ThreadScopes() : log_(std::make_shared<Log>()) {
  {
    CurrentScopeLog& current = current_scope_log.get();
    const std::lock_guard lock(current.mutex);
    current.log = log_;
  }
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(begin_thread_scope, end_thread_scope).scopes({at::RecordScope::USER_SCOPE}));
}

std::vector<ThreadScope> ThreadScopes::take() {
  if (handle_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
    CurrentScopeLog& current = current_scope_log.get();
    const std::lock_guard lock(current.mutex);
    current.log.reset();
  }
  const std::lock_guard lock(log_->mutex);
  log_->closed = true;
  return std::exchange(log_->scopes, {});
}

}  // namespace lockstep::profiler::internal
