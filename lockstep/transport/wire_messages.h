#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include <lockstep/transport/host/groups/channel_layout.h>
#include <lockstep/transport/host/groups/message_layout.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport {

/// A message that is too large for a note, on its way between two hosts. MessageChannel's request keeps it.
struct WireTransfer {
  enum class State {
    kOffered,  // no receive has matched yet
    kMoving,
    kDone,
    kRefused,  // by the receiver: see `expected`
    kGivenUp,  // by the sender
    kFailed,   // this process has no memory for it, or the engine none
  };
  const bool is_send;
  const int peer;     // group rank
  const uint64_t id;  // of the sender's, for this receiver
  const MessageKind kind;
  std::byte* data = nullptr;  // the user's
  State state = State::kOffered;
  MessageKind expected = {};               // bytes: kReceiverGaveUp, if that is why
  uint32_t first_number = 0;               // of the chunks' tags
  size_t allowed = 0;                      // sends: chunks for which the receiver is ready
  size_t begun = 0;                        // chunks that were posted
  size_t ended = 0;                        // and are done
  bool has_arrived = false;                // sends: the receiver has all
  std::deque<wire::Handle> requests = {};  // chunks [ended, begun)
  std::unique_ptr<std::byte[]> ring = {};  // receives
};

/// What goes over the wire for the sends and receives of one group: MessageChannel's peers on other hosts.
///
/// Each rank receives in a channel of the wire of its own. From each sender come *notes*, numbered: a header, and
/// after it a message of at most kInlineBytes. The receiver keeps a few receives posted, and a sender has at most
/// 32 messages and offers on their way. A note, once it is sent, stays sent; its bytes are the wire's then.
///
///     sender            receiver
///     offer ──────────►
///            ◄────────── go      a receive has matched; the first chunks' receives are posted
///     chunks ─────────►          are copied out of a ring, whose room …
///            ◄────────── credit  … serves further chunks
///            ◄────────── done
///
/// The receiver may refuse instead of going, or later; the sender may give up: the other one is told. The data go
/// through the ring, for a receive that fails must leave the user's memory alone.
///
/// Not thread-safe: MessageChannel's mutex protects it. Ranks are group ranks.
class WireMessages {
 public:
  struct Members {
    int rank = 0;                            // this one
    std::vector<int> transport_ranks;        // by group rank
    std::vector<int> places;                 // among the members on this host; −1: on another one
    std::vector<uint32_t> channels;          // of the wire, in which each receives
    std::function<bool(int rank)> has_left;  // of one on another host
    std::function<void(int rank)> greet;     // before the first message with it
  };
  struct Arrival {
    int from;
    int64_t tag;
    MessageKind kind;
    const std::byte* payload = nullptr;           // small ones
    std::shared_ptr<WireTransfer> transfer = {};  // the others
  };

  /// `events` are told of all that comes.
  WireMessages(HostTransport& transport, Members members, layout::MessageEvents& events);
  WireMessages(const WireMessages&) = delete;
  WireMessages& operator=(const WireMessages&) = delete;
  /// Transfers in progress must be over: give_up().
  ~WireMessages();

  const Members& members() const { return members_; }
  bool is_remote(int rank) const { return members_.places[rank] < 0; }

  /// From now on take() finds what `peer` sends. May be called again.
  void open(int peer);
  /// Whether a further message for `to` may be sent now.
  bool has_room(int to) const;
  /// At most kInlineBytes.
  void send(int to, int64_t tag, MessageKind kind, const std::byte* data);
  std::shared_ptr<WireTransfer> offer(int to, int64_t tag, MessageKind kind, std::byte* data);

  /// Gives what has come from `peer` to `arrive`, in its order; true if anything has. If `arrive` throws, the message is
  /// given again the next time. Throws c10::DistBackendError when the wire can't receive.
  bool take(int peer, const std::function<void(Arrival&)>& arrive);
  /// A receive has matched.
  void claim(WireTransfer& transfer, std::byte* data);
  void refuse(WireTransfer& transfer, MessageKind expected);
  /// True if anything moved, or `state` changed. Throws std::bad_alloc.
  bool advance(WireTransfer& transfer);
  /// By this rank; `data` is not touched any more. Without `tell` the peer learns it otherwise.
  void give_up(WireTransfer& transfer, bool tell);

  /// Drives the wire once.
  void progress() { transport_.wire().progress(); }
  void before_sleep() { transport_.wire().before_sleep(); }

 private:
  using State = WireTransfer::State;
  static constexpr size_t kStanding = 4;

  struct Header;
  struct Standing {
    std::unique_ptr<std::byte[]> memory;
    wire::Handle request;
  };
  struct Peer {
    bool open = false;
    std::array<Standing, kStanding> standing;  // note n is received by standing[n % kStanding]
    uint32_t notes_taken = 0;
    uint32_t notes_sent = 0;
    uint64_t sent = 0;          // messages and offers
    uint64_t acknowledged = 0;  // of these, as the peer has said
    uint64_t taken = 0;         // the peer's
    uint64_t told_taken = 0;
    uint32_t chunks = 0;                                                             // that were asked for
    std::unordered_map<uint64_t, std::shared_ptr<WireTransfer>> outgoing, incoming;  // that are not over
  };

  void stand(int peer, uint32_t note);
  void note(int to, Header header, const std::byte* payload = nullptr, size_t bytes = 0);
  void handle(int from, const Header& header, const std::byte* payload,
              const std::function<void(Arrival&)>& arrive);
  bool advance_send(WireTransfer& transfer);
  bool advance_receive(WireTransfer& transfer);
  void post_chunk(WireTransfer& transfer);
  /// The oldest chunk's request, if it has succeeded.
  bool chunk_is_done(WireTransfer& transfer);
  void end(WireTransfer& transfer, State state);

  HostTransport& transport_;
  const Members members_;
  layout::MessageEvents& events_;
  std::vector<Peer> peers_;
  int rings_ = 0;
};

}  // namespace lockstep::transport
