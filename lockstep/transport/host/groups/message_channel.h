#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/host/groups/group_members.h>
#include <lockstep/transport/host/groups/message_layout.h>
#include <lockstep/transport/wire_messages.h>

namespace lockstep::transport {

/// The sender's message is not what the receiver expects. Thrown to the receiver, and to the sender if it
/// still waits.
class MessageMismatch : public ChannelError {
 public:
  MessageMismatch(int peer, MessageKind sent, MessageKind expected)
      : ChannelError(FailureKind::kMismatch, "sent and expected message differ"),
        peer(peer),
        sent(sent),
        expected(expected) {}
  int peer;  // group rank
  MessageKind sent, expected;
};

/// Send and receive between the members of one group. docs/internals/shared_memory_protocol.md, "Messages".
///
/// Small messages travel in the sender's mailbox, one for each receiver; of larger ones only the description
/// does. Once a receive matches, the receiver reads them where they lie, if that is in the sender's arena, or
/// else through a ring of chunks that the sender fills. Messages of one sender with one tag match in order;
/// any number may be in flight, in any order, so nothing waits for anything but its own peer. Members on other
/// hosts are served by WireMessages, with the same promises.
///
/// Requests are advanced by the thread that waits for one; while none does, by a background thread, if
/// advance_in_background() asked for it. Thread-safe. Ranks are group ranks.
class MessageChannel {
 public:
  static constexpr int kAnySource = -1;

  /// Told the error of a request that is done, or null, by whichever thread has advanced it; must not wait.
  using Callback = std::function<void(const std::exception_ptr& error)>;

  /// In the order in which they follow each other; a request that fails may leave the second one out.
  enum class Stage : uint8_t {
    kStarted,  // sends: there was no room in the mailbox yet; receives: no message has matched
    kPosted,   // sends: in the mailbox; receives: matched
    kDone,
  };

  /// A send or receive in progress.
  struct Request {
    const bool is_send;
    std::byte* const data;
    const MessageKind kind;
    const int64_t tag;
    // Under the channel's mutex, but for on_done:
    Deadline deadline;
    std::chrono::nanoseconds timeout;
    Callback on_done;
    int peer;  // of a receive from any source: kAnySource until it has matched
    Stage stage = Stage::kStarted;
    layout::Transfer* transfer = nullptr;  // in the sender's arena, for messages that are not in the mailbox
    std::shared_ptr<WireTransfer> crossing = {};  // the same of a peer on another host
    std::byte* memory = nullptr;                  // of the data or of the ring, as mapped here
    size_t moved = 0;                             // bytes copied so far
    std::exception_ptr error = nullptr;           // of one that is done

    bool done() const { return stage == Stage::kDone; }
    /// The one place where the stage changes, which never goes back.
    void enter(Stage next);
  };
  using Handle = std::shared_ptr<Request>;

  /// Between the members on this host; or, with `members_on_hosts`, between all of a group over hosts.
  explicit MessageChannel(std::shared_ptr<GroupMembers> members,
                          std::optional<WireMessages::Members> members_on_hosts = std::nullopt);
  MessageChannel(const MessageChannel&) = delete;
  MessageChannel& operator=(const MessageChannel&) = delete;
  /// close().
  ~MessageChannel();

  /// Starts sending to `to`; the data must stay until the request is done. `on_done` runs once it is, in
  /// whichever thread advanced it, maybe within this call. Throws ChannelError if the group has failed.
  Handle send(const void* data, MessageKind kind, int to, int64_t tag, const Deadline& deadline,
              Callback on_done = {});
  /// Starts receiving from `from` or kAnySource.
  Handle receive(void* data, MessageKind kind, int from, int64_t tag, const Deadline& deadline,
                 Callback on_done = {});

  /// Has the requests advanced, and the others' callbacks run, even if no thread waits, unless the system gives no
  /// thread for that. A callback that may wait for other messages calls it first.
  void advance_in_background();
  /// Runs it in a thread of its own, if there is one: what may wait, for messages or for the thread that has
  /// advanced them.
  /// close() returns after it.
  void tell_in_background(std::function<void()> tell);
  /// Whether this thread runs such a thing of this channel: close() would wait for itself.
  bool is_telling_here() const;
  /// Returns when the request is done. False if `until` has passed first; the request goes on. Throws what an
  /// interrupt check throws (base/process/interrupt.h); the request goes on then, too.
  bool wait(const Handle& request, const Deadline& until = Deadline::never());
  bool is_done(const Handle& request);
  /// For a request that was started before its result was needed. Nothing if it is done.
  void set_deadline(const Handle& request, const Deadline& deadline);
  /// The error of a request that is done: null, or a ChannelError: the peer ended or left, the request's deadline has
  /// passed, the group failed or was closed; MessageMismatch; or what has kept this rank from moving it, such
  /// as c10::OutOfMemoryError. A send that failed before the peer could receive it is never delivered.
  std::exception_ptr error(const Handle& request);
  /// The sender of what was received.
  int source(const Handle& request);

  /// Ends all requests with an error, and the background thread's work. May be called again.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct Arrived {  // a message that no receive has asked for yet
    int from;
    int64_t tag;
    MessageKind kind;
    std::vector<std::byte> payload;               // small ones …
    const std::byte* inline_data = nullptr;       // … while they are in the mailbox: there
    layout::Transfer* transfer = nullptr;         // the others …
    std::shared_ptr<WireTransfer> crossing = {};  // … and those from other hosts
  };
  struct Peer {
    layout::Mailbox* outgoing = nullptr;  // ours, for it
    layout::Mailbox* incoming = nullptr;  // its, for us
    uint64_t taken = 0;                   // messages taken from `incoming`
    std::exception_ptr unreadable;        // why no more can be taken now, if so; the next receive tries again
    bool full = false;                    // `outgoing` had no room in this round
  };

  Handle start(Handle request);
  // All below under the mutex.
  bool advance();
  bool post(Request& request);
  bool advance_send(Request& request);
  bool fill_ring(Request& request);
  bool advance(Request& request);
  bool take_arrivals();
  void take_all_arrivals();
  bool take_arrivals_from(int from);
  bool take_arrivals_of(int from, Peer& peer);
  bool take_remote_arrivals(int from);
  bool offer(Arrived& arrived);
  bool match(Request& request, Arrived& arrived);
  bool match_transfer(Request& request, Arrived& arrived, bool fits);
  bool advance_receive(Request& request);
  bool advance_crossing(Request& request);
  bool end_hopeless();
  struct Hopeless {
    std::exception_ptr error = nullptr;  // none: it may still succeed
    int culprit = -1;                    // the transport's rank, where one is known
  };
  /// `stopped_member`: stopped_cause(), once it has been asked.
  Hopeless why_hopeless(const Request& request, std::optional<int>& stopped_member) const;
  Hopeless gone(const Request& request, int peer) const;
  ChannelError gone_error(int peer) const;
  /// Why a message failed that its peer had begun to move.
  ChannelError peer_gave_up(const Request& request, const char* doing) const;
  /// `senders`: of a receive from any rank, those that may still send. `cause`: the rank that the request's
  /// peer waits for, the peer itself, or −1; `stopped`: the same rank, or another one, or −1. Both are ranks
  /// of the transport.
  ChannelError timeout_error(const Request& request, const std::vector<int>& senders, int cause,
                             int stopped) const;
  /// The transport's rank that is stopped and is a member, or keeps members waiting; or −1.
  int stopped_cause() const;
  void give_up(Request& request, const std::exception_ptr& error);
  void finish(Request& request, std::exception_ptr error = nullptr);
  void release_transfer(Request& request);
  void remove_done();
  void run_callbacks(Lock& lock);
  void drive(Lock& lock, const Request* request, const Deadline& until);
  std::vector<int> awaited_peers() const;
  void sleep(Lock& lock, const Deadline& until, const Request* request, int64_t began_ns);
  void serve();
  bool busy() const { return !requests_.empty(); }
  uint64_t events() const;

  // What is known of group ranks. `members_` knows those on this host, by their places.
  bool is_remote(int rank) const { return wire_ && wire_->is_remote(rank); }
  int place_of(int rank) const { return wire_ ? wire_->members().places[rank] : rank; }
  int transport_rank(int rank) const {
    return wire_ ? wire_->members().transport_ranks[rank] : members_->transport_rank(rank);
  }
  bool has_left(int rank) const;
  bool has_ended(int rank) const { return members_->transport().has_ended(transport_rank(rank)); }
  std::string describe(const std::vector<int>& ranks) const;
  /// Has a peer on this host look for what has changed.
  void notify(int rank) const { members_->block(place_of(rank)).messages.notify(); }
  layout::MessageEvents& own_events() const { return members_->block(members_->rank()).messages; }

  std::shared_ptr<GroupMembers> members_;
  std::unique_ptr<WireMessages> wire_;  // null on one host
  const int rank_;
  WaitPolicy foreground_policy_;
  WaitPolicy background_policy_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::list<Handle> requests_;             // in progress, in the order in which they were started
  std::list<Arrived> arrived_;             // in the order in which they came
  std::vector<Handle> finished_;           // whose on_done is still to be called
  std::list<layout::Transfer*> given_up_;  // until the receiver has dropped them
  int rings_ = 0;
  uint64_t seen_events_ = 0;
  // Facts of their own, not one phase: a waiter may drive while the background thread is there, and both may be there
  // still when the channel is closed.
  bool driving_ = false;  // a thread advances the requests
  int waiters_ = 0;
  bool serving_ = false;  // the background thread is there
  int telling_ = 0;       // threads of tell_in_background()
  bool closed_ = false;
};

}  // namespace lockstep::transport
