#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <ifaddrs.h>
#include <memory>
#include <net/if.h>
#include <string_view>
#include <tuple>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/internal/resolve.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/socket_address.h>

namespace lockstep {
namespace {

using rendezvous_internal::is_numeric_or_localhost;
using rendezvous_internal::resolve;
using rendezvous_internal::source_address_for;

/// The bits of an address, 32 or 128.
struct AddressBits {
  std::array<uint8_t, 16> bytes{};
  int count = 0;
};

std::optional<AddressBits> bits_of(const std::string& address) {
  AddressBits bits;
  if (::inet_pton(AF_INET, address.c_str(), bits.bytes.data()) == 1) {
    bits.count = 32;
  } else if (::inet_pton(AF_INET6, address.c_str(), bits.bytes.data()) == 1) {
    bits.count = 128;
  } else {
    return std::nullopt;
  }
  return bits;
}

bool is_v6(const std::string& address) {
  return address.find(':') != std::string::npos;
}

/// One item of a wish.
struct Pattern {
  std::string name = {};  // empty: a range of addresses
  bool exact = false;     // the whole name
  AddressBits network = {};
  int prefix_bits = 0;

  bool fits(const NetworkInterface& interface) const {
    if (!name.empty()) return exact ? interface.name == name : interface.name.starts_with(name);
    const auto bits = bits_of(interface.address);
    if (!bits || bits->count != network.count) return false;
    for (int bit = 0; bit < prefix_bits; ++bit) {
      const auto byte = static_cast<size_t>(bit / 8);
      if (((bits->bytes[byte] ^ network.bytes[byte]) >> (7 - bit % 8) & 1) != 0) return false;
    }
    return true;
  }
};

struct Patterns {
  std::vector<Pattern> items = {};
  bool exclude = false;

  bool fit(const NetworkInterface& interface) const {
    return std::any_of(items.begin(), items.end(), [&](const auto& item) { return item.fits(interface); });
  }
};

/// "eth0 (10.0.0.5, fd00::5), eth1 (10.1.0.5, down)"
std::string list_interfaces(const std::vector<NetworkInterface>& interfaces) {
  std::vector<std::pair<std::string, std::string>> addresses;  // by name
  for (const auto& interface : interfaces) {
    const std::string text = interface.address + (interface.is_up ? "" : ", down");
    const auto known = std::find_if(addresses.begin(), addresses.end(),
                                    [&](const auto& entry) { return entry.first == interface.name; });
    if (known == addresses.end()) {
      addresses.emplace_back(interface.name, text);
    } else {
      known->second += ", " + text;
    }
  }
  std::string all;
  for (const auto& [name, text] : addresses) all += (all.empty() ? "" : ", ") + name + " (" + text + ")";
  return all.empty() ? "none" : all;
}

[[noreturn]] void refuse_item(const InterfaceWish& wish, const std::string& what) {
  TORCH_CHECK_VALUE(false, "environment variable ", wish.variable, " is '", wish.value, "': ", what,
                    "; write interfaces' names, beginnings of names, or address ranges as 10.0.0.0/8, with "
                    "commas between, and ^ in front to exclude them");
}

Pattern parse_item(const InterfaceWish& wish, const std::string& item, bool exact) {
  Pattern pattern;
  const auto slash = item.find('/');
  const auto network = bits_of(item.substr(0, slash));
  if (!network) {
    if (slash != std::string::npos) refuse_item(wish, "'" + item + "' is no range of addresses");
    pattern.name = item;
    pattern.exact = exact;
    return pattern;
  }
  pattern.network = *network;
  pattern.prefix_bits = network->count;
  if (slash == std::string::npos) return pattern;
  const auto bits = parse_number<int>(std::string_view(item).substr(slash + 1));
  if (!bits || *bits < 0 || *bits > network->count) {
    refuse_item(wish, "'" + item + "' has no number from 0 to " + std::to_string(network->count) +
                          " after its slash");
  }
  pattern.prefix_bits = *bits;
  return pattern;
}

Patterns parse_wish(const InterfaceWish& wish) {
  Patterns patterns;
  size_t at = 0;
  const auto skip = [&](char sign) {
    const bool there = at < wish.value.size() && wish.value[at] == sign;
    if (there) ++at;
    return there;
  };
  patterns.exclude = skip('^');
  const bool exact = skip('=');
  while (at < wish.value.size()) {
    const size_t end = std::min(wish.value.find(',', at), wish.value.size());
    const std::string item = wish.value.substr(at, end - at);
    at = end + 1;
    if (!item.empty()) patterns.items.push_back(parse_item(wish, item, exact));
  }
  if (patterns.items.empty()) refuse_item(wish, "it names no interface");
  return patterns;
}

/// Bridges and cables of containers and virtual machines, which mostly lead to no other host.
bool is_of_containers(const std::string& name) {
  static constexpr std::array kBeginnings = {"docker", "br-", "virbr", "veth", "podman", "cni"};
  return std::any_of(kBeginnings.begin(), kBeginnings.end(),
                     [&](const char* begin) { return name.starts_with(begin); });
}

/// The best of some, all of which are up; null without any.
const NetworkInterface* best_of(const std::vector<const NetworkInterface*>& some, const std::string& name,
                                const std::string& route) {
  const auto badness = [&](const NetworkInterface* one) {
    return std::tuple(one->name != name, one->address != route, one->is_loopback, is_of_containers(one->name),
                      is_v6(one->address) != is_v6(route));
  };
  const auto best =
      std::min_element(some.begin(), some.end(), [&](auto a, auto b) { return badness(a) < badness(b); });
  return best == some.end() ? nullptr : *best;
}

/// From which address this host reaches others, by its default route; IPv4's first.
std::string default_route() {
  // Addresses for documentation, in no network: they are reached by the default route, if at all.
  for (const char* anywhere : {"203.0.113.1", "2001:db8::1"}) {
    std::string why;
    for (const auto& address : resolve(anywhere, 9, why)) {
      if (auto source = source_address_for(address); !source.empty()) return source;
    }
  }
  return "";
}

std::string route_to(const std::string& host) {
  std::string why;
  const bool means_the_same_everywhere = is_numeric_or_localhost(host);
  for (const auto& address : resolve(host, 9, why)) {
    if (address.is_loopback() && !means_the_same_everywhere) continue;
    if (auto source = source_address_for(address); !source.empty()) return source;
  }
  return default_route();
}

}  // namespace

std::optional<InterfaceWish> read_interface_wish(const Lookup& lookup) {
  for (const char* name : {"LOCKSTEP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    if (auto value = lookup(name); value && !value->empty()) {
      return InterfaceWish{.variable = name, .value = *value};
    }
  }
  return std::nullopt;
}

std::vector<NetworkInterface> network_interfaces() {
  ifaddrs* found = nullptr;
  if (::getifaddrs(&found) != 0) {
    C10_THROW_ERROR(DistNetworkError,
                    c10::str("this host's network interfaces can't be listed: ", std::strerror(errno)));
  }
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(found, &::freeifaddrs);
  std::vector<NetworkInterface> interfaces;
  for (const ifaddrs* one = found; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    SocketAddress address;
    address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.storage, one->ifa_addr, address.size);
    if (address.is_link_local()) continue;
    constexpr unsigned kUp = IFF_UP | IFF_RUNNING;
    interfaces.push_back({.name = one->ifa_name,
                          .address = address.text(),
                          .is_up = (one->ifa_flags & kUp) == kUp,
                          .is_loopback = (one->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return interfaces;
}

NetworkInterface choose_interface(const std::vector<NetworkInterface>& interfaces,
                                  const std::optional<InterfaceWish>& wish, const std::string& route) {
  const Patterns patterns = wish ? parse_wish(*wish) : Patterns{.items = {}, .exclude = true};
  const auto pick = [&](const std::string& name, auto fits) {
    std::vector<const NetworkInterface*> some;
    for (const auto& one : interfaces) {
      if (one.is_up && fits(one)) some.push_back(&one);
    }
    return best_of(some, name, route);
  };
  if (patterns.exclude) {
    if (const auto* one = pick("", [&](const auto& interface) { return !patterns.fit(interface); })) {
      return *one;
    }
  } else {
    for (const Pattern& item : patterns.items) {
      if (const auto* one = pick(item.name, [&](const auto& interface) { return item.fits(interface); })) {
        return *one;
      }
    }
  }
  const std::string existing = "; this host has " + list_interfaces(interfaces);
  if (!wish) C10_THROW_ERROR(DistNetworkError, "no network interface with an address is up" + existing);
  TORCH_CHECK_VALUE(
      false, "environment variable ", wish->variable, " is '", wish->value, "', but ",
      patterns.exclude ? "it excludes every interface that is up" : "no interface that is up fits it",
      existing);
}

NetworkInterface interface_between_hosts(const std::string& meeting_host) {
  const std::string route = this_host().is_pretended() ? "127.0.0.1"
                            : meeting_host.empty()     ? default_route()
                                                       : route_to(meeting_host);
  return choose_interface(network_interfaces(), read_interface_wish(environment::text), route);
}

}  // namespace lockstep
