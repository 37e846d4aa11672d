#include <algorithm>
#include <cctype>
#include <sstream>
#include <string_view>
#include <system_error>

#include <lockstep/device/nvidia_devices.h>

namespace lockstep {

bool has_nvidia_driver_node(const std::filesystem::path& folder) {
  std::error_code ignored;
  for (const char* node : {"nvidiactl", "dxg", "nvhost-gpu", "nvgpu"}) {
    if (std::filesystem::exists(folder / node, ignored)) return true;
  }
  return false;
}

int count_nvidia_cards(const std::filesystem::path& folder) {
  constexpr std::string_view kBegin = "nvidia";
  int cards = 0;
  std::error_code ignored;
  std::filesystem::directory_iterator entry(folder, ignored), end;
  for (; !ignored && entry != end; entry.increment(ignored)) {
    const std::string name = entry->path().filename();
    cards += name.size() > kBegin.size() && name.starts_with(kBegin) &&
             std::all_of(name.begin() + kBegin.size(), name.end(),
                         [](unsigned char c) { return std::isdigit(c) != 0; });
  }
  return cards;
}

int count_visible_devices(const std::string& value) {
  int devices = 0;
  std::istringstream entries(value);
  for (std::string entry; std::getline(entries, entry, ',');) {
    entry.erase(0, entry.find_first_not_of(" \t"));
    if (entry.empty() || entry[0] == '-' || entry == "NoDevFiles") break;
    ++devices;
  }
  return devices;
}

}  // namespace lockstep
