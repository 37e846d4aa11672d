#pragma once

#include <cerrno>
#include <cstddef>
#include <fcntl.h>
#include <optional>
#include <string>
#include <unistd.h>

#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// The first bytes of a file that may be anything, `most` of them or all that it has. None, and errno, where it can't be
/// opened or read.
inline std::optional<std::string> read_at_most(const std::string& path, size_t most) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::string text(most, '\0');
  size_t filled = 0;
  while (filled < most) {
    const ssize_t got = ::read(file.get(), text.data() + filled, most - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return std::nullopt;
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  text.resize(filled);
  return text;
}

}  // namespace lockstep
