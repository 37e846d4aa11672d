#include <array>
#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

#include <lockstep/launch/control_plane/forwarding.h>

namespace lockstep::launch {

Forwarding::Forwarding(EventLoop& loop, std::unique_ptr<Connection> far, UniqueFd plain, std::string for_far,
                       std::string for_plain)
    : loop_(loop),
      far_(std::move(far)),
      plain_(std::move(plain)),
      for_far_(std::move(for_far)),
      for_plain_(std::move(for_plain)),
      far_fd_(far_->fd()) {
  watch();
  on_events(plain_.get(), 0);  // OpenSSL may hold bytes of which epoll knows nothing
}

Forwarding::~Forwarding() {
  finish();
}

void Forwarding::finish() {
  if (std::exchange(finished_, true)) return;
  if (far_->phase() != Connection::Phase::kClosed) loop_.forget(far_fd_);
  loop_.forget(plain_.get());
  far_->close();
  plain_.reset();
}

bool Forwarding::move_once() {
  std::array<char, 16384> buffer;
  bool moved = false;
  if (for_plain_.size() < kMostBytes) {
    const size_t got = far_->read(buffer);
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
  if (!plain_ended_ && for_far_.size() < kMostBytes) {
    const ssize_t got = ::recv(plain_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) for_far_.append(buffer.data(), static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) plain_ended_ = true;
    moved = moved || got > 0;
  }
  const size_t sent = far_->write(for_far_);
  for_far_.erase(0, sent);
  return moved || sent > 0;
}

void Forwarding::on_events(int fd, short events) {
  if (finished_) return;
  // The sender is gone and the reader does not read: epoll would tell the one again and again.
  const bool stuck = fd == far_fd_ && (events & (POLLERR | POLLHUP)) != 0 && for_plain_.size() >= kMostBytes;
  const bool was_open = far_->phase() != Connection::Phase::kClosed;
  far_->advance_handshake();
  // Fair to the other streams: the rest later.
  constexpr int kRounds = 16;
  bool moved = true;
  for (int round = 0; round < kRounds && moved && !plain_broken_; ++round) moved = move_once();
  const bool far_ended = far_->phase() == Connection::Phase::kClosed;
  // At once: the next descriptor may get its number.
  if (was_open && far_ended) loop_.forget(far_fd_);
  if (stuck || plain_broken_ || (far_ended && for_plain_.empty()) ||
      (plain_ended_ && (for_far_.empty() || far_ended))) {
    return finish();
  }
  watch();
  if (moved && !far_ended) loop_.watch(far_fd_, static_cast<short>(far_->events(true) | POLLOUT), *this);
}

void Forwarding::watch() {
  if (far_->phase() != Connection::Phase::kClosed) {
    short events = far_->events(!for_far_.empty());
    const bool full = for_plain_.size() >= kMostBytes;
    if (full && far_->phase() == Connection::Phase::kOpen) events = static_cast<short>(events & ~POLLIN);
    loop_.watch(far_fd_, events, *this);
  }
  const bool reads = !plain_ended_ && for_far_.size() < kMostBytes;
  if (plain_ended_ && for_plain_.empty()) {
    loop_.forget(plain_.get());  // its hang-up would be told again and again
  } else {
    loop_.watch(plain_.get(), static_cast<short>((reads ? POLLIN : 0) | (for_plain_.empty() ? 0 : POLLOUT)),
                *this);
  }
}

}  // namespace lockstep::launch
