#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/bench/internal/output_file.h>

namespace lockstep::bench::internal {

void check_output_path(const std::string& option, const std::string& path) {
  if (path.empty() || path == "-") return;
  const std::filesystem::path file(path);
  TORCH_CHECK_VALUE(!std::filesystem::is_directory(file), option, " '", path,
                    "' is a directory; name a file in it");
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  const std::string& checked = ::access(path.c_str(), F_OK) == 0 ? path : folder.string();
  TORCH_CHECK_VALUE(::access(checked.c_str(), W_OK) == 0, option, " '", path, "' can't be written: ", checked,
                    ": ", std::strerror(errno));
}

void write_output(const std::string& path, const std::string& text) {
  if (path.empty()) return;
  if (path == "-") {
    std::cout << text << std::flush;
    return;
  }
  std::ofstream file(path, std::ios::trunc);
  file << text << std::flush;
  TORCH_CHECK(file, "the results can't be written to '", path, "': ", std::strerror(errno));
}

}  // namespace lockstep::bench::internal
