#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/epoll.h>

#include <c10/util/Exception.h>

#include <lockstep/launch/control_plane/event_loop.h>

namespace lockstep::launch {

static_assert(EPOLLIN == POLLIN && EPOLLOUT == POLLOUT && EPOLLERR == POLLERR && EPOLLHUP == POLLHUP);

EventLoop::EventLoop() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  TORCH_CHECK_WITH(DistBackendError, static_cast<bool>(epoll_), "epoll_create1: ", std::strerror(errno));
}

void EventLoop::watch(int fd, short events, EventHandler& handler) {
  const auto [place, is_new] = watches_.try_emplace(fd);
  Watch& watch = place->second;
  if (!is_new && watch.events == events && watch.handler == &handler) return;
  if (is_new) watch.number = ++last_number_;
  watch.handler = &handler;
  watch.events = events;
  epoll_event event = {};
  event.events = static_cast<uint32_t>(events);
  event.data.u64 = watch.number << 32 | static_cast<uint32_t>(fd);
  const int error =
      ::epoll_ctl(epoll_.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) == 0 ? 0 : errno;
  TORCH_CHECK_WITH(DistBackendError, error == 0, "epoll_ctl: ", std::strerror(error));
}

void EventLoop::forget(int fd) {
  if (watches_.erase(fd) > 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void EventLoop::run_once(BootTime until) {
  // At most a second: epoll's own clock stands still while the host is suspended.
  constexpr std::chrono::milliseconds kLongest(1000);
  const auto now = BootClock::now();
  const auto left =
      until <= now ? std::chrono::nanoseconds(0) : std::min<std::chrono::nanoseconds>(kLongest, until - now);
  std::array<epoll_event, 64> events;
  const int count =
      ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                   static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
  TORCH_CHECK_WITH(DistBackendError, count >= 0 || errno == EINTR, "epoll_wait: ", std::strerror(errno));
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    const int fd = static_cast<int>(event.data.u64 & 0xffffffff);
    const auto watch = watches_.find(fd);
    if (watch == watches_.end() || (watch->second.number & 0xffffffff) != event.data.u64 >> 32) continue;
    watch->second.handler->on_events(fd, static_cast<short>(event.events));
  }
}

}  // namespace lockstep::launch
