#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep::launch {

/// The first message on a connection to the coordinator: what it is for.
struct Greeting {
  enum class Kind : uint8_t {
    kAgent = 'A',   // messages follow: statuses, and orders in return
    kStream = 'S',  // bytes follow, to and from the store of `generation`
  };
  Kind kind = Kind::kAgent;
  uint64_t generation = 0;

  bool operator==(const Greeting&) const = default;
};

inline std::string encode(const Greeting& greeting) {
  std::string bytes(1, static_cast<char>(greeting.kind));
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>(greeting.generation >> (8 * i) & 0xff);
  return bytes;
}

inline std::optional<Greeting> decode_greeting(std::string_view bytes) {
  if (bytes.size() != 9 || (bytes[0] != 'A' && bytes[0] != 'S')) return std::nullopt;
  Greeting greeting = {.kind = static_cast<Greeting::Kind>(bytes[0])};
  for (size_t i = 0; i < 8; ++i) {
    greeting.generation |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[1 + i])) << (8 * i);
  }
  return greeting;
}

}  // namespace lockstep::launch
