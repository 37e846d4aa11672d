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
  TORCH_CHECK_WITH(DistBackendError, try_watch(fd, events, handler), "epoll_ctl: ", std::strerror(errno));
}

bool EventLoop::try_watch(int fd, short events, EventHandler& handler) {
  const auto former = watches_.find(fd);
  const bool is_new = former == watches_.end();
  if (!is_new && former->second.events == events && former->second.handler == &handler) return true;
  const uint64_t number = is_new ? ++last_number_ : former->second.number;
  epoll_event event = {};
  event.events = static_cast<uint32_t>(events);
  event.data.u64 = number << 32 | static_cast<uint32_t>(fd);
  if (::epoll_ctl(epoll_.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) != 0) return false;
  watches_[fd] = {.handler = &handler, .events = events, .number = number};
  return true;
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
