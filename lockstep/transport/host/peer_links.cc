#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/credentials_of.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/ranks.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/rendezvous/store_all_gather.h>
#include <lockstep/transport/host/memory/arena.h>
#include <lockstep/transport/host/peer_links.h>
#include <lockstep/transport/internal/peer_address.h>
#include <lockstep/transport/local_socket.h>

namespace lockstep::transport {

using internal::PeerAddress;
using internal::Token;

namespace {

constexpr uint64_t kHelloMagic = 0x3150455453434b4cULL;  // "LKCSTEP1"

/// The first message on each connection, in both directions, with the sender's segment attached.
struct Hello {
  uint64_t magic = kHelloMagic;
  int32_t rank = -1;
  int32_t unused = 0;
  uint64_t segment_bytes = 0;
  Token token{};  // the receiver's, which only a process that reads the job's store knows
};

/// Every later message, with a segment attached.
struct SegmentNotice {
  uint32_t index = 0;
  uint32_t unused = 0;
  uint64_t bytes = 0;
};

/// All must run as one user, or they may not open each other's memory.
void check_same_user(const std::vector<PeerAddress>& addresses, int rank, const std::vector<bool>& here) {
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    TORCH_CHECK_WITH(DistBackendError, !here[peer] || addresses[peer].uid == addresses[rank].uid, "rank ",
                     rank, " runs as user ", addresses[rank].uid, " and rank ", peer, " as user ",
                     addresses[peer].uid, "; ranks share memory, so all must run as one user");
  }
}

/// All see the same and fail alike, also those whose generation is not known.
void check_same_generation(const std::vector<PeerAddress>& addresses) {
  const auto name = [&](size_t peer) {
    return c10::str("rank ", peer, " (pid ", addresses[peer].process.pid, " on ",
                    addresses[peer].process.host.hostname, ")");
  };
  std::map<uint64_t, size_t> first_of_run;
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    const Generation& generation = addresses[peer].generation;
    if (generation.number == 0) continue;
    const size_t first = first_of_run.emplace(generation.run, peer).first->second;
    const Generation& other = addresses[first].generation;
    TORCH_CHECK_WITH(DistBackendError, !generation.differs_from(other),
                     describe_difference(name(first), other, name(peer), generation));
  }
}

/// Makes the links of one rank; the state of the handshake lives here. All peers' processes are watched,
/// linked or not. A peer that closes its connection may have done so because a third has ended, and the
/// process of one that is killed ends a moment after its sockets: so its end, or what the ranks have
/// decided, is waited for before it is named as the cause.
class Handshake {
 public:
  /// `is_decided`: whether another rank has failed the handshake for all.
  Handshake(int rank, const std::vector<PeerAddress>& addresses, const std::vector<bool>& here,
            const Segment& own, UniqueFd listener, std::function<bool()> is_decided)
      : rank_(rank),
        addresses_(addresses),
        here_(here),
        own_(own),
        listener_(std::move(listener)),
        is_decided_(std::move(is_decided)),
        links_(addresses.size()) {
    for (const PeerAddress& peer : addresses) watches_.emplace_back(peer.process, addresses[rank].process);
  }

  std::vector<PeerLink> run(const Deadline& deadline) {
    for (int peer = 0; peer < rank_; ++peer) {
      if (here_[peer]) connect_to(peer);
    }
    failpoint::here("peers_connected");
    while (!missing().empty() || !ungreeted_.empty()) {
      if (deadline.expired()) fail_missing();
      step(deadline);
    }
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      const bool own = static_cast<int>(peer) == rank_;
      if (!own && here_[peer] && !links_[peer].pidfd) links_[peer].pidfd = watches_[peer].release_pidfd();
    }
    return std::move(links_);
  }

  // For waits after run():
  /// Throws when a process has ended.
  void check_processes() const {
    for (size_t peer = 0; peer < watches_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_) continue;
      TORCH_CHECK_WITH(DistBackendError, !watches_[peer].has_ended(), "rank ", peer, " ",
                       watches_[peer].describe_end());
    }
  }
  /// Also when another rank has failed.
  void look() {
    if (look_.expired()) look_around();
  }

 private:
  static constexpr auto kLookInterval = std::chrono::milliseconds(200);
  static constexpr auto kSendInterval = std::chrono::milliseconds(10);
  /// For the end of a process that has closed its connection, or for the other ranks' word on it.
  static constexpr auto kSuspicion = std::chrono::seconds(2);

  Hello hello_for(int peer) const {
    Hello hello;
    hello.rank = rank_;
    hello.segment_bytes = own_.size();
    hello.token = addresses_[peer].token;
    return hello;
  }

  void connect_to(int peer) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    TORCH_CHECK_WITH(DistBackendError, socket, "a local socket for rank ", peer,
                     " can't be made: ", std::strerror(errno));
    limit_sends(socket.get());  // connect() too, where the peer's queue is full
    if (!connect_local(socket.get(), addresses_[peer].socket_name)) {
      return suspect(peer,
                     c10::str("on this host (user ", addresses_[peer].uid, "), but its socket can't be ",
                              "reached from rank ", rank_, " (user ", ::getuid(), "): ", std::strerror(errno),
                              "; does it run in another container or under another security profile?"));
    }
    check_credentials(socket.get(), peer);
    links_[peer].socket = std::move(socket);
    greet(peer);
    failpoint::here("peer_connected");
  }

  /// Sends the own segment. What can't be sent yet waits for step(), for ranks that all only sent would keep the limit on
  /// descriptors in flight exceeded: it falls as they receive.
  void greet(int peer) {
    const Hello hello = hello_for(peer);
    if (send_with_fd(links_[peer].socket.get(), &hello, sizeof hello, own_.fd())) return;
    const int error = errno;
    if (may_send_later(error)) {
      ungreeted_.push_back(peer);
      return;
    }
    links_[peer].segment.reset();
    if (peer_has_closed(error)) return suspect_closed(peer);
    suspect(peer, c10::str("on this host, but rank ", rank_, " can't send it a descriptor of its memory: ",
                           std::strerror(error), "; does a security profile forbid it, or is memory short?"));
  }

  void greet_the_rest() {
    for (const int peer : std::exchange(ungreeted_, {})) {
      if (links_[peer].socket) greet(peer);
    }
  }

  void check_credentials(int socket, int peer) {
    const ucred credentials = credentials_of(socket);
    TORCH_CHECK_WITH(DistBackendError, credentials.uid == ::geteuid(), "rank ", peer, " runs as user ",
                     credentials.uid, " and rank ", rank_, " as user ", ::geteuid(),
                     "; ranks share memory, so all must run as one user");
    links_[peer].pid = credentials.pid > 0 ? credentials.pid : addresses_[peer].process.pid;
    if (watches_[peer].pidfd() < 0) links_[peer].pidfd = pidfd_of_peer(socket);
  }

  /// Waits for and handles whatever comes next: a connection, the hello of an unknown process or of a higher
  /// rank, a reply, the end of a peer.
  void step(const Deadline& deadline) {
    greet_the_rest();
    std::vector<pollfd> polls{{listener_.get(), POLLIN, 0}};
    for (auto& stranger : strangers_) polls.push_back({stranger.get(), POLLIN, 0});
    std::vector<int> replying;
    for (int peer = 0; peer < rank_; ++peer) {
      if (links_[peer].segment || !links_[peer].socket) continue;
      polls.push_back({links_[peer].socket.get(), POLLIN, 0});
      replying.push_back(peer);
    }
    const size_t before_ends = polls.size();
    for (size_t peer = 0; peer < watches_.size(); ++peer) {
      if (static_cast<int>(peer) != rank_)
        polls.push_back({watches_[peer].pidfd(), POLLIN, 0});  // -1: ignored
    }
    check_interrupts();
    ::poll(polls.data(), polls.size(),
           deadline.poll_milliseconds(ungreeted_.empty() ? kLookInterval : kSendInterval));
    const bool ended = std::any_of(polls.begin() + static_cast<std::ptrdiff_t>(before_ends), polls.end(),
                                   [](const pollfd& end) { return end.revents != 0; });
    if (ended || look_.expired()) look_around();
    const size_t stranger_count = strangers_.size();
    for (size_t i = 0; i < replying.size(); ++i) {
      if (polls[1 + stranger_count + i].revents != 0) receive_reply(replying[i]);
    }
    for (size_t i = 0; i < stranger_count; ++i) {
      if (polls[1 + i].revents != 0) receive_hello(strangers_[i]);
    }
    std::erase_if(strangers_, [](const UniqueFd& socket) { return !socket; });
    if (polls[0].revents != 0) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      // A connection that was given up meanwhile is no fault; one that there is no room for stays in the
      // queue.
      TORCH_CHECK_WITH(DistBackendError, socket || (errno != EMFILE && errno != ENFILE), no_descriptor_left(),
                       "so it can't take the connections of its peers");
      // Any process of this network namespace can connect; one of another user is not listened to.
      if (socket && credentials_of(socket.get()).uid == ::geteuid()) {
        limit_sends(socket.get());
        strangers_.push_back(std::move(socket));
      }
    }
  }

  /// Throws when a process has ended or another rank has failed. No peer ends in good order before all are
  /// linked.
  void look_around() {
    look_ = Deadline::after(kLookInterval);
    check_processes();
    TORCH_CHECK_WITH(DistBackendError, !is_decided_(), "another rank failed; its own error says more");
    TORCH_CHECK_WITH(DistBackendError, !suspicion_.expired(), suspected_);
  }

  /// What is wrong with a peer, unless it turns out to have ended.
  void suspect(int peer, const std::string& what) {
    links_[peer].socket.reset();
    if (!suspected_.empty()) return;
    suspected_ = c10::str("rank ", peer, " (pid ", addresses_[peer].process.pid, ") is ", what);
    suspicion_ = Deadline::after(kSuspicion);
  }
  void suspect_closed(int peer) {
    suspect(peer, c10::str("gone, or has refused the connection of rank ", rank_,
                           "; what it printed last may say why"));
  }

  void receive_reply(int peer) {
    Hello hello;
    UniqueFd fd = receive_with_fd(links_[peer].socket.get(), &hello, sizeof hello);
    if (!fd || !is_for_me(hello) || hello.rank != peer) return suspect_closed(peer);
    links_[peer].segment = Segment::map(std::move(fd), hello.segment_bytes);
  }

  void receive_hello(UniqueFd& socket) {
    Hello hello;
    UniqueFd fd = receive_with_fd(socket.get(), &hello, sizeof hello);
    const bool expected = fd && is_for_me(hello) && hello.rank > rank_ &&
                          hello.rank < static_cast<int>(links_.size()) && here_[hello.rank] &&
                          !links_[hello.rank].segment;
    if (!expected) {
      LOCKSTEP_LOG(kWarning) << "a process that is not of this job, or has ended, connected to rank " << rank_
                             << "; refused";
      socket.reset();
      return;
    }
    failpoint::here("hello_received");
    PeerLink& link = links_[hello.rank];
    check_credentials(socket.get(), hello.rank);
    link.segment = Segment::map(std::move(fd), hello.segment_bytes);
    link.socket = std::move(socket);
    greet(hello.rank);
    failpoint::here("peer_accepted");
  }

  bool is_for_me(const Hello& hello) const {
    return hello.magic == kHelloMagic && hello.token == addresses_[rank_].token;
  }

  std::vector<int> missing() const {
    std::vector<int> missing;
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (here_[peer] && static_cast<int>(peer) != rank_ && !links_[peer].segment)
        missing.push_back(static_cast<int>(peer));
    }
    return missing;
  }

  [[noreturn]] void fail_missing() {
    look_around();
    TORCH_CHECK_WITH(DistBackendError, suspected_.empty(), suspected_);
    if (!ungreeted_.empty()) {
      LOCKSTEP_THROW_TIMEOUT("rank " + std::to_string(rank_) +
                             " could not send a descriptor of its memory to ranks " +
                             format_ranks(ungreeted_) + " by the timeout: " + too_many_in_flight());
    }
    std::string stops;
    for (const int peer : missing()) {
      const std::string stop = watches_[peer].describe_stop();
      if (!stop.empty()) stops += c10::str("; rank ", peer, " ", stop);
    }
    LOCKSTEP_THROW_TIMEOUT("rank " + std::to_string(rank_) + " has no shared memory with ranks " +
                           format_ranks(missing()) +
                           " at the timeout: they joined, but then did not connect; are they stopped, or is "
                           "ulimit -n too low for the descriptors in flight?" +
                           stops);
  }

  const int rank_;
  const std::vector<PeerAddress>& addresses_;
  const std::vector<bool>& here_;
  const Segment& own_;
  UniqueFd listener_;
  std::function<bool()> is_decided_;
  std::vector<UniqueFd> strangers_;  // accepted, not yet known
  std::vector<PeerLink> links_;
  std::vector<int> ungreeted_;         // connected, but the own segment could not be sent yet
  std::vector<ProcessWatch> watches_;  // by rank, the own one too
  Deadline look_ = Deadline::after(kLookInterval);
  std::string suspected_;  // empty: no peer is
  Deadline suspicion_ = Deadline::never();
};

}  // namespace

std::vector<PeerLink> connect_peers(c10d::Store& store, int rank, int world_size, const Segment& own,
                                    const Deadline& deadline, const std::string& met_at,
                                    const OtherHosts& others) {
  if (world_size == 1) return std::vector<PeerLink>(1);
  PeerAddress mine;
  mine.process = this_process();
  mine.uid = ::geteuid();
  mine.token = random_bytes<16>();
  mine.generation = Generation::read(environment::text);
  mine.socket_name = "lockstep-" + to_hex(random_bytes<12>());
  UniqueFd listener = listen_local(mine.socket_name, world_size);

  const std::string key = "lockstep/host";
  // The wire's address, of any bytes, follows this one.
  const bool spans_hosts = !others.host_of.empty();
  std::string own_text = mine.to_string();
  if (spans_hosts) {
    try {
      own_text += '\n' + others.make_address();
    } catch (const c10::Error& error) {
      fail_store_all_gather(
          store, key, rank, world_size,
          c10::str("joining the job failed on rank ", rank, ": ", error.what_without_backtrace()),
          /*late=*/false, met_at);
    }
  }
  const auto texts = store_all_gather(store, key, rank, world_size, own_text, deadline, {}, met_at);
  std::vector<PeerAddress> addresses;
  for (const auto& text : texts) {
    addresses.push_back(PeerAddress::parse(spans_hosts ? text.substr(0, text.find('\n')) : text));
  }
  std::vector<bool> here(world_size, true);
  for (int peer = 0; spans_hosts && peer < world_size; ++peer)
    here[peer] = others.host_of[peer] == others.host_of[rank];
  try {
    check_same_generation(addresses);
    check_same_user(addresses, rank, here);
  } catch (const c10::Error&) {
    keep_store_until_seen(store, key, rank,
                          world_size);  // all ranks see the same and fail, but must first have read it
    throw;
  }

  // The second exchange: that all are linked. A rank that fails on the way says so there, and its peers throw
  // what it has found, not that it is gone.
  const std::string linked = "lockstep/linked";
  const auto give_up = [&](const c10::Error& error, bool late) {
    fail_store_all_gather(
        store, linked, rank, world_size,
        c10::str("joining the job failed on rank ", rank, ": ", error.what_without_backtrace()), late, key);
  };
  bool store_is_lost = false;
  const auto is_decided = [&] {
    try {
      return !store_is_lost && store_all_gather_is_decided(store, linked, rank, world_size);
    } catch (const c10::Error&) {
      store_is_lost = true;  // the processes are watched all the same
      return false;
    }
  };
  std::optional<Handshake> handshake;
  std::vector<PeerLink> links;
  try {
    handshake.emplace(rank, addresses, here, own, std::move(listener), is_decided);
    links = handshake->run(deadline);
    for (int peer = 0; peer < world_size; ++peer) {
      if (here[peer]) continue;
      links[peer].pid = addresses[peer].process.pid;
      links[peer].wire_address = texts[peer].substr(std::min(texts[peer].size(), texts[peer].find('\n') + 1));
    }
    if (others.meet) others.meet(links, [&] { handshake->look(); });
  } catch (const DistTimeoutError& error) {
    give_up(error, /*late=*/true);
  } catch (const c10::Error& error) {
    give_up(error, /*late=*/false);
  } catch (...) {  // an interruption, or no memory: the caller's, once the others know
    const std::exception_ptr own = std::current_exception();
    try {
      fail_store_all_gather(store, linked, rank, world_size,
                            c10::str("joining the job failed on rank ", rank, ": ", text_of(own)),
                            /*late=*/false, key);
    } catch (const c10::Error&) {
    }
    std::rethrow_exception(own);
  }
  // The watch over processes sees those of this host alone; the wire, those that it has met on others.
  std::function<void()> look;
  if (others.look) {
    look = [&] {
      try {
        handshake->check_processes();
        others.look();
      } catch (const c10::Error& error) {
        C10_THROW_ERROR(DistBackendError, c10::str("joining the job failed on rank ", rank, ": ",
                                                   error.what_without_backtrace()));
      }
    };
  }
  store_all_gather(store, linked, rank, world_size, "", deadline, look, key);
  return links;
}

bool send_segment(const PeerLink& link, uint32_t index, const Segment& segment) {
  if (const int error = failpoint::fails_with("send_segment"); error != 0) {
    errno = error;
    return false;
  }
  SegmentNotice notice;
  notice.index = index;
  notice.bytes = segment.size();
  return send_with_fd(link.socket.get(), &notice, sizeof notice, segment.fd(), MSG_DONTWAIT);
}

std::optional<ReceivedSegment> receive_segment(const PeerLink& link, bool& open) {
  SegmentNotice notice;
  try {
    errno = 0;
    UniqueFd fd = receive_with_fd(link.socket.get(), &notice, sizeof notice, MSG_DONTWAIT);
    if (!fd) {
      open = errno == EAGAIN;
      return std::nullopt;
    }
    TORCH_CHECK_WITH(DistBackendError, notice.index < Arena::kMaxSegments,
                     "a peer sent a segment with number ", notice.index, ", which no arena has");
    return ReceivedSegment{notice.index, Segment::map(std::move(fd), notice.bytes)};
  } catch (...) {
    return ReceivedSegment{notice.index, nullptr, text_of(std::current_exception())};
  }
}

}  // namespace lockstep::transport
