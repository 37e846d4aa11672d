#pragma once

namespace lockstep::fsdp::internal {

/// Begins messages.
inline constexpr const char* kClass = "FullyShardedDataParallel";

}  // namespace lockstep::fsdp::internal
