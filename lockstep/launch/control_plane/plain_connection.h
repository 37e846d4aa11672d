#pragma once

#include <algorithm>
#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/connection.h>

namespace lockstep::launch {

/// One that is not encrypted: of a worker that reaches the store without the tunnel.
class PlainConnection : public Connection {
 public:
  explicit PlainConnection(UniqueFd socket) : socket_(std::move(socket)) {}

  int fd() const override { return socket_.get(); }
  Phase phase() const override { return socket_ ? Phase::kOpen : Phase::kClosed; }
  size_t read(std::span<char> buffer) override {
    return moved(socket_ ? ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT) : -1,
                 buffer.empty());
  }
  size_t write(std::string_view bytes) override {
    if (bytes.empty() || !socket_) return 0;
    return moved(::send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL), false);
  }
  void close() override { socket_.reset(); }
  short events(bool wants_to_write) const override {
    return static_cast<short>(POLLIN | (wants_to_write ? POLLOUT : 0));
  }

 private:
  size_t moved(ssize_t result, bool asked_for_none) {
    if (result > 0 || asked_for_none) return static_cast<size_t>(std::max<ssize_t>(result, 0));
    if (socket_ && (result == 0 || (errno != EAGAIN && errno != EINTR))) close();
    return 0;
  }

  UniqueFd socket_;
};

}  // namespace lockstep::launch
