#pragma once

#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/interrupt.h>

namespace lockstep::rendezvous_internal {

/// What `call` returns, or nothing when the deadline passes first. For calls into other libraries that may
/// never return: each runs on another thread (`start`: a new one), which is left behind then, so `call` must own all
/// that it uses. Throws what it throws, and, where it is `interruptible`, the Interruption that ends the wait.
template <class Call>
auto call_by(
    Deadline deadline, Call call, bool interruptible = true,
    const std::function<void(std::function<void()>)>& start = [](std::function<void()> body) {
      start_detached_thread("lockstep-store", std::move(body));
    }) -> std::optional<std::invoke_result_t<Call&>> {
  using Result = std::invoke_result_t<Call&>;
  auto promise = std::make_shared<std::promise<Result>>();
  auto result = promise->get_future();
  start([promise, call = std::optional<Call>(std::move(call))]() mutable {
    try {
      Result value = (*call)();
      call.reset();  // before the caller goes on: its objects must not end on this thread
      promise->set_value(std::move(value));
    } catch (...) {
      call.reset();
      promise->set_exception(std::current_exception());
    }
  });
  while (result.wait_for(deadline.remaining(kInterruptInterval)) != std::future_status::ready) {
    if (deadline.expired()) return std::nullopt;
    if (interruptible) check_interrupts();
  }
  return result.get();
}

}  // namespace lockstep::rendezvous_internal
