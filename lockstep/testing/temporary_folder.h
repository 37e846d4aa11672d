#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

namespace lockstep::testing {

/// A new folder for a test's files, removed with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() : TemporaryFolder(nullptr) {}
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    if (owned_) std::filesystem::remove_all(path_, ignored);
  }

  const std::filesystem::path& path() const { return path_; }
  std::string path(const std::string& name) const { return (path_ / name).string(); }
  /// Writes the file, and makes the folders above it; returns its path.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream file(path_ / name, std::ios::binary | std::ios::trunc);
    file << bytes << std::flush;
    TORCH_CHECK(file.good(), "cannot write ", path(name));
    return path(name);
  }
  /// The names of what is in a folder, sorted.
  static std::vector<std::string> entries_of(const std::filesystem::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::vector<std::string> entries() const { return entries_of(path_); }

 protected:
  /// With a path: the folder of another process, which removes it.
  explicit TemporaryFolder(const char* others) : owned_(others == nullptr) {
    std::string name = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
    TORCH_CHECK(!owned_ || ::mkdtemp(name.data()) != nullptr, "cannot make a folder like ", name);
    path_ = owned_ ? name : others;
  }

 private:
  std::filesystem::path path_;
  bool owned_;
};

/// All of a file; nothing where it can't be read.
inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The same folder in a test and in its ranks: those that run_ranks() starts with environment().
class SharedFolder : public TemporaryFolder {
 public:
  SharedFolder() : TemporaryFolder(std::getenv(kVariable)) {}

  /// Whether this is a rank of the test, which also runs what stands before and between its bodies.
  static bool in_rank() { return std::getenv(kVariable) != nullptr; }
  /// For RunRanksOptions.
  std::vector<std::pair<std::string, std::optional<std::string>>> environment() const {
    return {{kVariable, path().string()}};
  }

 private:
  static constexpr const char* kVariable = "LOCKSTEP_TEST_FOLDER";
};

}  // namespace lockstep::testing
