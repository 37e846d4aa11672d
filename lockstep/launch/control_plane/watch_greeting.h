#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <sys/types.h>

namespace lockstep::launch {

/// What a WatchServer and a JobWatch tell each other first: the version of all that follows. Its layout is the same in every
/// release, so that two releases that differ can say so: "lockstep", the version in four bytes, little-endian, and the name
/// of the release in 20 bytes, filled up with zeros.
struct WatchGreeting {
  uint32_t version = 0;  ///< 0: these bytes are no greeting
  std::string release = {};

  bool operator==(const WatchGreeting&) const = default;
};

inline constexpr size_t kWatchGreetingBytes = 32;

/// This program's greeting, with kProtocolVersion.
WatchGreeting own_watch_greeting();

/// A release's name of more than 20 bytes is cut.
std::string encode(const WatchGreeting& greeting);

/// Takes the greeting off the bytes that a connection began with. Nothing while it is not complete.
std::optional<WatchGreeting> take_watch_greeting(std::string& bytes);

/// What a WatchServer sends after its greeting, as a message, to one for which it has no place.
inline constexpr std::string_view kNoPlace = "no place";

/// "Lockstep 0.2.0 (messages of version 3)": for people.
std::string describe(const WatchGreeting& greeting);

/// The command that watches the job of this agent, by its own program where that is found at its path.
std::string command_to_watch(pid_t agent);

}  // namespace lockstep::launch
