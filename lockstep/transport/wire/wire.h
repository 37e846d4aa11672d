#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/transport/waiting.h>
#include <lockstep/transport/wire/engine.h>

namespace lockstep::transport::wire {

class Request;
using Handle = std::shared_ptr<Request>;

/// Point-to-point messages between this rank and those on other hosts: an engine, driven by the threads that
/// wait for its messages, and by a thread of its own while they sleep or compute. Ranks are the transport's.
///
/// A waiter calls progress() as long as it spins and before_sleep() before it sleeps on the bell of its
/// requests:
///
///     wait_until(bell, policy, deadline, [&] { return request->done() || (wire.progress(), request->done()); },
///                [&] { wire.before_sleep(); });
///
/// While waiters spin the wire's thread stays asleep, so small messages take no switch of threads. A caller
/// that neither spins nor sleeps (it computes, or looks now and then) needs no calls: the thread moves its
/// messages.
///
/// Thread-safe. No thread may be in a call when the wire is destroyed. In a forked child the wire does
/// nothing: requests are done at once, as kFailed. At the end of exit(3), when this library is taken down, all pending
/// requests are cancelled, and from then on requests are done at once, as kCancelled, for all threads but the exiting
/// one, which may still send control messages: UCX is taken down next, and must have no thread in it.
class Wire {
 public:
  /// Runs once the request is done, in the thread that drives the wire, under its lock, also before send() or
  /// receive() have returned: must neither wait, nor throw, nor call the wire.
  using OnDone = std::function<void(RequestStatus)>;
  using OnPeerLost = std::function<void(int rank, const std::string& reason)>;

  /// `on_peer_lost` is called without the wire's lock, in any thread that drives the wire, once for each rank;
  /// the requests with that rank are done by then. Throws c10::DistBackendError without descriptors.
  Wire(std::unique_ptr<Engine> engine, OnPeerLost on_peer_lost);
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;
  /// Cancels what is not done. Waits a second at most until the others have what was sent before.
  ~Wire();

  std::string describe() const;
  std::string address() const;
  void connect(int rank, const std::string& address);

  /// The data must stay until the request is done. `bell`, if any, is rung then, and stays until the request
  /// is over for the wire as well: cancel(), also of a request that is done, returns after that.
  Handle send(int to, Tag tag, const void* data, size_t bytes, Doorbell* bell = nullptr, OnDone on_done = {});
  /// `standing`: for what may come or not; it does not count in awaits().
  Handle receive(int from, Tag tag, void* data, size_t bytes, Doorbell* bell = nullptr, OnDone on_done = {},
                 bool standing = false);
  /// The request is done when this returns, and neither its memory nor its bell are touched any more.
  void cancel(const Handle& request);

  /// Gives a rank up, as if its connection were lost: all requests with it are done when this returns, as kPeerLost, and
  /// their memory is not touched any more.
  void abandon(int rank, const std::string& reason);
  /// As Engine::activity().
  uint32_t activity(int rank) const { return engine_->activity(rank); }
  /// Whether requests with that rank are pending, but for standing receives and control messages (channel 0). One that
  /// is done may count for a moment longer, until await_told() returns.
  bool awaits(int rank) const { return awaited_[rank].load(std::memory_order_relaxed) > 0; }

  /// One round of progress, unless another thread is at it; true if anything has moved. For those who wait,
  /// before they sleep.
  bool progress();
  /// For a waiter that goes to sleep: from now on the wire's thread moves the messages, and rings the bells.
  void before_sleep();
  /// Once this returns, on_done has run for all requests that were done before.
  void await_told();
  /// The engine's reason, where a rank's connection is lost.
  std::optional<std::string> lost(int rank) const;

 private:
  using Lock = std::unique_lock<std::mutex>;
  class Living;

  Lock enter() const;
  bool may_use_engine() const;
  void leave_to_exiting_thread(const Deadline& deadline);
  void cancel_all(Lock lock);
  Handle start(int peer, bool awaited, Doorbell* bell, OnDone on_done,
               const std::function<void(Request&)>& post);
  void settle(Lock lock);
  bool watch();
  void wake_thread();
  void run();

  ForkGuard fork_guard_;
  const OnPeerLost on_peer_lost_;
  UniqueFd wake_fd_;
  UniqueFd poll_fd_;  // epoll: wake_fd_, and the engine's descriptor for one event at a time

  mutable std::mutex mutex_;                       // protects the next five
  std::optional<std::thread::id> exiting_thread_;  // of a process that exits
  std::unique_ptr<Engine> engine_;
  std::vector<Handle> pending_;                      // each knows its place
  std::vector<Request*> finished_;                   // since the last settle()
  std::vector<std::pair<int, std::string>> untold_;  // losses since then
  // By rank: see awaits(). Written under the lock.
  const std::unique_ptr<std::atomic<uint32_t>[]> awaited_ =
      std::make_unique<std::atomic<uint32_t>[]>(Engine::kMaxRanks);
  mutable std::mutex lost_mutex_;
  std::unordered_map<int, std::string> lost_;

  std::atomic<bool> stop_{false};
  // The engine's descriptor is watched, and nothing was posted since that might need another look.
  std::atomic<bool> watched_{false};
  alignas(64) std::atomic<uint64_t> rounds_{0};   // that waiters have driven
  std::atomic<uint64_t> rounds_when_watched_{0};  // or when the engine was left to the thread
  BackgroundThread thread_;
};

/// One send or receive. Its functions are thread-safe and need no lock.
class Request : private Operation {
 public:
  /// Acquire: what a receive has brought is visible.
  bool done() const { return status() != RequestStatus::kPending; }
  RequestStatus status() const { return Operation::status.load(std::memory_order_acquire); }
  int peer() const { return Operation::peer; }
  /// The size of the message, once status() is kSucceeded: that of a receive may have been shorter than its memory.
  size_t bytes() const { return Operation::bytes; }

 private:
  friend class Wire;
  Doorbell* bell_ = nullptr;
  Wire::OnDone on_done_;
  size_t place_ = 0;      // in Wire::pending_
  bool awaited_ = false;  // counts in Wire::awaits()
};

}  // namespace lockstep::transport::wire
