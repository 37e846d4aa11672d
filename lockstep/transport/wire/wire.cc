#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport::wire {
namespace {

// A waiter that spins drives the wire many more rounds than this; one that goes to sleep, a few.
constexpr uint64_t kRoundsOfSpinning = 16;
// How long the thread leaves the engine to those that spin before it looks whether they still do.
constexpr int kStandbyMilliseconds = 1;
// That a thread is in the engine: its destructor waits a second for the others.
constexpr std::chrono::seconds kLongestCall{2};

}  // namespace

/// The wires of this process, for its exit. A library that was loaded at run time, as UCX is, takes itself down then,
/// and ends the process if a thread still drives it.
class Wire::Living {
 public:
  static Living& get() {
    static PerProcess<Living> all;
    return all.get();
  }
  void add(Wire& wire) {
    std::lock_guard lock(mutex_);
    wires_.insert(&wire);
  }
  void remove(Wire& wire) {
    std::lock_guard lock(mutex_);
    wires_.erase(&wire);
  }

 private:
  [[gnu::destructor]] static void leave_to_exiting_thread();

  std::recursive_mutex mutex_;  // what a request is the last to hold may be a wire
  std::set<Wire*> wires_;
};

/// Runs after the handlers of exit(3) and the destructors of static objects, which may end groups, and before UCX's
/// libraries end, which came later and do not need this one. A library that does, and comes after UCX, reverses that order.
void Wire::Living::leave_to_exiting_thread() {
  const Deadline deadline = Deadline::after(kLongestCall);
  Living& living = get();
  std::lock_guard lock(living.mutex_);
  while (!living.wires_.empty()) {
    living.wires_.extract(living.wires_.begin()).value()->leave_to_exiting_thread(deadline);
  }
}

// How the thread and the waiters share the engine. The thread sleeps in epoll_wait(2). The engine's descriptor
// wakes it for one event (EPOLLONESHOT) and must be watched again after that, which any thread can do: watch()
// makes the engine ready for it and has the kernel look at the descriptor once more, so nothing is lost.
//   - Waiters spin: an event wakes the thread once; it sees that waiters have driven the wire since the
//     descriptor was watched, and leaves the engine to them. It only looks each millisecond whether they still
//     do, for one may have gone away to compute.
//   - A waiter goes to sleep: before_sleep() watches the descriptor. The thread need not wake for that.
//   - No caller drives: the thread does, and watches the descriptor before it sleeps.

Wire::Wire(std::unique_ptr<Engine> engine, OnPeerLost on_peer_lost)
    : on_peer_lost_(std::move(on_peer_lost)),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      poll_fd_(::epoll_create1(EPOLL_CLOEXEC)),
      engine_(std::move(engine)) {
  engine_->on_done = [this](Operation& operation) { finished_.push_back(&static_cast<Request&>(operation)); };
  engine_->on_peer_lost = [this](int rank, const std::string& reason) {
    untold_.emplace_back(rank, reason);
    std::lock_guard lock(lost_mutex_);
    lost_.emplace(rank, reason);
  };
  epoll_event wake{};
  wake.events = EPOLLIN;
  wake.data.fd = wake_fd_.get();
  epoll_event event{};  // no events yet
  event.data.fd = engine_->event_fd();
  TORCH_CHECK_WITH(DistBackendError,
                   wake_fd_ && poll_fd_ &&
                       ::epoll_ctl(poll_fd_.get(), EPOLL_CTL_ADD, wake_fd_.get(), &wake) == 0 &&
                       ::epoll_ctl(poll_fd_.get(), EPOLL_CTL_ADD, engine_->event_fd(), &event) == 0,
                   "can't wait for messages between hosts: ", std::strerror(errno));
  Living::get().add(*this);
  try {
    thread_.start("lockstep-wire", [this] { run(); });
  } catch (...) {
    Living::get().remove(*this);
    throw;
  }
}

Wire::~Wire() {
  if (fork_guard_.in_forked_child()) {
    engine_.release();  // its connections are the parent's
    return;
  }
  stop_.store(true);
  wake_thread();
  thread_.join();
  if (Lock lock = enter()) cancel_all(std::move(lock));
  if (Lock lock = enter()) {
    engine_.reset();
    lock.unlock();
  } else {
    engine_.release();  // to the end of the process
  }
  Living::get().remove(*this);
}

/// No other thread is in the engine once this returns, nor goes there, and what it waits for has failed. The lock is
/// awaited until the deadline, for this thread may have it: a program may call exit() in its handler of a signal.
void Wire::leave_to_exiting_thread(const Deadline& deadline) {
  Lock lock(mutex_, std::try_to_lock);
  while (!lock && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  if (!lock) return;
  exiting_thread_ = std::this_thread::get_id();
  cancel_all(std::move(lock));
}

void Wire::cancel_all(Lock lock) {
  for (const Handle& request : pending_) {
    if (!request->done()) engine_->cancel(*request);
  }
  settle(std::move(lock));
}

/// The lock under which the engine may be used; none where it may not be.
Wire::Lock Wire::enter() const {
  if (fork_guard_.in_forked_child()) return {};
  Lock lock(mutex_);
  return may_use_engine() ? std::move(lock) : Lock();
}

/// Under the lock.
bool Wire::may_use_engine() const {
  return !exiting_thread_ || *exiting_thread_ == std::this_thread::get_id();
}

std::string Wire::describe() const {
  const Lock lock = enter();
  return lock ? engine_->describe() : "none in a forked child, or at the process's exit";
}

std::string Wire::address() const {
  const Lock lock = enter();
  return lock ? engine_->address() : "";
}

void Wire::connect(int rank, const std::string& address) {
  if (const Lock lock = enter()) engine_->connect(rank, address);
}

Handle Wire::send(int to, Tag tag, const void* data, size_t bytes, Doorbell* bell, OnDone on_done) {
  return start(to, tag.channel != 0, bell, std::move(on_done),
               [&](Request& request) { engine_->send(request, tag, data, bytes); });
}

Handle Wire::receive(int from, Tag tag, void* data, size_t bytes, Doorbell* bell, OnDone on_done,
                     bool standing) {
  return start(from, tag.channel != 0 && !standing, bell, std::move(on_done),
               [&](Request& request) { engine_->receive(request, tag, data, bytes); });
}

Handle Wire::start(int peer, bool awaited, Doorbell* bell, OnDone on_done,
                   const std::function<void(Request&)>& post) {
  auto request = std::make_shared<Request>();
  request->Operation::peer = peer;
  request->bell_ = bell;
  request->on_done_ = std::move(on_done);
  request->awaited_ = awaited;
  Lock lock = enter();
  if (!lock || (exiting_thread_ && awaited)) {  // no thread would move it while this one sleeps
    const auto status = fork_guard_.in_forked_child() ? RequestStatus::kFailed : RequestStatus::kCancelled;
    request->Operation::status.store(status, std::memory_order_release);
    if (request->on_done_) request->on_done_(status);
    return request;
  }
  request->place_ = pending_.size();
  pending_.push_back(request);
  try {
    post(*request);
    if (awaited) awaited_[peer].fetch_add(1, std::memory_order_relaxed);
  } catch (...) {
    pending_.pop_back();
    throw;
  }
  // What is posted may want the engine to be driven, and so does a failure, which the engine tells of then; once is
  // enough until the thread has looked.
  if (request->status() != RequestStatus::kSucceeded && watched_.exchange(false)) wake_thread();
  settle(std::move(lock));
  return request;
}

void Wire::cancel(const Handle& request) {
  Lock lock = enter();  // also waits for a bell that is just being rung
  if (!lock || request->done()) return;
  engine_->cancel(*request);
  settle(std::move(lock));
}

void Wire::abandon(int rank, const std::string& reason) {
  Lock lock = enter();
  if (!lock) return;
  engine_->abandon(rank, reason);
  if (watched_.exchange(false)) wake_thread();  // the engine has something to end
  settle(std::move(lock));
}

bool Wire::progress() {
  if (fork_guard_.in_forked_child()) return false;
  rounds_.fetch_add(1, std::memory_order_relaxed);
  Lock lock(mutex_, std::try_to_lock);
  if (!lock || !may_use_engine()) return false;
  const bool moved = engine_->progress();
  settle(std::move(lock));
  return moved;
}

void Wire::before_sleep() {
  Lock lock = enter();
  if (!lock) return;
  if (!watch()) {
    rounds_when_watched_.store(rounds_.load(std::memory_order_relaxed));
    wake_thread();
  }
  settle(std::move(lock));
}

void Wire::await_told() {
  if (fork_guard_.in_forked_child()) return;
  Lock lock(mutex_);  // a thread that drives the wire has it until then
}

std::optional<std::string> Wire::lost(int rank) const {
  if (fork_guard_.in_forked_child()) return std::nullopt;
  std::lock_guard lock(lost_mutex_);
  const auto found = lost_.find(rank);
  return found == lost_.end() ? std::nullopt : std::optional(found->second);
}

/// Ends a call: tells those who wait of what is done, unlocks, and tells of lost ranks.
void Wire::settle(Lock lock) {
  // Dropped without the lock: a request may be all that keeps what on_done holds, whose destructors may call
  // the wire.
  std::vector<Handle> done;
  done.reserve(finished_.size());
  for (Request* request : finished_) {
    if (request->awaited_) awaited_[request->peer()].fetch_sub(1, std::memory_order_relaxed);
    done.push_back(std::move(pending_[request->place_]));
    if (pending_.back()) {  // it is another one
      pending_.back()->place_ = request->place_;
      pending_[request->place_] = std::move(pending_.back());
    }
    pending_.pop_back();
  }
  finished_.clear();
  for (const Handle& request : done) {
    if (request->on_done_) request->on_done_(request->status());
  }
  if (!done.empty()) publish_fence();
  for (const Handle& request : done) {
    if (request->bell_ != nullptr) request->bell_->ring();
  }
  const auto losses = std::exchange(untold_, {});
  lock.unlock();
  for (const auto& [rank, reason] : losses) on_peer_lost_(rank, reason);
}

/// Under the lock: moves what can be moved now, and has the engine's next event wake the thread. False if
/// there is no end of it.
bool Wire::watch() {
  constexpr int kMostRounds = 64;  // others want the lock, too
  for (int round = 0; round < kMostRounds; ++round) {
    if (engine_->progress() || !engine_->arm()) continue;
    rounds_when_watched_.store(rounds_.load(std::memory_order_relaxed));
    watched_.store(true);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLONESHOT;
    event.data.fd = engine_->event_fd();
    ::epoll_ctl(poll_fd_.get(), EPOLL_CTL_MOD, event.data.fd, &event);
    return true;
  }
  return false;
}

void Wire::wake_thread() {
  ::eventfd_write(wake_fd_.get(), 1);
}

void Wire::run() {
  while (!stop_.load()) {
    Lock lock = enter();
    if (!lock) return;
    const bool watching = watch();
    settle(std::move(lock));
    if (!watching) continue;
    uint64_t seen = 0;
    int timeout = -1;
    while (!stop_.load()) {
      epoll_event events[2];
      ::epoll_wait(poll_fd_.get(), events, 2, timeout);
      eventfd_t ignored;
      ::eventfd_read(wake_fd_.get(), &ignored);
      const uint64_t since = std::max(seen, rounds_when_watched_.load());
      const uint64_t rounds = rounds_.load(std::memory_order_relaxed);
      if (rounds - since <= kRoundsOfSpinning) break;
      seen = rounds;
      timeout = kStandbyMilliseconds;
    }
  }
}

}  // namespace lockstep::transport::wire
