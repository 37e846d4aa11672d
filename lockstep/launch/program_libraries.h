#pragma once

#include <string>
#include <vector>

namespace lockstep::launch {

/// Whether a process of the program would load the library that this process has: the loader says so, for an executable that
/// needs glibc's. `environment`: as "NAME=value".
bool links_this_library(const std::string& program, const std::vector<std::string>& environment);

}  // namespace lockstep::launch
