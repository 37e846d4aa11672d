#pragma once

namespace lockstep::profiler::internal {

/// The names of the arguments of an operation's event that torch has no word for.
inline constexpr const char* kQueuedArgument = "Queued (us)";
inline constexpr const char* kGroupKeyArgument = "Process Group Key";
inline constexpr const char* kPeerArgument = "Peer Rank";
/// The field of a trace's header that tells whose it is: {"pid", "host", "boot_id"}, and with profile_memory "held"
/// (held_memory.h).
inline constexpr const char* kProcessField = "lockstep";
inline constexpr const char* kHeldField = "held";

}  // namespace lockstep::profiler::internal
