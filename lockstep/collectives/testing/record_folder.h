#pragma once

#include <filesystem>
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
    ::setenv("LOCKSTEP_FLIGHT_DIR", path_.c_str(), 1);
  }
  ~RecordFolder() { std::filesystem::remove_all(path_); }
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
  std::string path_;
};

}  // namespace lockstep::flight
