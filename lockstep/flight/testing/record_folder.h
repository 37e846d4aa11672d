#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <stdlib.h>
#include <string>

#include <c10/util/Exception.h>

namespace lockstep::flight {

/// A new directory where this process's records go.
class RecordFolder {
 public:
  RecordFolder() {
    path_ = (std::filesystem::temp_directory_path() / "lockstep-flight-test-XXXXXX").string();
    TORCH_CHECK(::mkdtemp(path_.data()) != nullptr, "cannot make a temporary folder");
    if (const char* value = std::getenv(kVariable)) before_ = value;
    ::setenv(kVariable, path_.c_str(), 1);
  }
  ~RecordFolder() {
    before_ ? ::setenv(kVariable, before_->c_str(), 1) : ::unsetenv(kVariable);
    std::filesystem::remove_all(path_);
  }
  RecordFolder(const RecordFolder&) = delete;
  RecordFolder& operator=(const RecordFolder&) = delete;

  std::string path(const std::string& name = "") const { return name.empty() ? path_ : path_ + "/" + name; }
  std::set<std::string> files() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.insert(entry.path().filename());
    return names;
  }

 private:
  static constexpr const char* kVariable = "LOCKSTEP_FLIGHT_DIR";

  std::string path_;
  std::optional<std::string> before_;
};

}  // namespace lockstep::flight
