#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace lockstep::transport::wire {

/// What matches a send to a receive, beside the two ranks. Channels are the streams of a job: one for control,
/// some for each group.
struct Tag {
  static constexpr uint32_t kMaxChannel = (uint32_t{1} << 20) - 2;  // the next one is the engines' own
  uint32_t channel = 0;
  uint32_t number = 0;
};

enum class RequestStatus : uint8_t {
  kPending,
  kSucceeded,
  kCancelled,
  kPeerLost,  // the connection to the peer has ended
  kFailed,    // this process is the cause: memory, descriptors, a message longer than its receive
};

/// One send or receive as an engine sees it. The caller keeps it and the memory until its status is no longer
/// kPending.
struct Operation {
  std::atomic<RequestStatus> status{RequestStatus::kPending};  // stored last (release)
  int peer = -1;
  size_t bytes = 0;             // of the message, once it has succeeded
  void* engine_data = nullptr;  // the engine's own
};

/// Moves bytes between one rank and the ranks of other hosts. Messages of one pair of ranks match by their
/// tags, in any order; a receive takes a message of at most its own size. A send needs no receive to succeed,
/// but may wait for it. One thread at a time: Wire sees to that.
///
/// Destruction cancels what is not done, waits a second at most until the other ranks have what was sent
/// before, and ends the connections; the other ranks then lose this one.
class Engine {
 public:
  static constexpr int kMaxRanks = 4096;

  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  virtual ~Engine() = default;
  /// "UCX 1.13.1 (tcp/eth0, at 10.0.0.1:20003)"
  virtual std::string describe() const = 0;
  /// For connect() of the other ranks; any bytes.
  virtual std::string address() const = 0;
  /// Makes `rank` known, before anything is sent to it or received from it; the connection itself comes with
  /// the first message. Throws c10::DistBackendError.
  virtual void connect(int rank, const std::string& address) = 0;
  /// Starts a message. It may be done when this returns. The operation is new, with its peer set.
  virtual void send(Operation& operation, Tag tag, const void* data, size_t bytes) = 0;
  virtual void receive(Operation& operation, Tag tag, void* data, size_t bytes) = 0;
  /// The operation is done when this returns, one way or the other; its memory is not touched any more. What
  /// a cancelled send has to say may arrive all the same, and then as it was when it was cancelled.
  virtual void cancel(Operation& operation) = 0;
  /// Gives a rank up, as if its connection were lost: on_peer_lost is told this reason. Nothing if it is lost already.
  /// That rank may not notice before this engine ends: UCX keeps a connection that the other end has sent over.
  virtual void abandon(int rank, const std::string& reason) = 0;
  /// Moves what can be moved now; true if anything has.
  virtual bool progress() = 0;
  /// Asks for event_fd() to become readable with the next event. False: call progress() again first.
  virtual bool arm() = 0;
  /// For poll(2), level-triggered.
  virtual int event_fd() const = 0;

  /// Changes whenever bytes from that rank have come into a receive, or data for it have left: not so for control
  /// messages (channel 0), which fit into buffers that need no rank at the other end. From any thread.
  uint32_t activity(int rank) const { return activity_[rank].load(std::memory_order_relaxed); }

  // Told from within the functions above; must not call the engine.
  /// Once for each operation, after its status was stored.
  std::function<void(Operation& operation)> on_done;
  /// Within progress() or abandon(), once for each rank whose connection is lost, with the reason in the engine's words.
  /// All operations with that rank are done by then, as kPeerLost; so is each that is started later, but for
  /// receives of what had arrived before. A rank is noticed to be lost once something was sent to it or
  /// received from it.
  std::function<void(int rank, const std::string& reason)> on_peer_lost;

 protected:
  /// One thread at a time, as all that changes the engine.
  void note_activity(int rank) {
    activity_[rank].store(activity_[rank].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void finish(Operation& operation, RequestStatus status, size_t bytes = 0) {
    operation.bytes = bytes;
    operation.status.store(status, std::memory_order_release);
    if (on_done) on_done(operation);
  }

 private:
  const std::unique_ptr<std::atomic<uint32_t>[]> activity_ =
      std::make_unique<std::atomic<uint32_t>[]>(kMaxRanks);
};

}  // namespace lockstep::transport::wire
