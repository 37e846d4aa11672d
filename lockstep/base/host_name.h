#pragma once

#include <array>
#include <string>
#include <unistd.h>

namespace lockstep {

/// gethostname(2); empty where the system does not tell.
inline std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace lockstep
