#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/printable.h>
#include <lockstep/launch/control_plane/job_watch.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/watch_server.h>

namespace lockstep::launch {

std::vector<pid_t> JobWatch::agents() {
  const std::string begin = std::string("@") + WatchServer::kNameBegin;
  std::vector<pid_t> agents;
  std::ifstream sockets("/proc/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    const size_t at = line.find(begin);
    if (at == std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::strtol(line.c_str() + at + begin.size(), nullptr, 10));
    struct stat process {};
    const bool lives = pid > 0 && ::stat(("/proc/" + std::to_string(pid)).c_str(), &process) == 0;
    if (lives && (process.st_uid == ::geteuid() || ::geteuid() == 0)) agents.push_back(pid);
  }
  std::sort(agents.begin(), agents.end());
  agents.erase(std::unique(agents.begin(), agents.end()),
               agents.end());  // its connections have the name, too
  return agents;
}

JobWatch::JobWatch(pid_t agent) : agent_(agent), socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const PeerAddress address = abstract_address(WatchServer::kNameBegin + std::to_string(agent));
  const bool connected = socket_ && ::connect(socket_.get(), address.raw(), address.size) == 0;
  TORCH_CHECK_WITH(DistNetworkError, connected, "the agent of this host, process ", agent,
                   ", does not answer: ", std::strerror(errno));
  // Any process may have taken the name.
  const uid_t user = user_at_other_end(socket_.get());
  TORCH_CHECK_WITH(DistNetworkError, user == ::geteuid() || user == 0 || ::geteuid() == 0,
                   "what answers as the agent ", agent, " belongs to another user, ", user);
  const std::string greeting = encode(own_watch_greeting());
  ::send(socket_.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL);  // one that has ended, read() finds
}

void JobWatch::check(const WatchGreeting& greeting) const {
  const WatchGreeting own = own_watch_greeting();
  if (greeting.version == own.version) return;
  std::error_code unknown;
  const auto program = std::filesystem::read_symlink("/proc/" + std::to_string(agent_) + "/exe", unknown);
  C10_THROW_ERROR(
      DistNetworkError,
      c10::str("the agent of this host, process ", agent_, ", is of ", describe(greeting),
               ", and this lockstep top of ", describe(own), "; use the program that has started the job: ",
               unknown ? std::string("lockstep") : printable(program.string()), " top ", agent_));
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
      auto report = decode_report(*message);
      if (!report) return false;
      reports.push_back(std::move(*report));
    }
    if (frames_.broken()) return false;
  }
}

}  // namespace lockstep::launch
