#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <sys/stat.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/host_name.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep {
namespace {

std::string& pretended_by_thread() {
  static thread_local std::string name;
  return name;
}

void check_host_name(const std::string& name) {
  const bool good =
      name.size() <= 64 && std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
  TORCH_CHECK_VALUE(good, "environment variable LOCKSTEP_TEST_HOST is '", name,
                    "', which is no host's name: at most 64 letters, digits and signs, without blanks");
}

/// Reads the numbers, with a slash between two.
bool read_numbers(const char* at, const char* end, std::initializer_list<uint64_t*> numbers) {
  for (uint64_t* number : numbers) {
    if (number != *numbers.begin() && (at == end || *at++ != '/')) return false;
    const auto [stop, error] = std::from_chars(at, end, *number);
    if (error != std::errc()) return false;
    at = stop;
  }
  return at == end;
}

}  // namespace

HostIdentity this_host() {
  HostIdentity host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host.boot_id;
  host.network_namespace = inode_of_namespace("/proc/self/ns/net");
  if (host.boot_id.empty() || host.network_namespace == 0) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("cannot tell which host this is: /proc/sys/kernel/random/boot_id or ",
                             "/proc/self/ns/net cannot be read (", std::strerror(errno), "); mount /proc"));
  }
  host.pid_namespace = inode_of_namespace("/proc/self/ns/pid");
  host.user_namespace = inode_of_namespace("/proc/self/ns/user");
  std::string pretended = pretended_by_thread();
  if (pretended.empty()) pretended = environment::text("LOCKSTEP_TEST_HOST").value_or("");
  if (!pretended.empty()) {
    check_host_name(pretended);
    host.network_namespace = 0;
    host.hostname = pretended;
    return host;
  }
  host.hostname = host_name();
  if (host.hostname.empty()) host.hostname = "unknown";
  return host;
}

uint64_t inode_of_namespace(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 ? status.st_ino : 0;
}

void pretend_host(const std::string& name) {
  pretended_by_thread() = name;
}

std::string HostIdentity::key() const {
  std::string text = boot_id + " " + std::to_string(network_namespace);
  if (pid_namespace != 0 || user_namespace != 0) {
    text += "/" + std::to_string(pid_namespace) + "/" + std::to_string(user_namespace);
  }
  return is_pretended() ? text + " " + hostname : text;
}

std::string HostIdentity::to_string() const {
  return is_pretended() ? key() : key() + " " + hostname;
}

HostIdentity HostIdentity::parse(const std::string& text) {
  const auto first = text.find(' ');
  const auto second = first == std::string::npos ? first : text.find(' ', first + 1);
  HostIdentity host;
  bool good = second != std::string::npos && first > 0 && second + 1 < text.size();
  if (good) {
    const char* begin = text.data() + first + 1;
    const char* end = text.data() + second;
    good = read_numbers(begin, end, {&host.network_namespace}) ||
           read_numbers(begin, end, {&host.network_namespace, &host.pid_namespace, &host.user_namespace});
  }
  TORCH_CHECK_VALUE(good, "'", text, "' is not the identity of a host");
  host.boot_id = text.substr(0, first);
  host.hostname = text.substr(second + 1);
  return host;
}

}  // namespace lockstep
