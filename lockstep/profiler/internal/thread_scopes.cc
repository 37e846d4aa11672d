#include <array>
#include <pthread.h>
#include <unistd.h>
#include <utility>

#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <lockstep/profiler/internal/current_log.h>
#include <lockstep/profiler/internal/thread_scopes.h>

namespace lockstep::profiler::internal {
namespace {

CurrentLog<ThreadScopes::Log> current_scope_log;

struct OpenScope : at::ObserverContext {
  std::shared_ptr<ThreadScopes::Log> log;
  ThreadScope scope;
};

std::unique_ptr<at::ObserverContext> begin_thread_scope(const at::RecordFunction& function) {
  if (torch::profiler::impl::profilerEnabled()) return nullptr;  // Kineto has it
  auto open = std::make_unique<OpenScope>();
  open->log = current_scope_log.get();
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
  current_scope_log.set(log_);
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(begin_thread_scope, end_thread_scope).scopes({at::RecordScope::USER_SCOPE}));
}

std::vector<ThreadScope> ThreadScopes::take() {
  if (handle_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
    current_scope_log.set(nullptr);
  }
  const std::lock_guard lock(log_->mutex);
  log_->closed = true;
  return std::exchange(log_->scopes, {});
}

}  // namespace lockstep::profiler::internal
