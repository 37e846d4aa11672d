#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/transport/control_message.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport {

/// The control messages between this rank and those on other hosts, on the wire's channel 0, and the listeners of those
/// that speak of a group. Thread-safe, but for hear(). The wire goes first, for it tells this how its receives end.
class ControlChannel {
 public:
  /// `ranks`: of the job. Throws c10::DistBackendError without descriptors.
  ControlChannel(wire::Wire& wire, int ranks);
  ControlChannel(const ControlChannel&) = delete;
  ControlChannel& operator=(const ControlChannel&) = delete;

  /// Before the first hear().
  void receive_from(int rank);
  /// Without waiting.
  void send(int rank, const ControlMessage& message);
  /// For poll(2): readable when hear() has something to do.
  int event_fd() const { return event_.get(); }
  /// Gives what has come to `on_message`, in the order of each sender. `on_lost`: nothing more comes from that rank:
  /// its connection is lost, or this process can't receive it (`by_own_fault`). One thread.
  void hear(const std::function<void(int from, const ControlMessage& message)>& on_message,
            const std::function<void(int rank, bool by_own_fault)>& on_lost);
  /// Once this returns, all that had come before was heard.
  void await_heard();

  /// As HostTransport::add_listener() and remove_listener().
  static constexpr uint32_t kChannelsPerGroup = 2;
  uint32_t add_listener(ControlListener& listener);
  void remove_listener(uint32_t number, const std::optional<ControlMessage>& failure_message);
  /// To the listener; a rank that wants to meet a group that was closed here gets its message of failure.
  void pass_on(int from, const ControlMessage& message);

 private:
  struct Peer {
    std::atomic<uint32_t> sent{0};             // messages to it
    uint32_t received{0};                      // from it; the thread that hears
    std::unique_ptr<ControlMessage> incoming;  // the next one
  };

  wire::Wire& wire_;
  std::vector<Peer> peers_;  // by rank

  std::mutex inbox_mutex_;
  std::vector<std::pair<int, wire::RequestStatus>>
      inbox_;                         // ranks, and how the receives into `incoming` have ended
  std::atomic<uint32_t> unheard_{0};  // of these, and of those just being heard
  UniqueFd event_;

  std::mutex listeners_mutex_;
  std::map<uint32_t, ControlListener*> listeners_;
  std::map<uint32_t, ControlMessage> failure_messages_;  // of groups that have failed and were closed
  uint32_t next_number_ = 1;                             // 0: control messages
};

}  // namespace lockstep::transport
