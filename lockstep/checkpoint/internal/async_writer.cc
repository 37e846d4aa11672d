#include <chrono>
#include <cstdlib>
#include <set>
#include <utility>

#include <lockstep/base/interrupt.h>
#include <lockstep/checkpoint/internal/async_writer.h>

namespace lockstep::internal {
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
  if (fork_guard_.in_forked_child()) return;
  {
    const std::lock_guard lock(registry().mutex);
    registry().writers.erase(this);
  }
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void AsyncWriter::start(std::function<void()> task) {
  wait();
  {
    const std::lock_guard lock(mutex_);
    task_ = std::move(task);
  }
  if (!thread_.running()) thread_.start("ls-checkpoint", [this] { run(); });
  changed_.notify_all();
}

void AsyncWriter::wait() {
  if (fork_guard_.in_forked_child()) return;
  std::unique_lock lock(mutex_);
  while (task_) wait_interruptibly(changed_, lock);
}

bool AsyncWriter::busy() const {
  const std::lock_guard lock(mutex_);
  return static_cast<bool>(task_);
}

void AsyncWriter::cancel_at_exit() {
  if (fork_guard_.in_forked_child()) return;
  cancelled_ = true;
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kPatienceAtExit, [this] { return !task_; });
}

void AsyncWriter::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return task_ || closing_; });
    if (!task_) return;
    // A copy: whoever waits must find the task in its place until it is done.
    const std::function<void()> task = task_;
    lock.unlock();
    task();
    lock.lock();
    task_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace lockstep::internal
