#include <array>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/interrupt.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/roll_call.h>
#include <lockstep/transport/internal/peer_address.h>
#include <lockstep/transport/shared_memory/arena.h>
#include <lockstep/transport/shared_memory/peer_links.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace lockstep::transport {
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

template <size_t N>
std::array<uint8_t, N> random_bytes() {
  std::array<uint8_t, N> bytes{};
  TORCH_CHECK_WITH(DistBackendError, ::getrandom(bytes.data(), N, 0) == static_cast<ssize_t>(N),
                   "getrandom failed: ", std::strerror(errno));
  return bytes;
}

/// An abstract socket's address: a name that begins with a zero byte and needs no file.
std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  TORCH_INTERNAL_ASSERT(name.size() + 1 < sizeof address.sun_path);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

UniqueFd listen_on(const std::string& name, int backlog) {
  UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  auto [address, length] = abstract_address(name);
  TORCH_CHECK_WITH(DistBackendError,
                   listener && ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                       ::listen(listener.get(), backlog) == 0,
                   "a local socket for the peers can't be made: ", std::strerror(errno));
  return listener;
}

bool send_with_fd(int socket, const void* data, size_t bytes, int fd) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes);
}

/// The descriptor that came with a message of exactly `bytes`; none at end of file or for anything else. With
/// MSG_DONTWAIT in `flags` errno is EAGAIN when there is no message.
UniqueFd receive_with_fd(int socket, void* data, size_t bytes, int flags = 0) {
  iovec part{data, bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  // Not the padded size, which has room for a second descriptor: the kernel closes what does not fit.
  message.msg_controllen = CMSG_LEN(sizeof(int));
  ssize_t received = 0;
  do {
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
  } while (received < 0 && errno == EINTR);
  UniqueFd fd;
  if (received <= 0) return fd;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    fd.reset(number);
  }
  if (received != static_cast<ssize_t>(bytes)) fd.reset();
  return fd;
}

UniqueFd open_pidfd(int socket, pid_t pid) {
  int fd = -1;
  socklen_t length = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) return UniqueFd(fd);
  return UniqueFd(pid > 0 ? static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)) : -1);
}

/// All ranks must be on this host; says which are not.
void check_same_host(const std::vector<PeerAddress>& addresses, int rank) {
  const PeerAddress& own = addresses[rank];
  std::vector<int> elsewhere;
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    if (!(addresses[peer].host == own.host)) elsewhere.push_back(static_cast<int>(peer));
  }
  if (elsewhere.empty()) return;
  const PeerAddress& first = addresses[elsewhere.front()];
  const bool same_kernel = first.host.boot_id == own.host.boot_id;
  TORCH_CHECK_WITH(
      DistBackendError, false, "rank ", rank, " is on host ", own.host.to_string(), ", but ",
      name_ranks(elsewhere), " on ", first.host.to_string(),
      same_kernel ? " (the same machine, but another network namespace: two containers?)" : "",
      "; groups across hosts are not supported yet: start all ranks on one host, in one container");
}

/// All must run as one user, or they may not open each other's memory.
void check_same_user(const std::vector<PeerAddress>& addresses, int rank) {
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    TORCH_CHECK_WITH(DistBackendError, addresses[peer].uid == addresses[rank].uid, "rank ", rank,
                     " runs as user ", addresses[rank].uid, " and rank ", peer, " as user ",
                     addresses[peer].uid, "; ranks share memory, so all must run as one user");
  }
}

/// Makes the links of one rank; the state of the handshake lives here.
class Handshake {
 public:
  Handshake(int rank, const std::vector<PeerAddress>& addresses, const Segment& own, UniqueFd listener)
      : rank_(rank),
        addresses_(addresses),
        own_(own),
        listener_(std::move(listener)),
        links_(addresses.size()) {}

  std::vector<PeerLink> run(const Deadline& deadline) {
    for (int peer = 0; peer < rank_; ++peer) connect_to(peer);
    while (missing_count() > 0) {
      if (deadline.expired()) fail_missing();
      step(deadline);
    }
    return std::move(links_);
  }

 private:
  Hello hello_for(int peer) const {
    Hello hello;
    hello.rank = rank_;
    hello.segment_bytes = own_.size();
    hello.token = addresses_[peer].token;
    return hello;
  }

  void connect_to(int peer) {
    UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    auto [address, length] = abstract_address(addresses_[peer].socket_name);
    TORCH_CHECK_WITH(
        DistBackendError,
        socket && ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0, "rank ", peer,
        " (pid ", addresses_[peer].pid, ", user ", addresses_[peer].uid,
        ") is on this host, but its socket can't be reached from rank ", rank_, " (user ", ::getuid(),
        "): ", std::strerror(errno),
        "; has it ended, or does it run in another container or under another security profile?");
    check_credentials(socket.get(), peer);
    const Hello hello = hello_for(peer);
    TORCH_CHECK_WITH(DistBackendError, send_with_fd(socket.get(), &hello, sizeof hello, own_.fd()), "rank ",
                     peer, " closed the connection to rank ", rank_, ": ", std::strerror(errno));
    links_[peer].socket = std::move(socket);
  }

  void check_credentials(int socket, int peer) {
    ucred credentials{};
    socklen_t length = sizeof credentials;
    ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length);
    TORCH_CHECK_WITH(DistBackendError, credentials.uid == ::geteuid(), "rank ", peer, " runs as user ",
                     credentials.uid, " and rank ", rank_, " as user ", ::geteuid(),
                     "; ranks share memory, so all must run as one user");
    // A stopped peer does not read; whoever sends it a segment must not wait for it for ever.
    const timeval patience{10, 0};
    ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    links_[peer].pid = credentials.pid > 0 ? credentials.pid : addresses_[peer].pid;
    links_[peer].pidfd = open_pidfd(socket, credentials.pid);
  }

  /// Waits for and handles whatever comes next: a connection, a stranger's or a higher rank's hello, a reply.
  void step(const Deadline& deadline) {
    std::vector<pollfd> polls{{listener_.get(), POLLIN, 0}};
    for (auto& stranger : strangers_) polls.push_back({stranger.get(), POLLIN, 0});
    std::vector<int> replying;
    for (int peer = 0; peer < rank_; ++peer) {
      if (links_[peer].segment) continue;
      polls.push_back({links_[peer].socket.get(), POLLIN, 0});
      replying.push_back(peer);
    }
    check_interrupts();
    ::poll(polls.data(), polls.size(), deadline.poll_milliseconds(std::chrono::milliseconds(200)));
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
      if (socket) strangers_.push_back(std::move(socket));
    }
  }

  void receive_reply(int peer) {
    Hello hello;
    UniqueFd fd = receive_with_fd(links_[peer].socket.get(), &hello, sizeof hello);
    TORCH_CHECK_WITH(DistBackendError, fd && is_for_me(hello) && hello.rank == peer, "rank ", peer, " (pid ",
                     addresses_[peer].pid, ") ended or refused the connection of rank ", rank_,
                     " while the group was being set up");
    links_[peer].segment = Segment::map(std::move(fd), hello.segment_bytes);
  }

  void receive_hello(UniqueFd& socket) {
    Hello hello;
    UniqueFd fd = receive_with_fd(socket.get(), &hello, sizeof hello);
    const bool expected = fd && is_for_me(hello) && hello.rank > rank_ &&
                          hello.rank < static_cast<int>(links_.size()) && !links_[hello.rank].segment;
    if (!expected) {
      LOCKSTEP_LOG(kWarning) << "a process that is not of this job connected to rank " << rank_
                             << "; refused";
      socket.reset();
      return;
    }
    PeerLink& link = links_[hello.rank];
    check_credentials(socket.get(), hello.rank);
    link.segment = Segment::map(std::move(fd), hello.segment_bytes);
    link.socket = std::move(socket);
    const Hello reply = hello_for(hello.rank);
    TORCH_CHECK_WITH(DistBackendError, send_with_fd(link.socket.get(), &reply, sizeof reply, own_.fd()),
                     "rank ", hello.rank, " closed the connection to rank ", rank_, ": ",
                     std::strerror(errno));
  }

  bool is_for_me(const Hello& hello) const {
    return hello.magic == kHelloMagic && hello.token == addresses_[rank_].token;
  }

  size_t missing_count() const {
    size_t count = 0;
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (static_cast<int>(peer) != rank_ && !links_[peer].segment) ++count;
    }
    return count;
  }

  [[noreturn]] void fail_missing() {
    std::vector<int> missing;
    for (size_t peer = 0; peer < links_.size(); ++peer) {
      if (static_cast<int>(peer) != rank_ && !links_[peer].segment) missing.push_back(static_cast<int>(peer));
    }
    LOCKSTEP_THROW_TIMEOUT("rank " + std::to_string(rank_) + " has no shared memory with ranks " +
                           format_ranks(missing) +
                           " at the timeout: they joined, but then did not connect; are they stopped?");
  }

  const int rank_;
  const std::vector<PeerAddress>& addresses_;
  const Segment& own_;
  UniqueFd listener_;
  std::vector<UniqueFd> strangers_;  // accepted, not yet known
  std::vector<PeerLink> links_;
};

}  // namespace

std::vector<PeerLink> connect_peers(c10d::Store& store, int rank, int world_size, const Segment& own,
                                    const Deadline& deadline) {
  if (world_size == 1) return std::vector<PeerLink>(1);
  PeerAddress mine;
  mine.host = this_host();
  mine.pid = ::getpid();
  mine.uid = ::geteuid();
  mine.token = random_bytes<16>();
  const auto name = random_bytes<12>();
  mine.socket_name = "lockstep-" + to_hex(name.data(), name.size());
  UniqueFd listener = listen_on(mine.socket_name, world_size);

  const std::string key = "lockstep/host";
  std::vector<PeerAddress> addresses;
  for (const auto& text : exchange(store, key, rank, world_size, mine.to_string(), deadline)) {
    addresses.push_back(PeerAddress::parse(text));
  }
  try {
    check_same_host(addresses, rank);
    check_same_user(addresses, rank);
  } catch (const c10::Error&) {
    keep_store_until_seen(store, key, rank,
                          world_size);  // all ranks see the same and fail, but must first have read it
    throw;
  }
  return Handshake(rank, addresses, own, std::move(listener)).run(deadline);
}

bool send_segment(const PeerLink& link, uint32_t index, const Segment& segment) {
  SegmentNotice notice;
  notice.index = index;
  notice.bytes = segment.size();
  return send_with_fd(link.socket.get(), &notice, sizeof notice, segment.fd());
}

std::optional<ReceivedSegment> receive_segment(const PeerLink& link, bool& open) {
  SegmentNotice notice;
  errno = 0;
  UniqueFd fd = receive_with_fd(link.socket.get(), &notice, sizeof notice, MSG_DONTWAIT);
  if (!fd) {
    open = errno == EAGAIN;
    return std::nullopt;
  }
  TORCH_CHECK_WITH(DistBackendError, notice.index < Arena::kMaxSegments, "a peer sent a segment with number ",
                   notice.index, ", which no arena has");
  return ReceivedSegment{notice.index, Segment::map(std::move(fd), notice.bytes)};
}

}  // namespace lockstep::transport
