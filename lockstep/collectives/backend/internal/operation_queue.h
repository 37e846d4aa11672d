#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/collectives/backend/internal/work_record.h>

namespace lockstep::collectives::internal {

class DeviceResults;
class OperationQueue;
struct PlannedOperation;

/// What a body throws when its operation has succeeded, but the caller's wait was interrupted
/// (base/process/interrupt.h).
struct InterruptedAfterSuccess {
  std::exception_ptr interruption;
};

/// How an operation's future gives its outputs: as one list, unless this says otherwise.
struct FutureForm {
  /// In one tensor, as an all_gather's are with NCCL (torch's quantization hooks count on it).
  bool stacked = false;
  /// As this many lists of equal length.
  size_t lists = 1;
};

/// One operation of a group: the handle that users wait on. Thread-safe.
class OperationWork final : public c10d::Work {
 public:
  /// `body` does the operation; its argument says whether it runs on a communication thread. The operation's
  /// outputs are what result() and, in its future_form, the future give.
  OperationWork(std::shared_ptr<OperationQueue> queue, int rank, const char* title,
                const PlannedOperation& operation, std::function<void(bool)> body);

  /// On the device, too.
  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override { wait(); }
  /// Runs or awaits the operation; rethrows its error. Results that are still on their way to a device are
  /// waited for by the calling thread's current stream there, not by the thread. A `timeout` other than
  /// kNoTimeout bounds this wait only and throws DistTimeoutError; the operation goes on. Throws the
  /// Interruption (base/process/interrupt.h) that ended this wait; an operation that this very call was
  /// running fails then, on all ranks.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  /// Made at the first call: most callers only wait.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return number_; }
  float getDuration() const override;

 private:
  friend class OperationQueue;
  /// What interrupted it, if anything did; the operation itself has then failed.
  std::exception_ptr run(bool background);

  std::shared_ptr<OperationQueue> queue_;
  c10::IValue future_value() const;
  void complete(c10::ivalue::Future& future, const std::exception_ptr& error) const;
  /// Completes the future, whose callbacks run then. Neither it nor the error changes any more.
  void tell() const;

  std::vector<at::Tensor> outputs_;
  const FutureForm future_form_;
  const std::shared_ptr<const DeviceResults> device_results_;  // left to a device to finish; may be null
  std::function<void(bool)> body_;
  WorkRecord profiled_;
  std::exception_ptr error_;  // written by the thread that runs the operation, before done_
  // Under the queue's mutex:
  bool done_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  uint64_t number_ = 0;
  std::chrono::steady_clock::duration duration_{};
};

/// A group's operations in strict order of submission.
///
/// A caller that waits runs the queue's head itself, again and again until its own operation is done, so a
/// synchronous call costs no thread. Operations that no thread waits for are run by a communication thread,
/// which the queue borrows while there are such. At most one operation runs at a time. Callbacks of futures
/// run on communication threads, beside the next operations, so they may wait for these. Thread-safe.
class OperationQueue : public std::enable_shared_from_this<OperationQueue> {
 public:
  OperationQueue() = default;
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;
  ~OperationQueue();

  /// Adds an operation; `numbered` is told its number (from 1) before it can run. `asynchronous`: the caller
  /// will go on to other things, so a communication thread takes it unless a thread waits for it first.
  void submit(const c10::intrusive_ptr<OperationWork>& work, bool asynchronous,
              const std::function<void(uint64_t number)>& numbered);
  /// Whether anything submitted is not done yet.
  bool busy() const;
  /// Whether this thread runs, or destroys, the callbacks of one of the queue's futures: stop() would wait
  /// for itself.
  bool is_telling_here() const;
  /// Operations submitted so far.
  uint64_t submitted() const;
  /// Runs or awaits everything submitted so far; errors stay in the works. Throws the Interruption that ended
  /// an operation meanwhile.
  void finish();
  /// The same, without throwing, and gives the communication thread back. Later submissions fail at once. To end
  /// without waiting for peers, abort the channel first.
  void stop();

 private:
  friend class OperationWork;
  /// Returns what interrupted it. `serving`: of the communication thread; false afterwards when another
  /// thread has taken over.
  std::exception_ptr run_head(std::unique_lock<std::mutex>& lock, bool* serving);
  std::exception_ptr run_or_await_all(std::unique_lock<std::mutex>& lock);
  /// Under the lock. False if the queue needs a thread, and the system gives none.
  bool start_thread();
  /// Has the queue run though the caller does not wait for it; without a thread for that in this one. Throws the
  /// Interruption that ended an operation here.
  void run_beside(std::unique_lock<std::mutex>& lock);
  void serve();
  void tell_future(std::unique_lock<std::mutex>& lock, const c10::intrusive_ptr<OperationWork>& work,
                   bool* serving);

  ForkGuard fork_guard_;
  /// No tensor, work, future or exception may go while it is held: their ends may want Python's GIL, whose
  /// holder may want this mutex.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<OperationWork>> queue_;
  // Facts of their own, not one phase: a waiter may run an operation while the communication thread is there, which
  // may be there still when the queue is stopped.
  bool running_ = false;
  bool serving_ = false;  // a communication thread is there to run what comes
  int telling_ = 0;       // threads that run callbacks of futures
  bool stopped_ = false;
  uint64_t submitted_ = 0;
};

}  // namespace lockstep::collectives::internal
