#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/launch/control_plane/sockets.h>

namespace lockstep::launch {

/// Looks addresses up without keeping its user waiting: on a thread for each look, for getaddrinfo(3) may block for long.
/// That thread is not waited for, and may outlive this object. Not thread-safe.
class NameLookup {
 public:
  /// `find` is called on another thread. Where it throws it has found none.
  explicit NameLookup(std::function<std::vector<SocketAddress>()> find);

  /// Begins to look, unless one look is still under way.
  void begin();
  /// What was found since the last call; nothing where that is no address.
  std::optional<std::vector<SocketAddress>> take();

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace lockstep::launch
