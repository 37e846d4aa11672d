#include <array>
#include <cerrno>
#include <fcntl.h>
#include <sstream>
#include <unistd.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/process_stat.h>

namespace lockstep {

std::optional<ProcessStat> read_process_stat(pid_t pid) {
  const UniqueFd file(::open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::array<char, 1024> buffer{};
  const ssize_t got = ::read(file.get(), buffer.data(), buffer.size());
  if (got < 0) return std::nullopt;
  // "PID (NAME) STATE PARENT …", the start being field 22. Names may contain anything.
  const std::string text(buffer.data(), static_cast<size_t>(got));
  const auto open = text.find('(');
  const auto close = text.rfind(')');
  errno = EINVAL;
  if (open == std::string::npos || close == std::string::npos) return std::nullopt;
  ProcessStat stat;
  stat.name = text.substr(open + 1, close - open - 1);
  std::istringstream fields(text.substr(close + 1));
  fields >> stat.state >> stat.parent;
  std::string skipped;
  for (int field = 5; field < 14; ++field) fields >> skipped;
  uint64_t user = 0, kernel = 0;
  fields >> user >> kernel;
  stat.cpu_ticks = user + kernel;
  for (int field = 16; field < 22; ++field) fields >> skipped;
  fields >> stat.start;
  if (!fields) return std::nullopt;
  fields >> skipped >> stat.resident_pages;
  for (int field = 25; field < 52; ++field) fields >> skipped;
  fields >> stat.exit_code;
  return stat;
}

}  // namespace lockstep
