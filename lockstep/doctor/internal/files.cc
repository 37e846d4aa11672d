#include <algorithm>
#include <array>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <unistd.h>
#include <zlib.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/doctor/internal/files.h>

namespace lockstep::doctor::internal {

std::vector<std::string> list_folder(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(path, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<std::string> fingerprint_file(const std::string& path) {
  constexpr int64_t kWhole = 64 << 20;
  constexpr int64_t kSamples = 64;
  constexpr int64_t kBlock = 256 << 10;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return std::nullopt;
  const auto size = static_cast<int64_t>(file.tellg());
  if (size < 0) return std::nullopt;
  const bool sampled = size > kWhole;
  const int64_t blocks = sampled ? kSamples : (size + kBlock - 1) / kBlock;
  std::string block(kBlock, '\0');
  uLong sum = ::crc32(0, nullptr, 0);
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t at = sampled ? (size - kBlock) / (kSamples - 1) * i : kBlock * i;
    // The last sample goes up to the end.
    file.seekg(sampled && i + 1 == blocks ? size - kBlock : at);
    file.read(block.data(), std::min(kBlock, size - at));
    if (file.gcount() <= 0) return std::nullopt;
    sum = ::crc32(sum, reinterpret_cast<const Bytef*>(block.data()), static_cast<uInt>(file.gcount()));
  }
  std::ostringstream text;
  text << size << '-' << std::hex << sum;
  return text.str();
}

std::optional<std::string> find_in_path(const std::string& name) {
  const auto executable = [](const std::string& path) {
    std::error_code error;
    return std::filesystem::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
  };
  if (name.find('/') != std::string::npos) return executable(name) ? std::optional(name) : std::nullopt;
  std::istringstream folders(environment::text("PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (executable(path)) return path;
  }
  return std::nullopt;
}

}  // namespace lockstep::doctor::internal
