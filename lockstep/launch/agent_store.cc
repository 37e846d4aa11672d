#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <netinet/in.h>
#include <sys/socket.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent_store.h>

namespace lockstep::launch {

AgentStore::AgentStore(uint16_t port) {
  UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  TORCH_CHECK_WITH(DistNetworkError, static_cast<bool>(listener),
                   "can't make a socket: ", std::strerror(errno));
  const int one = 1;  // a chosen port may still be in TIME_WAIT from the last run
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  // listen() already here: two sockets with SO_REUSEADDR may both bind one port, but only one may listen on
  // it.
  if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0) {
    const int error = errno;
    const char* remedy = error == EADDRINUSE ? "; choose another --master-port, or none for a free one"
                         : error == EACCES   ? "; ports below 1024 need privileges, choose a higher one"
                                             : "";
    TORCH_CHECK_WITH(DistNetworkError, false, "can't listen on 127.0.0.1:", port, ": ", std::strerror(error),
                     remedy);
  }
  socklen_t length = sizeof(address);
  TORCH_CHECK_WITH(DistNetworkError,
                   ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
                   "can't read the store's port: ", std::strerror(errno));
  port_ = ntohs(address.sin_port);

  c10d::TCPStoreOptions options;
  options.port = port_;
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listener.release();  // the store closes it
  store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

AgentStore::~AgentStore() = default;

}  // namespace lockstep::launch
