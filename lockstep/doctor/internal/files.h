#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::doctor::internal {

/// Names in a folder, sorted; none when it can't be read.
std::vector<std::string> list_folder(const std::string& path);

/// A file's identity for comparison between hosts: its size and a CRC-32 of its bytes, "4711-89abcdef". Of
/// files beyond 64 MiB every part of the file is sampled, 16 MiB in all. Nothing when it can't be read.
std::optional<std::string> fingerprint_file(const std::string& path);

/// The first executable of this name in PATH; a name with a slash is a path. Nothing when there is none.
std::optional<std::string> find_in_path(const std::string& name);

}  // namespace lockstep::doctor::internal
