#pragma once

#include <cstdint>
#include <unordered_map>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::launch {

/// Something that waits for descriptors and for times.
class EventHandler {
 public:
  virtual ~EventHandler() = default;
  /// One of its descriptors is ready, with poll(2)'s events.
  virtual void on_events(int fd, short events) = 0;
};

/// epoll(7) for one thread. Handlers belong to their owners. One whose descriptors are all forgotten is not called any
/// more, also not for what had happened before.
class EventLoop {
 public:
  EventLoop();

  /// Waits for these events from now on, in place of former ones; 0: for none, but errors. Throws c10::DistBackendError where
  /// the kernel has no room for it.
  void watch(int fd, short events, EventHandler& handler);
  /// The same; false, and errno, where there is no room. Then all is as before.
  bool try_watch(int fd, short events, EventHandler& handler);
  /// To be called before the descriptor is closed.
  void forget(int fd);
  /// Waits once, until `until` at the latest, and calls the handlers.
  void run_once(BootTime until);

 private:
  struct Watch {
    EventHandler* handler = nullptr;
    short events = 0;
    uint64_t number = 0;  // tells a descriptor's watch from that of an earlier one with its number
  };

  UniqueFd epoll_;
  std::unordered_map<int, Watch> watches_;
  uint64_t last_number_ = 0;
};

}  // namespace lockstep::launch
