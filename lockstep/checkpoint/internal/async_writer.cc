#include <chrono>
#include <cstdlib>
#include <set>
#include <utility>

#include <ATen/record_function.h>

#include <lockstep/base/process/interrupt.h>
#include <lockstep/checkpoint/internal/async_writer.h>

namespace lockstep::checkpoint::internal {
namespace {

// A write is given up within a chunk; what may take longer is the disk's sync, or a peer.
constexpr std::chrono::seconds kPatienceAtExit{10};

/// The writers there are. Never destroyed: exit() may come while they are in use.
struct Registry {
  std::mutex mutex;
  std::set<AsyncWriter*> writers;
};

Registry& registry() {
  static auto* const instance = [] {
    std::atexit([] {
      const std::lock_guard lock(registry().mutex);
      for (AsyncWriter* writer : registry().writers) writer->cancel_at_exit();
    });
    return new Registry;
  }();
  return *instance;
}

}  // namespace

AsyncWriter::AsyncWriter() {
  const std::lock_guard lock(registry().mutex);
  registry().writers.insert(this);
}

AsyncWriter::~AsyncWriter() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().writers.erase(this);
  }
  if (fork_guard_.in_forked_child()) {
    state_.release();  // its condition variable has a waiter that is not here, and would be waited for
    return;
  }
  {
    const std::lock_guard lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_all();
  thread_.join();
}

void AsyncWriter::start(std::function<void()> task) {
  wait();
  if (!thread_.running()) thread_.start("ls-checkpoint", [this] { run(); });
  {
    const std::lock_guard lock(state_->mutex);
    state_->task = std::move(task);
  }
  state_->changed.notify_all();
}

void AsyncWriter::wait() {
  if (fork_guard_.in_forked_child()) return;
  std::unique_lock lock(state_->mutex);
  while (state_->task) wait_interruptibly(state_->changed, lock);
}

bool AsyncWriter::busy() const {
  if (fork_guard_.in_forked_child()) return true;
  const std::lock_guard lock(state_->mutex);
  return static_cast<bool>(state_->task);
}

void AsyncWriter::cancel_at_exit() {
  if (fork_guard_.in_forked_child()) return;
  cancelled_ = true;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, kPatienceAtExit, [this] { return !state_->task; });
}

void AsyncWriter::run() {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return state.task || state.closing; });
    if (!state.task) return;
    // A copy: a thread that waits must find the task in its place until it is done.
    const std::function<void()> task = state.task;
    lock.unlock();
    {
      RECORD_USER_SCOPE("checkpoint: write");
      task();
    }
    lock.lock();
    state.task = nullptr;
    state.changed.notify_all();
  }
}

}  // namespace lockstep::checkpoint::internal
