#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <utility>

#include <lockstep/launch/control_plane/agent_link.h>
#include <lockstep/launch/control_plane/greeting.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::launch {

AgentLink::AgentLink(EventLoop& loop, TlsKey key, std::vector<SocketAddress> addresses,
                     const MembershipOptions& options, AgentState& state)
    : loop_(loop), key_(std::move(key)), addresses_(std::move(addresses)), options_(options), state_(state) {}

AgentLink::~AgentLink() {
  close("");
}

void AgentLink::look_up(BootTime now) {
  if (!lookup_ || answered_) return;
  if (auto found = lookup_->take()) {
    addresses_ = *std::move(found);
    attempt_ = 0;
  } else if (attempt_ > 0 && attempt_ % addresses_.size() == 0 && now >= look_up_at_) {
    look_up_at_ = now + kBetweenLookups;
    lookup_->begin();
  }
}

void AgentLink::connect(BootTime now) {
  look_up(now);
  heard_at_ = now;
  connect_at_ = now + kPause;
  socket_ = begin_connect(coordinator());
  if (!socket_) return close(std::strerror(errno));
  phase_ = Phase::kConnecting;
  loop_.watch(socket_.get(), POLLOUT, *this);
}

/// The one place where a connection ends.
void AgentLink::close(const std::string& why, const std::string& question) {
  if (socket_) loop_.forget(socket_.get());
  if (tls_ && tls_->fd() >= 0) loop_.forget(tls_->fd());
  socket_.reset();
  tls_.reset();
  frames_ = FrameReader(kMostReportBytes);
  out_.clear();
  phase_ = Phase::kNone;
  if (why.empty()) return;
  trouble_ = why + " at " + coordinator().text() + " port " + std::to_string(coordinator().port()) + question;
  if (!answered_) ++attempt_;
}

void AgentLink::on_events(int fd, short) {
  if (phase_ == Phase::kConnecting) {
    int error = 0;
    socklen_t size = sizeof(error);
    if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error == ECONNREFUSED) state_.refused(BootClock::now());
    if (error == ECONNREFUSED && coordinator().is_loopback())
      return close(std::strerror(error),
                   ", which is this host itself; where another one coordinates give --master-addr, or "
                   "--rdzv-endpoint");
    if (error != 0) return close(std::strerror(error));
    local_address_ = local_address_of(fd);
    tls_ = std::make_unique<TlsConnection>(key_, std::move(socket_), TlsConnection::Side::kClient);
    phase_ = Phase::kHandshake;
  }
  if (phase_ == Phase::kHandshake) {
    tls_->advance_handshake();
    if (tls_->phase() == TlsConnection::Phase::kOpen) {
      phase_ = Phase::kOpen;
      out_ = framed(encode(Greeting{.kind = Greeting::Kind::kAgent}));
      status_due_ = true;
    }
  }
  const bool was_open = phase_ == Phase::kOpen;
  if (was_open) {
    take_orders();
    flush();
  }
  if (tls_->phase() == TlsConnection::Phase::kClosed) {
    loop_.forget(fd);
    if (was_open) return close("the coordinator closed the connection");
    if (!tls_->disagreed())
      return close("the connection was closed before the TLS handshake had ended",
                   ": does something else than a coordinator listen there?");
    return close("the TLS handshake failed",
                 ": do both sides have the same secret, --rdzv-id and version of Lockstep? This one is " +
                     own_version());
  }
  loop_.watch(fd, tls_->events(!out_.empty()), *this);
}

void AgentLink::take_orders() {
  std::array<char, 16384> buffer;
  for (size_t got = 0; (got = tls_->read(buffer)) > 0;) {
    frames_.append({buffer.data(), got});
    while (const auto message = frames_.next()) {
      if (const auto report = decode_report(*message)) {
        if (listener_) listener_(*report);
        continue;
      }
      const auto order = decode_order(*message);
      if (!order) return tls_->close();
      heard_at_ = BootClock::now();
      trouble_.clear();
      answered_ = true;
      state_.receive(*order, heard_at_);
    }
    if (frames_.broken()) return tls_->close();
  }
}

void AgentLink::send_report(const std::string& text) {
  std::string message = encode(Report{.agent = state_.id(), .text = text});
  if (message.size() <= kMostReportBytes) report_due_ = std::move(message);
}

void AgentLink::flush() {
  while (!out_.empty() || status_due_ || !report_due_.empty()) {
    if (out_.empty() && !status_due_) {
      out_ = framed(std::exchange(report_due_, {}));
    } else if (out_.empty()) {
      const BootTime now = BootClock::now();
      status_due_ = false;
      heartbeat_at_ = now + options_.heartbeat_interval;
      out_ = framed(encode(state_.status(now)));
    }
    const size_t sent = tls_->write(out_);
    if (sent == 0) return;
    out_.erase(0, sent);
  }
}

BootTime AgentLink::serve(BootTime now, bool news) {
  if (phase_ != Phase::kNone && now - heard_at_ >= longest_silence()) {
    close(phase_ == Phase::kConnecting ? "no answer to a connection" : "no word on the connection");
  }
  if (phase_ == Phase::kNone && now >= connect_at_) connect(now);
  if (phase_ == Phase::kOpen) {
    status_due_ = status_due_ || news || state_.take_question() || now >= heartbeat_at_;
    const int fd = tls_->fd();
    flush();
    if (tls_->phase() == TlsConnection::Phase::kClosed) {
      loop_.forget(fd);
      close("the coordinator closed the connection");
    } else {
      loop_.watch(fd, tls_->events(!out_.empty()), *this);
    }
  }
  if (phase_ == Phase::kNone) return std::max(connect_at_, now);
  const BootTime silent_at = heard_at_ + longest_silence();
  // A heartbeat that is due waits until the socket takes more, of which the loop tells.
  return phase_ == Phase::kOpen && out_.empty() ? std::min(heartbeat_at_, silent_at) : silent_at;
}

}  // namespace lockstep::launch
