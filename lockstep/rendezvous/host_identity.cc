#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <sys/stat.h>

#include <c10/util/Exception.h>

#include <lockstep/base/host_name.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep {

HostIdentity this_host() {
  HostIdentity host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host.boot_id;
  struct stat status {};
  if (host.boot_id.empty() || ::stat("/proc/self/ns/net", &status) != 0) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("cannot tell which host this is: /proc/sys/kernel/random/boot_id or ",
                             "/proc/self/ns/net cannot be read (", std::strerror(errno), "); mount /proc"));
  }
  host.network_namespace = status.st_ino;
  host.hostname = host_name();
  if (host.hostname.empty()) host.hostname = "unknown";
  return host;
}

std::string HostIdentity::to_string() const {
  return boot_id + " " + std::to_string(network_namespace) + " " + hostname;
}

HostIdentity HostIdentity::parse(const std::string& text) {
  auto first = text.find(' ');
  auto second = first == std::string::npos ? first : text.find(' ', first + 1);
  HostIdentity host;
  bool good = second != std::string::npos && first > 0 && second + 1 < text.size();
  if (good) {
    const char* end = text.data() + second;
    auto [stop, error] = std::from_chars(text.data() + first + 1, end, host.network_namespace);
    good = error == std::errc() && stop == end;
  }
  TORCH_CHECK_VALUE(good, "'", text, "' is not the identity of a host");
  host.boot_id = text.substr(0, first);
  host.hostname = text.substr(second + 1);
  return host;
}

}  // namespace lockstep
