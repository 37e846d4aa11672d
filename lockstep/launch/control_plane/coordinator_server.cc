#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <netinet/in.h>
#include <optional>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/text/printable.h>
#include <lockstep/launch/control_plane/coordinator_server.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/greeting.h>
#include <lockstep/launch/control_plane/plain_connection.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::launch {

/// A connection that was accepted. Its first message says whether it is an agent's, or a stream. A stream becomes a Forwarding,
/// and so does the connection of a worker that uses no tunnel.
class CoordinatorServer::Peer : public EventHandler {
 public:
  enum class Phase {
    kUnknown,  // has not said what it is for
    kAgent,
    kRefused,  // an agent's that is told to end: that closes the connection, or the end of its time does
    kStream,
    kPlain,  // of a worker that uses no tunnel
    kClosed,
  };

  Peer(CoordinatorServer& server, UniqueFd socket, BootTime now)
      : server_(server),
        from_(peer_address_of(socket.get())),
        greeting_until_(now + server.options_.greeting_time) {
    if (server.options_.open_port == 0) {
      speak_tls(std::move(socket));
      watch();
    } else {
      plain_ = std::move(socket);
      server_.loop_.watch(plain_.get(), POLLIN, *this);
    }
  }
  ~Peer() override { close(); }

  Phase phase() const { return phase_; }
  BootTime greeting_until() const { return greeting_until_; }
  const AgentId& agent() const { return *agent_; }
  bool knows_agent() const { return agent_.has_value(); }

  void on_events(int fd, short) override {
    if (plain_ && !begins_as_tls()) return;
    tls_->advance_handshake();
    std::array<char, 16384> buffer;
    for (size_t got = 0; phase_ != Phase::kStream && (got = tls_->read(buffer)) > 0;) {
      frames_.append({buffer.data(), got});
      take_messages();
    }
    if (phase_ == Phase::kStream) return;  // the server makes a Forwarding of it
    flush();
    after_use(fd);
  }

  void send_order() {
    order_due_ = true;
    if (phase_ != Phase::kAgent) return;
    const int fd = tls_->fd();
    flush();
    after_use(fd);
  }

  /// Sends the report of that agent. It takes the place of one that has not been sent yet.
  void send_report(const AgentId& agent, const std::string& message) {
    reports_due_[agent] = message;
    if (phase_ != Phase::kAgent) return;
    const int fd = tls_->fd();
    flush();
    after_use(fd);
  }

  void close() {
    if (phase_ == Phase::kClosed) return;
    enter(Phase::kClosed);
    if (plain_) server_.loop_.forget(plain_.get());
    plain_.reset();
    if (!tls_) return;
    if (tls_->fd() >= 0) server_.loop_.forget(tls_->fd());
    tls_->close();
  }

  /// For a stream: the connection, and what came after the greeting.
  std::unique_ptr<Connection> take_connection() {
    if (plain_) return std::make_unique<PlainConnection>(std::move(plain_));
    return std::move(tls_);
  }
  std::string take_rest() { return frames_.take_rest(); }
  uint64_t generation() const { return generation_; }

 private:
  /// The one place where the phase changes.
  void enter(Phase next) {
    const bool refuses = phase_ == Phase::kAgent && next == Phase::kRefused;
    TORCH_INTERNAL_ASSERT(phase_ == Phase::kUnknown || refuses || next == Phase::kClosed);
    phase_ = next;
  }
  bool is_agents() const { return phase_ == Phase::kAgent || phase_ == Phase::kRefused; }

  void speak_tls(UniqueFd socket) {
    tls_ = std::make_unique<TlsConnection>(server_.key_, std::move(socket), TlsConnection::Side::kServer);
  }

  /// By the first byte, which TLS gives a record of its handshake (RFC 8446, section 5.1), and the store's protocol to no
  /// message. False: it is closed, or a worker's.
  bool begins_as_tls() {
    constexpr char kHandshakeRecord = 0x16;
    char first = 0;
    const ssize_t got = ::recv(plain_.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got == 1 && first == kHandshakeRecord) {
      speak_tls(std::move(plain_));
      return true;
    }
    if (got == 1) {
      enter(Phase::kPlain);
      server_.loop_.forget(plain_.get());
    } else {
      close();
    }
    return false;
  }

  /// Where the connection has closed, its descriptor is forgotten at once: the next one may get its number.
  void after_use(int fd) {
    if (tls_->phase() != TlsConnection::Phase::kClosed) return watch();
    if (phase_ == Phase::kUnknown && tls_->disagreed()) {
      // What the other end says of its version is its own text, so it makes no line that is another one.
      server_.say_once("a connection from " + from_ + " has failed in the TLS handshake; " + why_refused(),
                       from_ + (tls_->other_version().empty() ? " handshake" : " version"));
    }
    server_.loop_.forget(fd);
    enter(Phase::kClosed);
  }
  std::string why_refused() const {
    if (tls_->other_version().empty()) {
      return "if that is a host of this job, do both have the same secret, --rdzv-id and version of "
             "Lockstep?";
    }
    return "it says that it is '" + printable(tls_->other_version()) + "', and this coordinator is '" +
           own_version() + "'; install the same Lockstep on all hosts";
  }
  void watch() { server_.loop_.watch(tls_->fd(), tls_->events(!out_.empty()), *this); }

  void take_messages() {
    while (phase_ == Phase::kUnknown || is_agents()) {
      const auto message = frames_.next();
      if (!message) break;
      if (phase_ == Phase::kUnknown) {
        take_greeting(*message);
      } else if (!in_rate()) {
        reject();
      } else if (const auto report = agent_ ? decode_report(*message) : std::nullopt) {
        // A connection is one agent's for ever.
        if (report->agent != *agent_) return reject();
        server_.reports_[*agent_] = *message;
      } else {
        take_status(*message);
      }
    }
    if (frames_.broken() && phase_ != Phase::kStream) reject();
  }

  void take_greeting(const std::string& message) {
    const auto greeting = decode_greeting(message);
    if (!greeting) return reject();
    generation_ = greeting->generation;
    enter(greeting->kind == Greeting::Kind::kAgent ? Phase::kAgent : Phase::kStream);
    if (phase_ == Phase::kAgent) frames_.set_most(kMostReportBytes);
  }

  bool in_rate() {
    const BootTime now = BootClock::now();
    if (now - second_since_ >= std::chrono::seconds(1)) {
      second_since_ = now;
      messages_ = 0;
    }
    return ++messages_ <= kMostStatuses;
  }

  void take_status(const std::string& message) {
    const auto status = decode_status(message);
    // A connection is one agent's for ever.
    const bool in_bounds = status && (!agent_ || *agent_ == status->id);
    if (!in_bounds) return reject();
    if (phase_ == Phase::kRefused) return;
    if (const auto refusal = agent_ ? std::nullopt : server_.coordinator_.refusal_of(*status)) {
      enter(Phase::kRefused);
      out_ = framed(encode(*refusal));
      return;
    }
    if (!server_.coordinator_.receive(*status, BootClock::now())) {
      server_.say_once("there are " + std::to_string(Coordinator::kMostMembers) +
                       " agents, and more are refused");
      return reject();
    }
    agent_ = status->id;
    server_.news_ = true;
    order_due_ = true;
  }

  void reject() {
    if (tls_->phase() != TlsConnection::Phase::kClosed) tls_->close();
  }

  /// At most one order or report is on its way; where the agent is slow, it gets the newest ones next, orders first.
  void flush() {
    if (!is_agents()) return;
    while (true) {
      if (out_.empty() && !order_due_ && !reports_due_.empty()) {
        out_ = framed(reports_due_.begin()->second);
        reports_due_.erase(reports_due_.begin());
      }
      if (out_.empty() && !std::exchange(order_due_, false)) return;
      if (out_.empty()) {
        Order order = server_.coordinator_.order_for(*agent_);
        if (order.command == Command::kRun) order.place.store_port = server_.options_.open_port;
        out_ = framed(encode(order));
      }
      const size_t sent = tls_->write(out_);
      if (sent == 0) return;
      out_.erase(0, sent);
    }
  }

  CoordinatorServer& server_;
  UniqueFd plain_;  // until its protocol is known
  std::unique_ptr<TlsConnection> tls_;
  Phase phase_ = Phase::kUnknown;
  const std::string from_;  // its address
  BootTime greeting_until_;
  FrameReader frames_;
  std::optional<AgentId> agent_;
  uint64_t generation_ = 0;
  std::string out_;
  bool order_due_ = false;  // of one whose agent is known
  BootTime second_since_ = {};
  int messages_ = 0;                            // since then
  std::map<AgentId, std::string> reports_due_;  // encoded
};

CoordinatorServer::CoordinatorServer(EventLoop& loop, TlsKey key, UniqueFd listener, Options options)
    : loop_(loop),
      key_(std::move(key)),
      listener_(loop, std::move(listener), *this),
      options_(std::move(options)),
      coordinator_(options_.membership, options_.job, options_.own, BootClock::now()) {}

CoordinatorServer::~CoordinatorServer() = default;

void CoordinatorServer::on_events(int, short) {
  accept_some(BootClock::now());
}

void CoordinatorServer::accept_some(BootTime now) {
  constexpr int kAtOnce = 32;  // then those that are connected get their turn
  const auto drop_oldest = [this] {
    if (pending_.empty()) return false;
    pending_.pop_front();
    return true;
  };
  for (int i = 0; i < kAtOnce; ++i) {
    UniqueFd socket = listener_.accept(drop_oldest);
    if (!socket) return;
    if (pending_.size() >= options_.most_pending) {
      pending_.pop_front();
      say_once(std::to_string(options_.most_pending) +
               " connections to the coordinator's port have not said what they are for, and the oldest are "
               "closed; does something else connect there?");
    }
    pending_.push_back(std::make_unique<Peer>(*this, std::move(socket), now));
  }
}

BootTime CoordinatorServer::serve(BootTime now) {
  const BootTime accept_at = listener_.serve(now);
  for (auto place = pending_.begin(); place != pending_.end();) {
    const auto connection = place++;
    switch ((*connection)->phase()) {
      case Peer::Phase::kUnknown:
      case Peer::Phase::kRefused:
        if (now >= (*connection)->greeting_until()) pending_.erase(connection);
        break;
      case Peer::Phase::kAgent:
        if ((*connection)->knows_agent()) {
          become_only_connection(**connection);
          agents_.splice(agents_.end(), pending_, connection);
        } else if (now >= (*connection)->greeting_until()) {
          pending_.erase(connection);
        }
        break;
      case Peer::Phase::kStream:
      case Peer::Phase::kPlain:
        begin_stream(**connection);
        pending_.erase(connection);
        break;
      case Peer::Phase::kClosed:
        if ((*connection)->knows_agent()) {
          agents_.splice(agents_.end(), pending_, connection);  // whose end is told below
        } else {
          pending_.erase(connection);
        }
        break;
    }
  }
  for (const auto& [agent, report] : std::exchange(reports_, {})) pass_on(agent, report);
  drop_closed();
  for (const std::string& text : coordinator_.take_reports()) {
    if (options_.report) options_.report(text);
  }
  if (news_ || now >= look_again_at_) decide(now);
  BootTime next = std::min(look_again_at_, accept_at);
  if (!pending_.empty()) next = std::min(next, pending_.front()->greeting_until());
  return next;
}

/// The agent's other connections are former ones, of which it may know more than this host; or this is one itself, whose first
/// status was late.
void CoordinatorServer::become_only_connection(Peer& peer) {
  for (const auto& other : agents_) {
    if (other->agent() != peer.agent()) continue;
    (other->greeting_until() > peer.greeting_until() ? peer : *other).close();
  }
}

void CoordinatorServer::say_once(const std::string& text, const std::string& what) {
  constexpr size_t kMost = 100;  // strangers may come from any number of addresses
  if (options_.report && said_.size() < kMost && said_.insert(what.empty() ? text : what).second)
    options_.report(text);
}

void CoordinatorServer::begin_stream(Peer& peer) {
  const MembershipState& world = coordinator_.world();
  const bool plain = peer.phase() == Peer::Phase::kPlain;
  const size_t most = plain ? kMostOpenStreams : options_.most_streams_of_host * world.hosts.size();
  const bool runs = world.phase == MembershipPhase::kRunning || world.phase == MembershipPhase::kYielding;
  if (!runs || (!plain && peer.generation() != world.generation)) return peer.close();
  if (streams_.size() >= most) {
    say_once("the job's processes have " + std::to_string(most) +
             " connections to the store, and more are refused; do they open new ones again and again?");
    return peer.close();
  }
  SocketAddress store;
  auto& address = reinterpret_cast<sockaddr_in&>(store.storage);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(store_port_);
  store.size = sizeof(address);
  UniqueFd to_store = begin_connect(store);
  if (!to_store) return peer.close();
  streams_.push_back(std::make_unique<Forwarding>(loop_, peer.take_connection(), std::move(to_store),
                                                  std::string(), peer.take_rest()));
}

void CoordinatorServer::drop_closed() {
  for (auto place = agents_.begin(); place != agents_.end();) {
    const auto connection = place++;
    if ((*connection)->phase() != Peer::Phase::kClosed) continue;
    const AgentId agent = (*connection)->agent();
    agents_.erase(connection);
    // It may have made another connection meanwhile.
    const bool again = std::any_of(agents_.begin(), agents_.end(), [&](const auto& other) {
      return other->agent() == agent && other->phase() == Peer::Phase::kAgent;
    });
    if (again) continue;
    coordinator_.disconnected(agent);
    news_ = true;
  }
  std::erase_if(streams_, [](const auto& stream) { return stream->finished(); });
}

void CoordinatorServer::decide(BootTime now) {
  news_ = false;
  for (bool again = true; again && !done_;) {
    const MembershipDecision decision = coordinator_.advance(now);
    look_again_at_ = decision.look_again_at;
    again = decision.action != MembershipDecision::Action::kWait;
    done_ = decision.action == MembershipDecision::Action::kDone;
    // Not before all hosts have stopped: workers need their store to save and end together.
    if (done_ || decision.action == MembershipDecision::Action::kStart) streams_.clear();
    if (decision.action == MembershipDecision::Action::kStart)
      store_port_ = options_.start_store(coordinator_.world().generation);
    if (options_.observe && decision.reason != std::exchange(last_reason_, decision.reason))
      options_.observe(decision);
    const bool watched = coordinator_.watched();
    if (again || decision.asks || watched != std::exchange(watched_, watched)) push_orders();
  }
}

/// To the agents of the hosts that watch.
void CoordinatorServer::pass_on(const AgentId& agent, const std::string& report) {
  const std::vector<Member>& members = coordinator_.members();
  for (const auto& connection : agents_) {
    const bool watches = std::any_of(members.begin(), members.end(), [&](const Member& member) {
      return member.status.id == connection->agent() && member.status.watches;
    });
    if (watches) connection->send_report(agent, report);
  }
}

void CoordinatorServer::push_orders() {
  for (const auto& connection : agents_) connection->send_order();
}

}  // namespace lockstep::launch
