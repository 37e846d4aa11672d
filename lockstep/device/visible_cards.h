#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// PCI addresses of the cards that this process sees, by the index that CUDA gives them ("0000:65:00.0", as in
/// /sys/bus/pci/devices), from NVIDIA's driver library (libcuda.so.1), which is loaded at run time. Makes no context on a card.
/// Throws c10::ValueError that says why where there is no driver, it does not work, or shows no card.
std::vector<std::string> visible_card_addresses();

}  // namespace lockstep
