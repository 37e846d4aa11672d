#pragma once

#include <filesystem>
#include <string>

/// What NVIDIA's driver and its variable say of cards without being loaded or asked.
namespace lockstep {

/// Whether the folder (/dev) has a device node of NVIDIA's driver, on Linux, WSL or Tegra.
bool has_nvidia_driver_node(const std::filesystem::path& folder);

/// How many cards have a node there: nvidia0, nvidia1, … On WSL there is one node, dxg, for all.
int count_nvidia_cards(const std::filesystem::path& folder);

/// How many entries a value of CUDA_VISIBLE_DEVICES has, as the driver reads it: up to the first that is no
/// device. 0 hides all.
int count_visible_devices(const std::string& value);

}  // namespace lockstep
