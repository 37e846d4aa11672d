#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// The version of what the processes of one job tell each other: what ranks put into the store, the messages between them,
/// those of the agents of `lockstep run`, and what `lockstep top` reads. To be raised with each change of their bytes or
/// of their meaning, also within a release. Ranks compare it where they meet (store_all_gather()), agents by the key of
/// their connections, `lockstep top` in its greeting.
inline constexpr uint32_t kProtocolVersion = 2;

/// The release of this build: "0.2.0".
std::string own_release();

/// "Lockstep 0.2.0 (messages of version 3)": for people.
std::string describe_version(const std::string& release, uint32_t protocol_version);
/// The same of this build.
std::string own_version();

}  // namespace lockstep
