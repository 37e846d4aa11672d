#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep {

std::string own_release() {
  return LOCKSTEP_VERSION;
}

std::string describe_version(const std::string& release, uint32_t protocol_version) {
  return "Lockstep " + release + " (messages of version " + std::to_string(protocol_version) + ")";
}

std::string own_version() {
  return describe_version(own_release(), kProtocolVersion);
}

}  // namespace lockstep
