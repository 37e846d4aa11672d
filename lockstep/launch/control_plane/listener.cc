#include <cerrno>
#include <poll.h>
#include <utility>

#include <lockstep/launch/control_plane/listener.h>
#include <lockstep/launch/control_plane/sockets.h>

namespace lockstep::launch {

Listener::Listener(EventLoop& loop, UniqueFd socket, EventHandler& handler)
    : loop_(loop), socket_(std::move(socket)), handler_(handler) {
  serve(watch_at_);
}

Listener::~Listener() {
  loop_.forget(socket_.get());
}

UniqueFd Listener::accept(const std::function<bool()>& make_room) {
  while (true) {
    UniqueFd connection = accept_one(socket_.get());
    if (connection || !means_no_room(errno) || !has_come()) return connection;
    if (make_room && make_room()) continue;
    loop_.forget(socket_.get());
    watch_at_ = BootClock::now() + kPause;
    return {};
  }
}

bool Listener::has_come() const {
  pollfd wait = {socket_.get(), POLLIN, 0};
  return ::poll(&wait, 1, 0) > 0;
}

BootTime Listener::serve(BootTime now) {
  if (now >= watch_at_) {
    watch_at_ = loop_.try_watch(socket_.get(), POLLIN, handler_) ? BootTime::max() : now + kPause;
  }
  return watch_at_;
}

}  // namespace lockstep::launch
