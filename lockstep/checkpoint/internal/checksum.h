#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace lockstep::checkpoint::internal {

/// XXH3-128 of bytes that come in pieces, as `xxhsum -H2` prints it: 32 hexadecimal digits, canonical order.
/// It finds damage; it is no protection against an attacker.
class Checksum {
 public:
  Checksum();
  ~Checksum();

  void update(const void* data, size_t bytes);
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string checksum_of(std::string_view bytes);

}  // namespace lockstep::checkpoint::internal
