#pragma once

#include <string>
#include <vector>

namespace lockstep::launch {

/// The words in one line, as a shell takes them apart again.
std::string shell_words(const std::vector<std::string>& words);

}  // namespace lockstep::launch
