#pragma once

#include <cstdlib>
#include <optional>
#include <string>

#include <lockstep/testing/temporary_folder.h>

namespace lockstep::flight {

/// A new folder where this process's records go.
class RecordFolder : public testing::TemporaryFolder {
 public:
  RecordFolder() {
    if (const char* value = std::getenv(kVariable)) before_ = value;
    ::setenv(kVariable, path().c_str(), 1);
  }
  ~RecordFolder() { before_ ? ::setenv(kVariable, before_->c_str(), 1) : ::unsetenv(kVariable); }

 private:
  static constexpr const char* kVariable = "LOCKSTEP_FLIGHT_DIR";

  std::optional<std::string> before_;
};

}  // namespace lockstep::flight
