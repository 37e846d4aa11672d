#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/checkpoint/internal/folder_lock.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::testing {

/// A folder for checkpoints, which the test and its ranks share.
class Scratch : public SharedFolder {
 public:
  /// What is in it, sorted, without the lock of managers.
  std::vector<std::string> entries() const { return entries_of(path()); }
  static std::vector<std::string> entries_of(const std::filesystem::path& directory) {
    auto names = SharedFolder::entries_of(directory);
    std::erase(names, checkpoint::internal::kLockName);
    return names;
  }
};

}  // namespace lockstep::testing
