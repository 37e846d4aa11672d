#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// The content of a small file, as those of /proc and /sys are, without white space at its end; nothing when it can't be read.
std::optional<std::string> read_kernel_file(const std::string& path);
/// The whole number that such a file holds, if it holds one.
std::optional<int64_t> read_kernel_integer(const std::string& path);

}  // namespace lockstep
