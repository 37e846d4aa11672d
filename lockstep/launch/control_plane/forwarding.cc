#include <array>
#include <cerrno>
#include <poll.h>
#include <span>
#include <sys/socket.h>
#include <utility>

#include <lockstep/launch/control_plane/forwarding.h>

namespace lockstep::launch {

Forwarding::Forwarding(EventLoop& loop, std::unique_ptr<TlsConnection> tls, UniqueFd plain,
                       std::string for_tls, std::string for_plain)
    : loop_(loop),
      tls_(std::move(tls)),
      plain_(std::move(plain)),
      for_tls_(std::move(for_tls)),
      for_plain_(std::move(for_plain)),
      tls_fd_(tls_->fd()) {
  watch();
  on_events(plain_.get(), 0);  // OpenSSL may hold bytes of which epoll knows nothing
}

Forwarding::~Forwarding() {
  finish();
}

void Forwarding::finish() {
  if (std::exchange(finished_, true)) return;
  if (tls_->phase() != TlsConnection::Phase::kClosed) loop_.forget(tls_fd_);
  loop_.forget(plain_.get());
  tls_->close();
  plain_.reset();
}

bool Forwarding::move_once() {
  std::array<char, 16384> buffer;
  bool moved = false;
  if (for_plain_.size() < kMostBytes) {
    const size_t got = tls_->read(buffer);
    for_plain_.append(buffer.data(), got);
    moved = got > 0;
  }
  if (!for_plain_.empty()) {
    const ssize_t sent =
        ::send(plain_.get(), for_plain_.data(), for_plain_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) for_plain_.erase(0, static_cast<size_t>(sent));
    if (sent < 0 && errno != EAGAIN && errno != EINTR) plain_broken_ = true;
    moved = moved || sent > 0;
  }
  if (!plain_ended_ && for_tls_.size() < kMostBytes) {
    const ssize_t got = ::recv(plain_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) for_tls_.append(buffer.data(), static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) plain_ended_ = true;
    moved = moved || got > 0;
  }
  const size_t sent = tls_->write(for_tls_);
  for_tls_.erase(0, sent);
  return moved || sent > 0;
}

void Forwarding::on_events(int fd, short events) {
  if (finished_) return;
  // The sender is gone and the reader does not read: epoll would tell the one again and again.
  const bool stuck = fd == tls_fd_ && (events & (POLLERR | POLLHUP)) != 0 && for_plain_.size() >= kMostBytes;
  const bool was_open = tls_->phase() != TlsConnection::Phase::kClosed;
  tls_->advance_handshake();
  // Fair to the other streams: the rest later.
  constexpr int kRounds = 16;
  bool moved = true;
  for (int round = 0; round < kRounds && moved && !plain_broken_; ++round) moved = move_once();
  const bool tls_ended = tls_->phase() == TlsConnection::Phase::kClosed;
  // At once: the next descriptor may get its number.
  if (was_open && tls_ended) loop_.forget(tls_fd_);
  if (stuck || plain_broken_ || (tls_ended && for_plain_.empty()) ||
      (plain_ended_ && (for_tls_.empty() || tls_ended))) {
    return finish();
  }
  watch();
  if (moved && !tls_ended) loop_.watch(tls_fd_, static_cast<short>(tls_->events(true) | POLLOUT), *this);
}

void Forwarding::watch() {
  if (tls_->phase() != TlsConnection::Phase::kClosed) {
    short events = tls_->events(!for_tls_.empty());
    const bool full = for_plain_.size() >= kMostBytes;
    if (full && tls_->phase() == TlsConnection::Phase::kOpen) events = static_cast<short>(events & ~POLLIN);
    loop_.watch(tls_fd_, events, *this);
  }
  const bool reads = !plain_ended_ && for_tls_.size() < kMostBytes;
  if (plain_ended_ && for_plain_.empty()) {
    loop_.forget(plain_.get());  // its hang-up would be told again and again
  } else {
    loop_.watch(plain_.get(), static_cast<short>((reads ? POLLIN : 0) | (for_plain_.empty() ? 0 : POLLOUT)),
                *this);
  }
}

}  // namespace lockstep::launch
