#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <lockstep/checkpoint/internal/folder_lock.h>

namespace lockstep::testing {

/// A directory of the test's own, which goes with it. Ranks that are started with environment() share their
/// test's.
class Scratch {
 public:
  Scratch() {
    if (const char* shared = std::getenv(kVariable)) {
      path_ = shared;
      return;
    }
    std::string name = std::filesystem::temp_directory_path() / "lockstep-checkpoint-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
    owned_ = true;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    if (owned_) std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  /// Whether this is a rank of the test, which also runs what stands before and between its bodies.
  static bool in_rank() { return std::getenv(kVariable) != nullptr; }
  /// For RunRanksOptions.
  std::vector<std::pair<std::string, std::optional<std::string>>> environment() const {
    return {{kVariable, path_.string()}};
  }

  /// What is in it, sorted, without the lock of managers.
  std::vector<std::string> entries() const { return entries_of(path_); }
  static std::vector<std::string> entries_of(const std::filesystem::path& directory) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      const std::string name = entry.path().filename().string();
      if (name != checkpoint::internal::kLockName) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  static constexpr const char* kVariable = "CHECKPOINT_TEST_DIRECTORY";
  std::filesystem::path path_;
  bool owned_ = false;
};

}  // namespace lockstep::testing
