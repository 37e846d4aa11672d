#include <utility>

#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/greeting.h>
#include <lockstep/launch/control_plane/tunnel_entrance.h>

namespace lockstep::launch {

TunnelEntrance::TunnelEntrance(EventLoop& loop, TlsKey key, const SocketAddress& coordinator,
                               uint64_t generation)
    : loop_(loop),
      key_(std::move(key)),
      coordinator_(coordinator),
      generation_(generation),
      listener_(loop, listen_on_loopback(port_), *this) {}

void TunnelEntrance::on_events(int, short) {
  UniqueFd plain = listener_.accept();
  if (!plain || streams_.size() >= kMostStreams) return;  // the worker's store tries again
  UniqueFd socket = begin_connect(coordinator_);
  if (!socket) return;
  auto tls = std::make_unique<TlsConnection>(key_, std::move(socket), TlsConnection::Side::kClient);
  const Greeting greeting = {.kind = Greeting::Kind::kStream, .generation = generation_};
  streams_.push_back(std::make_unique<Forwarding>(loop_, std::move(tls), std::move(plain),
                                                  framed(encode(greeting)), std::string()));
}

BootTime TunnelEntrance::serve(BootTime now) {
  std::erase_if(streams_, [](const auto& stream) { return stream->finished(); });
  return listener_.serve(now);
}

}  // namespace lockstep::launch
