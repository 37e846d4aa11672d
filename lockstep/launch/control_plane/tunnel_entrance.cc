#include <cerrno>
#include <chrono>
#include <poll.h>
#include <utility>

#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/greeting.h>
#include <lockstep/launch/control_plane/tunnel_entrance.h>

namespace lockstep::launch {

TunnelEntrance::TunnelEntrance(EventLoop& loop, TlsKey key, const PeerAddress& coordinator,
                               uint64_t generation)
    : loop_(loop),
      key_(std::move(key)),
      coordinator_(coordinator),
      generation_(generation),
      listener_(listen_on_loopback(port_)) {
  loop_.watch(listener_.get(), POLLIN, *this);
}

TunnelEntrance::~TunnelEntrance() {
  loop_.forget(listener_.get());
}

void TunnelEntrance::on_events(int, short) {
  UniqueFd plain = accept_one(listener_.get());
  if (!plain && means_no_room(errno)) {
    loop_.forget(listener_.get());
    accept_again_at_ = BootClock::now() + std::chrono::milliseconds(100);
  }
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
  if (now >= accept_again_at_) {
    accept_again_at_ = BootTime::max();
    loop_.watch(listener_.get(), POLLIN, *this);
  }
  return accept_again_at_;
}

}  // namespace lockstep::launch
