#include <algorithm>
#include <array>
#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/watch_server.h>

namespace lockstep::launch {

WatchServer::WatchServer(EventLoop& loop)
    : loop_(loop), listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const PeerAddress address = abstract_address(kNameBegin + std::to_string(::getpid()));
  if (!listener_ || ::bind(listener_.get(), address.raw(), address.size) != 0 ||
      ::listen(listener_.get(), kMostWatchers) != 0) {
    listener_.reset();
    return;
  }
  loop_.watch(listener_.get(), POLLIN, *this);
}

WatchServer::~WatchServer() {
  while (!watchers_.empty()) drop(watchers_.begin());
  if (listener_) loop_.forget(listener_.get());
}

void WatchServer::send(const Report& report) {
  const std::string message = framed(encode(report));
  for (auto place = watchers_.begin(); place != watchers_.end();) {
    const auto watcher = place++;
    if (watcher->out.size() < kMostWaitingBytes) watcher->out += message;
    if (!flush(*watcher)) drop(watcher);
  }
}

void WatchServer::on_events(int fd, short) {
  if (fd == listener_.get()) return accept_some();
  const auto watcher = std::find_if(watchers_.begin(), watchers_.end(),
                                    [fd](const Watcher& one) { return one.socket.get() == fd; });
  if (watcher == watchers_.end()) return;
  std::array<char, 256> unread{};
  const ssize_t got = ::recv(fd, unread.data(), unread.size(), MSG_DONTWAIT);
  const bool ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  if (ended || !flush(*watcher)) drop(watcher);
}

void WatchServer::accept_some() {
  constexpr int kAtOnce = 32;  // others' users may connect again and again
  for (int i = 0; i < kAtOnce; ++i) {
    UniqueFd socket = accept_one(listener_.get());
    if (!socket) return;
    const uid_t user = user_at_other_end(socket.get());
    if ((user != ::geteuid() && user != 0) || watchers_.size() >= kMostWatchers) continue;
    const int fd = socket.get();
    watchers_.push_back({std::move(socket), {}});
    loop_.watch(fd, POLLIN, *this);
  }
}

bool WatchServer::flush(Watcher& watcher) {
  const ssize_t sent = watcher.out.empty() ? 0
                                           : ::send(watcher.socket.get(), watcher.out.data(),
                                                    watcher.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
  if (sent > 0) watcher.out.erase(0, static_cast<size_t>(sent));
  loop_.watch(watcher.socket.get(), static_cast<short>(watcher.out.empty() ? POLLIN : POLLIN | POLLOUT),
              *this);
  return true;
}

void WatchServer::drop(std::list<Watcher>::iterator watcher) {
  loop_.forget(watcher->socket.get());
  watchers_.erase(watcher);
}

}  // namespace lockstep::launch
