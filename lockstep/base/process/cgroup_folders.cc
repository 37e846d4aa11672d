#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/process/cgroup_folders.h>

namespace lockstep {
namespace {

/// Whether one of the words between commas is this.
bool lists(const std::string& words, std::string_view word) {
  std::istringstream stream(words);
  for (std::string each; std::getline(stream, each, ',');) {
    if (each == word) return true;
  }
  return false;
}

/// The path after "ID:CONTROLLERS:", which may have colons of its own; version 2 has the ID 0 and no controllers.
std::optional<std::string> path_in(std::string_view cgroups, bool version_2, std::string_view controller) {
  std::istringstream lines{std::string(cgroups)};
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const bool found =
        version_2 ? line.starts_with("0::") : lists(line.substr(first + 1, second - first - 1), controller);
    if (found) return line.substr(second + 1);
  }
  return std::nullopt;
}

/// A path of mountinfo, in which the kernel writes white space and backslashes as "\040".
std::string unescape(const std::string& path) {
  const auto is_octal = [&](size_t at) { return at < path.size() && path[at] >= '0' && path[at] <= '7'; };
  std::string text;
  for (size_t at = 0; at < path.size(); ++at) {
    if (path[at] == '\\' && is_octal(at + 1) && is_octal(at + 2) && is_octal(at + 3)) {
      text += static_cast<char>((path[at + 1] - '0') * 64 + (path[at + 2] - '0') * 8 + (path[at + 3] - '0'));
      at += 3;
    } else {
      text += path[at];
    }
  }
  return text;
}

std::vector<std::string> folders_of(std::string_view cgroups, std::string_view mounts, bool version_2,
                                    std::string_view controller) {
  const auto path = path_in(cgroups, version_2, controller);
  // "/..": outside of this process's namespace of cgroups.
  if (!path || !path->starts_with("/") || *path == "/.." || path->starts_with("/../")) return {};
  std::istringstream lines{std::string(mounts)};
  for (std::string line; std::getline(lines, line);) {
    std::istringstream stream(line);
    const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 6 || words.end() - dash < 4) continue;
    if (dash[1] != (version_2 ? "cgroup2" : "cgroup") || (!version_2 && !lists(dash[3], controller)))
      continue;
    std::string root = unescape(words[3]);  // the part of the hierarchy that is mounted
    if (root == "/") root.clear();
    if (*path != root && !path->starts_with(root + "/")) continue;
    const std::string point = unescape(words[4]);
    std::vector<std::string> folders;
    for (std::string below = *path == "/" ? "" : path->substr(root.size());; below.resize(below.rfind('/'))) {
      folders.push_back(point + below);
      if (below.empty()) return folders;
    }
  }
  return {};
}

}  // namespace

CgroupFolders cgroup_folders(std::string_view cgroups, std::string_view mounts, std::string_view controller) {
  return {folders_of(cgroups, mounts, true, controller), folders_of(cgroups, mounts, false, controller)};
}

CgroupFolders own_cgroup_folders(std::string_view controller, const std::string& root) {
  CgroupFolders folders =
      cgroup_folders(read_kernel_file(root + "/proc/self/cgroup").value_or(""),
                     read_kernel_file(root + "/proc/self/mountinfo").value_or(""), controller);
  for (auto* each : {&folders.version_2, &folders.version_1}) {
    for (std::string& folder : *each) folder.insert(0, root);
  }
  return folders;
}

}  // namespace lockstep
