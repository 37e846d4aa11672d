#include <algorithm>
#include <filesystem>
#include <system_error>

#include <lockstep/base/text/printable.h>
#include <lockstep/launch/agent/shell_words.h>
#include <lockstep/launch/control_plane/watch_greeting.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::launch {
namespace {

/// As the length of a framed() message it would be too large: a reader that expects one stops at it.
constexpr std::string_view kMagic = "lockstep";
constexpr size_t kVersionBytes = 4;
constexpr size_t kMostReleaseBytes = kWatchGreetingBytes - kMagic.size() - kVersionBytes;

}  // namespace

WatchGreeting own_watch_greeting() {
  return {.version = kProtocolVersion, .release = own_release()};
}

std::string encode(const WatchGreeting& greeting) {
  std::string bytes(kMagic);
  for (size_t i = 0; i < kVersionBytes; ++i) bytes += static_cast<char>(greeting.version >> (8 * i) & 0xff);
  bytes += greeting.release.substr(0, kMostReleaseBytes);
  bytes.resize(kWatchGreetingBytes, '\0');
  return bytes;
}

std::optional<WatchGreeting> take_watch_greeting(std::string& bytes) {
  const std::string_view begin = std::string_view(bytes).substr(0, kMagic.size());
  if (begin != kMagic.substr(0, begin.size())) return WatchGreeting{};
  if (bytes.size() < kWatchGreetingBytes) return std::nullopt;
  WatchGreeting greeting;
  for (size_t i = 0; i < kVersionBytes; ++i) {
    greeting.version |= static_cast<uint32_t>(static_cast<uint8_t>(bytes[kMagic.size() + i])) << (8 * i);
  }
  greeting.release = bytes.substr(kMagic.size() + kVersionBytes, kMostReleaseBytes);
  greeting.release.resize(std::min(greeting.release.find('\0'), greeting.release.size()));
  bytes.erase(0, kWatchGreetingBytes);
  return greeting;
}

std::string describe(const WatchGreeting& greeting) {
  if (greeting.version == 0) return "a Lockstep that does not tell its version";
  return describe_version(printable(greeting.release), greeting.version);
}

std::string command_to_watch(pid_t agent) {
  const std::filesystem::path running = "/proc/" + std::to_string(agent) + "/exe";
  std::error_code unknown;
  const std::filesystem::path file = std::filesystem::read_symlink(running, unknown);
  // It may have been deleted, or lie in a container of its own.
  const bool is_there = !unknown && std::filesystem::equivalent(running, file, unknown);
  constexpr size_t kMost = 4096;
  return printable(shell_words({is_there ? file.string() : "lockstep", "top", std::to_string(agent)}), kMost);
}

}  // namespace lockstep::launch
