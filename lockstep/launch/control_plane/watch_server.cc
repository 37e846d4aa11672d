#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include <lockstep/base/process/credentials_of.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/watch_greeting.h>
#include <lockstep/launch/control_plane/watch_server.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep::launch {

std::string WatchServer::own_name() {
  return kNameBegin + std::to_string(inode_of_namespace("/proc/self/ns/pid")) + "-" +
         std::to_string(::getpid());
}

WatchServer::WatchServer(EventLoop& loop, std::function<void(const std::string&)> say)
    : loop_(loop), say_(std::move(say)) {
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const SocketAddress address = abstract_address(own_name());
  if (!socket || ::bind(socket.get(), address.raw(), address.size) != 0 ||
      ::listen(socket.get(), SOMAXCONN) != 0)
    return;
  listener_.emplace(loop_, std::move(socket), *this);
}

WatchServer::~WatchServer() {
  while (!watchers_.empty()) drop(watchers_.begin());
}

bool WatchServer::watched() const {
  return std::any_of(watchers_.begin(), watchers_.end(), [](const Watcher& one) { return one.greeted; });
}

void WatchServer::send(const Report& report) {
  const std::string message = framed(encode(report));
  for (auto place = watchers_.begin(); place != watchers_.end();) {
    const auto watcher = place++;
    if (!watcher->greeted) continue;
    if (watcher->out.size() < kMostWaitingBytes) watcher->out += message;
    if (!flush(*watcher)) drop(watcher);
  }
}

void WatchServer::on_events(int fd, short) {
  if (fd == listener_->fd()) return accept_some();
  const auto watcher = std::find_if(watchers_.begin(), watchers_.end(),
                                    [fd](const Watcher& one) { return one.socket.get() == fd; });
  if (watcher == watchers_.end()) return;
  std::array<char, 256> bytes{};
  const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  const bool ended = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
  const bool goes_on =
      !ended && (got < 0 || take_greeting(*watcher, {bytes.data(), static_cast<size_t>(got)}));
  if (!goes_on || !flush(*watcher)) drop(watcher);
}

bool WatchServer::take_greeting(Watcher& watcher, std::string_view bytes) {
  if (watcher.greeted) return true;  // what follows a greeting is of no interest
  watcher.in += bytes;
  const auto greeting = take_watch_greeting(watcher.in);
  if (!greeting) return true;
  watcher.greeted = greeting->version == own_watch_greeting().version;
  if (!watcher.greeted && say_) {
    std::exchange(say_, nullptr)("a `lockstep top` of " + describe(*greeting) +
                                 " can't watch this job, which runs with " + describe(own_watch_greeting()) +
                                 "; use the program that has started it: " + command_to_watch(::getpid()));
  }
  return watcher.greeted;
}

void WatchServer::accept_some() {
  constexpr int kAtOnce = 32;  // others' users may connect again and again
  for (int i = 0; i < kAtOnce; ++i) {
    UniqueFd socket = listener_->accept([this] { return refuse_silent(); });
    if (!socket) return;
    const uid_t user = credentials_of(socket.get()).uid;
    if (user != ::geteuid() && user != 0) continue;
    const bool has_place = watchers_.size() < kMostWatchers || refuse_silent();
    watchers_.push_back({.socket = std::move(socket), .out = encode(own_watch_greeting())});
    const auto watcher = std::prev(watchers_.end());
    if (!has_place) {
      refuse(watcher);
    } else if (!flush(*watcher)) {
      drop(watcher);
    }
  }
}

bool WatchServer::refuse_silent() {
  const auto silent =
      std::find_if(watchers_.begin(), watchers_.end(), [](const Watcher& one) { return !one.greeted; });
  if (silent == watchers_.end()) return false;
  refuse(silent);
  return true;
}

void WatchServer::refuse(std::list<Watcher>::iterator watcher) {
  watcher->out += framed(std::string(kNoPlace));
  flush(*watcher);
  drop(watcher);
}

bool WatchServer::flush(Watcher& watcher) {
  const ssize_t sent = watcher.out.empty() ? 0
                                           : ::send(watcher.socket.get(), watcher.out.data(),
                                                    watcher.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN && errno != EINTR) return false;
  if (sent > 0) watcher.out.erase(0, static_cast<size_t>(sent));
  return loop_.try_watch(watcher.socket.get(),
                         static_cast<short>(watcher.out.empty() ? POLLIN : POLLIN | POLLOUT), *this);
}

void WatchServer::drop(std::list<Watcher>::iterator watcher) {
  loop_.forget(watcher->socket.get());
  watchers_.erase(watcher);
}

}  // namespace lockstep::launch
