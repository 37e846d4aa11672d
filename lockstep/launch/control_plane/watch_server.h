#pragma once

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/listener.h>
#include <lockstep/launch/membership/messages.h>

namespace lockstep::launch {

/// Where `lockstep top` on an agent's host hears how all ranks of the job do: a local socket with an abstract name, at
/// which this user and root get the Reports of all hosts, each framed(), as they come. Both sides begin with a WatchGreeting;
/// a program of another version is told nothing but this one's. Of those that have not greeted the oldest gives way where
/// there is no place. Where the socket can't be made, no program can watch. Used by one thread.
class WatchServer : public EventHandler {
 public:
  /// `say`: is told, once, that a program of another version wants to watch.
  WatchServer(EventLoop& loop, std::function<void(const std::string&)> say);
  WatchServer(const WatchServer&) = delete;
  WatchServer& operator=(const WatchServer&) = delete;
  ~WatchServer() override;

  /// What all agents' sockets are called first.
  static constexpr const char* kNameBegin = "lockstep-agent-";
  /// The name of this process's. Containers that share a network namespace share these names, and may have the same pids: so
  /// the pid namespace is part of it.
  static std::string own_name();
  static constexpr size_t kMostWatchers = 16;
  /// What a watcher that does not read may have waiting for it.
  static constexpr size_t kMostWaitingBytes = size_t{8} << 20;

  /// Whether some program is to be told of reports.
  bool watched() const;
  void send(const Report& report);
  void on_events(int fd, short events) override;
  /// To be called after each turn of the loop; returns when to call again at the latest.
  BootTime serve(BootTime now) { return listener_ ? listener_->serve(now) : BootTime::max(); }

 private:
  struct Watcher {
    UniqueFd socket;
    std::string in = {};  // of its greeting, while that is not complete
    std::string out = {};
    bool greeted = false;
  };
  void accept_some();
  /// Whether there was one that has not greeted.
  bool refuse_silent();
  /// Says that there is no place for it, and drops it.
  void refuse(std::list<Watcher>::iterator watcher);
  /// False where the watcher has ended, or can't be told.
  bool take_greeting(Watcher& watcher, std::string_view bytes);
  /// False where it has ended, or there is no room for it.
  bool flush(Watcher& watcher);
  void drop(std::list<Watcher>::iterator watcher);

  EventLoop& loop_;
  std::function<void(const std::string&)> say_;
  std::optional<Listener> listener_;
  std::list<Watcher> watchers_;  // in the order in which they came
};

}  // namespace lockstep::launch
