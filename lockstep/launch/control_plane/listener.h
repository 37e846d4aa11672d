#pragma once

#include <chrono>
#include <functional>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/event_loop.h>

namespace lockstep::launch {

/// A listening socket in an EventLoop. While this process or the host has no descriptor or memory left, a connection stays
/// in the queue and epoll would tell of it again and again: so then the loop looks at the socket after a pause only.
class Listener {
 public:
  static constexpr std::chrono::milliseconds kPause{100};

  /// `handler` is called when a connection has come. `socket` listens, and does not block.
  Listener(EventLoop& loop, UniqueFd socket, EventHandler& handler);
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener();

  int fd() const { return socket_.get(); }
  /// The next connection; nothing where there is none, or no room for it. `make_room` is asked for room first: whether it
  /// has closed something.
  UniqueFd accept(const std::function<bool()>& make_room = {});
  /// To be called after each turn of the loop; returns when to call again at the latest.
  BootTime serve(BootTime now);

 private:
  /// accept(2) does not tell where it has no descriptor.
  bool has_come() const;

  EventLoop& loop_;
  UniqueFd socket_;
  EventHandler& handler_;
  BootTime watch_at_ = {};  // while it is not watched
};

}  // namespace lockstep::launch
