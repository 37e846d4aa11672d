#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep {

/// One address of a network interface of this host; an interface with several addresses stands several times.
struct NetworkInterface {
  std::string name = {};
  std::string address = {};  ///< numeric, IPv4 or IPv6
  bool is_up = false;        ///< and has a carrier
  bool is_loopback = false;

  bool operator==(const NetworkInterface&) const = default;
};

/// Which interfaces the user wants.
struct InterfaceWish {
  std::string variable = {};
  std::string value = {};
};

/// LOCKSTEP_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME; nothing where none is set.
std::optional<InterfaceWish> read_interface_wish(const Lookup& lookup);

/// All interfaces that have an address, in the kernel's order. IPv6 link-local addresses are left out: they
/// mean something together with an interface only. Throws c10::DistNetworkError.
std::vector<NetworkInterface> network_interfaces();

/// The interface, and its address, for traffic between hosts. A pure function.
///
/// The wish is a list with commas. Its items are names (eth0), beginnings of names (eth), addresses and
/// ranges of them (10.0.0.0/8, fd00::/8); the first item that fits an interface which is up decides, and an
/// exact name comes before longer ones. A leading = asks for exact names, a leading ^ excludes what the list
/// says (NCCL's rules).
/// Where nothing is wished, or something excluded: the interface that has the address `route`, from which
/// this host reaches the job's meeting point; without one, the first that is up, loopback and interfaces of
/// containers (docker0, virbr0, …) last. Of an interface's addresses it is `route`, else one of route's
/// family, which is IPv4 where there is no route.
///
/// Throws c10::ValueError that names variable, value and the interfaces that exist, when the wish is
/// malformed or no interface that is up fits it; c10::DistNetworkError when no interface is up.
NetworkInterface choose_interface(const std::vector<NetworkInterface>& interfaces,
                                  const std::optional<InterfaceWish>& wish, const std::string& route);

/// choose_interface() of this host's interfaces, as the environment wishes. `meeting_host` is
/// World::meeting_host. Where it is loopback, so is the interface, as on a host that a test pretends; where
/// it is "", or a name that this host maps to loopback (Debian's 127.0.1.1), the default route decides. Asks
/// the kernel and the name service for addresses; sends nothing, and asks no name of an address.
NetworkInterface interface_between_hosts(const std::string& meeting_host);

}  // namespace lockstep
