#pragma once

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sys/random.h>

#include <c10/util/Exception.h>

namespace lockstep {

/// Bytes that no other process can foretell, for names and tokens; from getrandom(2). Throws c10::Error where
/// the system gives none. Thread-safe.
template <size_t N>
std::array<uint8_t, N> random_bytes() {
  static_assert(N <= 256, "so many come at once");
  std::array<uint8_t, N> bytes{};
  TORCH_CHECK(::getrandom(bytes.data(), N, 0) == static_cast<ssize_t>(N),
              "the system gives no random numbers: ", std::strerror(errno));
  return bytes;
}

}  // namespace lockstep
