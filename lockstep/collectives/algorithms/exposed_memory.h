#pragma once

#include <cstddef>

#include <lockstep/transport/host/groups/host_channel.h>

namespace lockstep::collectives::internal::algorithms {

/// A tensor that peers may write, from its announcement on. If the operation does not succeed it is detached
/// from them, before the error reaches the caller: a peer that was stopped half-way, or has not heard of the
/// failure yet, goes on to write, and what it then writes into is no tensor any more. No check before a store
/// could give that, for a peer may be stopped between the two. docs/internals/shared_memory_protocol.md, "After an
/// error".
class ExposedMemory {
 public:
  /// Null: nothing is exposed.
  ExposedMemory(transport::HostChannel& channel, void* data, size_t bytes)
      : channel_(channel), data_(data), bytes_(bytes) {}
  ExposedMemory(const ExposedMemory&) = delete;
  ExposedMemory& operator=(const ExposedMemory&) = delete;
  ~ExposedMemory();

  void succeeded() { data_ = nullptr; }

 private:
  transport::HostChannel& channel_;
  void* data_;
  size_t bytes_;
};

}  // namespace lockstep::collectives::internal::algorithms
