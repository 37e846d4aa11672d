#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// "0-3,8" as the kernel writes sets of cores → {0, 1, 2, 3, 8}. Empty for text of another form, and for
/// numbers beyond 2^20, which no kernel has.
std::vector<int> parse_cpu_list(const std::string& text);

/// {0, 1, 2, 3, 8} → "0-3,8".
std::string format_cpu_list(const std::vector<int>& cores);

}  // namespace lockstep
