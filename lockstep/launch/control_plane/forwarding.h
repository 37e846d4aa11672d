#pragma once

#include <memory>
#include <string>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/connection.h>
#include <lockstep/launch/control_plane/event_loop.h>

namespace lockstep::launch {

/// One stream of a tunnel: carries bytes between the connection of another host and one of this host, both ways, and
/// knows nothing of what they mean. Holds at most kMostBytes each way, so that a slow reader slows its writer down. When
/// one end closes, what was already read still passes, and then the other end is closed.
class Forwarding : public EventHandler {
 public:
  static constexpr size_t kMostBytes = 256 << 10;

  /// Either may still be connecting. `for_far` and `for_plain` pass ahead of all else.
  Forwarding(EventLoop& loop, std::unique_ptr<Connection> far, UniqueFd plain, std::string for_far,
             std::string for_plain);
  ~Forwarding() override;

  void on_events(int fd, short events) override;
  bool finished() const { return finished_; }

 private:
  /// Moves what can be moved. Whether anything was.
  bool move_once();
  void watch();
  void finish();

  EventLoop& loop_;
  std::unique_ptr<Connection> far_;
  UniqueFd plain_;
  std::string for_far_;
  std::string for_plain_;
  const int far_fd_;  // watched until the connection closes
  // The two directions of plain_ end independently of each other:
  bool plain_ended_ = false;   // nothing more comes from it
  bool plain_broken_ = false;  // nothing more goes there
  bool finished_ = false;
};

}  // namespace lockstep::launch
