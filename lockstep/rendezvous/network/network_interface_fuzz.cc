// Which interface and which ports a user wants: any text is understood or a c10::ValueError.
#include <cstdlib>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/port_range.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::network_interface_fuzz {
namespace {

void choose_with(const std::string& value) {
  const std::vector<NetworkInterface> interfaces = {
      {.name = "lo", .address = "127.0.0.1", .is_up = true, .is_loopback = true},
      {.name = "eth0", .address = "10.0.0.5", .is_up = true},
      {.name = "eth0", .address = "fd00::5", .is_up = true},
      {.name = "eth1", .address = "10.1.0.5"},
  };
  try {
    const InterfaceWish wish{.variable = "LOCKSTEP_SOCKET_IFNAME", .value = value};
    if (!choose_interface(interfaces, wish, "10.0.0.5").is_up) std::abort();
  } catch (const c10::ValueError&) {
    // what is documented
  }
}

void parse_range(const std::string& text) {
  try {
    const auto range = PortRange::parse(text);
    if (range.first < 1 || range.last < range.first) std::abort();
    if (PortRange::parse(range.to_string()).to_string() != range.to_string()) std::abort();
  } catch (const c10::ValueError&) {
    // what is documented
  }
}

std::vector<std::string> seeds() {
  return {"eth0",     "=eth0,ib0",   "^docker,lo", "^=eth1", "10.0.0.0/8,fd00::/64",
          "10.0.0.5", "20000-20100", "7"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(network_interface, seeds) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  choose_with(text);
  parse_range(text);
  return 0;
}

}  // namespace lockstep::network_interface_fuzz
