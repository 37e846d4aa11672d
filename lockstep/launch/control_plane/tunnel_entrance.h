#pragma once

#include <cstdint>
#include <list>
#include <memory>

#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/forwarding.h>
#include <lockstep/launch/control_plane/listener.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/tls.h>

namespace lockstep::launch {

/// Where workers of a host find the store of their generation: a port on 127.0.0.1, from which each connection is
/// forwarded to the coordinator's store over one of TLS. Users of this machine can reach it, as they can a store that
/// listens there itself.
class TunnelEntrance : public EventHandler {
 public:
  static constexpr size_t kMostStreams = 4096;

  TunnelEntrance(EventLoop& loop, TlsKey key, const SocketAddress& coordinator, uint64_t generation);

  uint16_t port() const { return port_; }
  void on_events(int fd, short events) override;
  /// To be called after each turn of the loop; returns when to call again at the latest.
  BootTime serve(BootTime now);

 private:
  EventLoop& loop_;
  TlsKey key_;
  SocketAddress coordinator_;
  uint64_t generation_;
  uint16_t port_ = 0;
  Listener listener_;
  std::list<std::unique_ptr<Forwarding>> streams_;
};

}  // namespace lockstep::launch
