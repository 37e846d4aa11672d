#include <array>
#include <cerrno>
#include <fstream>
#include <set>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/process/credentials_of.h>
#include <lockstep/launch/control_plane/job_watch.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/watch_server.h>

namespace lockstep::launch {
namespace {

/// Names of agents' sockets in this network namespace.
std::set<std::string> agents_sockets() {
  constexpr size_t kLongest = 100;  // any program may have taken a name that begins so
  const std::string begin = std::string("@") + WatchServer::kNameBegin;
  std::set<std::string> names;  // connections have the listener's name, too
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const size_t at = line.find(begin);
    if (at != std::string::npos && line.size() - at <= kLongest) names.insert(line.substr(at + 1));
  }
  return names;
}

}  // namespace

std::map<pid_t, UniqueFd> JobWatch::agents() {
  std::map<pid_t, UniqueFd> connections;  // the kernel tells the pids, whatever a name says
  for (const std::string& name : agents_sockets()) {
    // Waits for none that is stopped.
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const SocketAddress address = abstract_address(name);
    if (!socket || ::connect(socket.get(), address.raw(), address.size) != 0) continue;
    const ucred agent = credentials_of(socket.get());
    const bool may_watch = agent.uid == ::geteuid() || ::geteuid() == 0;
    if (agent.pid > 0 && may_watch) connections.emplace(agent.pid, std::move(socket));
  }
  return connections;
}

JobWatch::JobWatch(pid_t agent, UniqueFd connection) : agent_(agent), socket_(std::move(connection)) {
  const std::string greeting = encode(own_watch_greeting());
  ::send(socket_.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);  // one that has ended, read() finds
}

void JobWatch::check(const WatchGreeting& greeting) const {
  const WatchGreeting own = own_watch_greeting();
  if (greeting.version == own.version) return;
  C10_THROW_ERROR(DistNetworkError,
                  c10::str("the agent of this host, process ", agent_, ", is of ", describe(greeting),
                           ", and this lockstep top of ", describe(own),
                           "; use the program that has started the job: ", command_to_watch(agent_)));
}

bool JobWatch::read(std::vector<Report>& reports) {
  std::array<char, 65536> buffer{};
  while (true) {
    const ssize_t got = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return false;
    std::string_view bytes(buffer.data(), static_cast<size_t>(got));
    if (!greeted_) {
      begin_ += bytes;
      const auto greeting = take_watch_greeting(begin_);
      if (!greeting) continue;
      check(*greeting);
      greeted_ = true;
      bytes = begin_;
    }
    frames_.append(bytes);
    while (const auto message = frames_.next()) {
      TORCH_CHECK_WITH(DistNetworkError, *message != kNoPlace, "the agent of this host, process ", agent_,
                       ", has no place for another lockstep top; end one of those that watch its job");
      auto report = decode_report(*message);
      if (!report) return false;
      reports.push_back(std::move(*report));
    }
    if (frames_.broken()) return false;
  }
}

}  // namespace lockstep::launch
