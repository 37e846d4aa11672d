#pragma once

#include <chrono>

#include <lockstep/transport/group_channel.h>

// An operation of a group, around what a test does in it.
namespace lockstep::transport {

inline void begin(GroupChannel& channel, std::chrono::nanoseconds timeout = std::chrono::seconds(60)) {
  channel.host().begin(Deadline::after(timeout), false);
  channel.host().announce({});
  channel.host().await_announcements();
}

inline void finish(GroupChannel& channel) {
  channel.host().publish(HostChannel::Flag::kDone, channel.host().sequence());
  channel.host().await_all(HostChannel::Flag::kDone, channel.host().sequence());
  channel.host().commit();
}

}  // namespace lockstep::transport
