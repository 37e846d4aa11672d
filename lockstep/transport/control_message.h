#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::transport {

/// What ranks of different hosts tell each other beside the data, on the wire's channel 0. Small, so that a
/// rank keeps a receive for one from each other rank; what lies after the text is not sent.
struct ControlMessage {
  enum class Kind : uint32_t {
    kFailure,      // a group has failed
    kLeave,        // the sender takes no further part in a group
    kMeet,         // the sender has messages with this rank, and wants to hear what happens to a group
    kLeaveJob,     // the sender ends in good order, or (number 1) has given the receiver up
    kEndOfFellow,  // how another rank of the sender's host has ended
    kAskForCause,  // which rank keeps the receiver waiting?
    kCause,        // the answer
    kHeartbeat,    // number 1: answer me; 0: the answer
    kAskForState,  // how is that rank of the receiver's host?
    kState,        // the answer, of one that has not ended
    kPhases        // how long the steps of a rank of the sender's host take
  };

  Kind kind = Kind::kFailure;
  uint32_t group = 0;  // by the receiver's number for it: see HostTransport::add_listener()
  // kFailure: of the operation; 0: whichever is in progress. kLeave: the first without the sender; 0: not known. kCause, and
  // the answer of kHeartbeat: HostTransport::action_of() that rank, or the sender
  uint64_t sequence = 0;
  uint32_t failure = 0;  // FailureKind
  int32_t rank = -1;     // kFailure: the cause; the others: which one. Of the transport
  // kMeet: the sender's number for the group; kCause, kState: 1 if that rank is stopped, and HostTransport::in_action() as text
  uint32_t number = 0;
  std::array<char, 512> text{};  // ends with 0

  size_t bytes() const { return offsetof(ControlMessage, text) + get_text().size() + 1; }
  void set_text(std::string_view whole) { whole.copy(text.data(), text.size() - 1); }
  /// Also of a text without the 0 at its end.
  std::string get_text() const {
    const std::string_view whole(text.data(), text.size());
    return std::string(whole.substr(0, whole.find('\0')));
  }
};

/// Is told what other hosts say of one group.
class ControlListener {
 public:
  virtual ~ControlListener() = default;
  /// `from`: a rank of the transport. Runs in the transport's monitor thread: must not wait.
  virtual void on_control(int from, const ControlMessage& message) = 0;
};

}  // namespace lockstep::transport
