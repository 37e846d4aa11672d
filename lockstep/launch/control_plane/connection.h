#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace lockstep::launch {

/// One end of a Forwarding: bytes over a socket that does not block. Not thread-safe.
class Connection {
 public:
  enum class Phase { kHandshake, kOpen, kClosed };

  Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  virtual ~Connection() = default;

  virtual int fd() const = 0;
  virtual Phase phase() const = 0;
  /// Does what can be done of the handshake, where there is one.
  virtual void advance_handshake() {}
  /// Reads what is there, at most the buffer; 0 when nothing is, or the connection is closed.
  virtual size_t read(std::span<char> buffer) = 0;
  /// Writes what fits; 0 when nothing does, or the connection is closed.
  virtual size_t write(std::string_view bytes) = 0;
  virtual void close() = 0;
  /// What poll(2) is to wait for; `wants_to_write`: there is something to write.
  virtual short events(bool wants_to_write) const = 0;
};

}  // namespace lockstep::launch
