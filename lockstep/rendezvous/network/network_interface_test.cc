#include <algorithm>
#include <gmock/gmock.h>
#include <map>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::network_interface_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using Interfaces = std::vector<NetworkInterface>;

NetworkInterface up(const std::string& name, const std::string& address) {
  return {.name = name, .address = address, .is_up = true, .is_loopback = name == "lo"};
}

/// As of a host with two networks, one of them with both families.
const Interfaces kHost = {
    up("lo", "127.0.0.1"),      up("docker0", "172.17.0.1"), up("eth10", "10.10.0.5"),
    up("eth1", "10.1.0.5"),     up("eth0", "192.168.1.5"),   up("lo", "::1"),
    up("eth1", "fd00:1::5"),    up("ib0", "fd00:2::5"),      {.name = "eth2", .address = "10.2.0.5"},
    up("eth0", "2001:db8::65"),
};

std::string choose(const Interfaces& interfaces, const std::string& value, const std::string& route = "") {
  const auto wish = value.empty()
                        ? std::nullopt
                        : std::optional(InterfaceWish{.variable = "LOCKSTEP_SOCKET_IFNAME", .value = value});
  const auto one = choose_interface(interfaces, wish, route);
  return one.name + " " + one.address;
}

TEST(NetworkInterface, TheRouteDecidesWhereNothingIsWished) {
  EXPECT_EQ(choose(kHost, "", "10.1.0.5"), "eth1 10.1.0.5");
  EXPECT_EQ(choose(kHost, "", "fd00:1::5"), "eth1 fd00:1::5");
  EXPECT_EQ(choose(kHost, "", "127.0.0.1"), "lo 127.0.0.1") << "the meeting point is loopback";
  EXPECT_EQ(choose(kHost, "", "172.17.0.1"), "docker0 172.17.0.1");
}

TEST(NetworkInterface, WithoutARouteTheFirstOfAnotherHostsNetworks) {
  EXPECT_EQ(choose(kHost, ""), "eth10 10.10.0.5");
  EXPECT_EQ(choose({up("lo", "127.0.0.1"), up("docker0", "172.17.0.1")}, ""), "docker0 172.17.0.1");
  EXPECT_EQ(choose({up("lo", "127.0.0.1"), up("lo", "::1")}, ""), "lo 127.0.0.1");
  EXPECT_EQ(choose({up("lo", "::1"), up("eth0", "fd00::5")}, ""), "eth0 fd00::5") << "IPv6 only";
  EXPECT_EQ(choose({up("lo", "127.0.0.1"), up("eth0", "fd00::5"), up("eth1", "10.0.0.5")}, "", "fd00::9"),
            "eth0 fd00::5");
}

TEST(NetworkInterface, ByName) {
  EXPECT_EQ(choose(kHost, "eth1"), "eth1 10.1.0.5") << "the whole name comes before eth10";
  EXPECT_EQ(choose(kHost, "eth1", "fd00:9::9"), "eth1 fd00:1::5") << "the family of the route";
  EXPECT_EQ(choose(kHost, "eth"), "eth10 10.10.0.5") << "the first with this beginning";
  EXPECT_EQ(choose(kHost, "eth", "192.168.1.5"), "eth0 192.168.1.5") << "of these, that of the route";
  EXPECT_EQ(choose(kHost, "=eth0"), "eth0 192.168.1.5");
  EXPECT_EQ(choose(kHost, "nothing,ib0,eth0"), "ib0 fd00:2::5") << "the first that is there";
  EXPECT_EQ(choose(kHost, "eth0,ib0"), "eth0 192.168.1.5");
  EXPECT_EQ(choose(kHost, "eth0,eth1", "10.1.0.5"), "eth0 192.168.1.5") << "the user's order";
  EXPECT_EQ(choose(kHost, "lo"), "lo 127.0.0.1");
  EXPECT_EQ(choose(kHost, ",eth0,"), "eth0 192.168.1.5");
}

TEST(NetworkInterface, ByAddress) {
  EXPECT_EQ(choose(kHost, "10.0.0.0/8"), "eth10 10.10.0.5");
  EXPECT_EQ(choose(kHost, "10.1.0.0/16"), "eth1 10.1.0.5");
  EXPECT_EQ(choose(kHost, "192.168.1.4/30"), "eth0 192.168.1.5");
  EXPECT_EQ(choose(kHost, "10.1.0.5"), "eth1 10.1.0.5");
  EXPECT_EQ(choose(kHost, "fd00:1::/32"), "eth1 fd00:1::5");
  EXPECT_EQ(choose(kHost, "2001:db8::/122,ib0"), "ib0 fd00:2::5") << "::65 lies in the next 64";
  EXPECT_EQ(choose(kHost, "2001:db8::/121,ib0"), "eth0 2001:db8::65");
  EXPECT_EQ(choose(kHost, "::/0", "fd00:2::5"), "ib0 fd00:2::5");
}

TEST(NetworkInterface, Exclusion) {
  EXPECT_EQ(choose(kHost, "^eth,docker"), "ib0 fd00:2::5");
  EXPECT_EQ(choose(kHost, "^=eth1,eth10"), "eth0 192.168.1.5");
  EXPECT_EQ(choose(kHost, "^docker,lo", "10.1.0.5"), "eth1 10.1.0.5");
  EXPECT_EQ(choose(kHost, "^10.0.0.0/8", "10.1.0.5"), "eth0 192.168.1.5");
}

TEST(NetworkInterface, WhatDoesNotFitIsNamedWithWhatIsThere) {
  EXPECT_THAT(message_of<c10::ValueError>([] { choose(kHost, "=eth"); }),
              AllOf(HasSubstr("LOCKSTEP_SOCKET_IFNAME is '=eth', but no interface that is up fits it"),
                    HasSubstr("eth1 (10.1.0.5, fd00:1::5)"), HasSubstr("eth2 (10.2.0.5, down)")));
  EXPECT_THAT(message_of<c10::ValueError>([] { choose(kHost, "eth2"); }), HasSubstr("'eth2', but no"));
  EXPECT_THAT(message_of<c10::ValueError>([] { choose({up("lo", "127.0.0.1")}, "^lo"); }),
              HasSubstr("excludes every interface that is up; this host has lo (127.0.0.1)"));
  EXPECT_THAT(message_of<c10::DistNetworkError>([] { choose({}, ""); }), HasSubstr("this host has none"));
  for (const char* value : {"^", "=", ",", "^=", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/-1", "10.0.0.0/8x",
                            "eth0/8", "fd00::/129", "10.0.0/8"}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { choose(kHost, value); }),
                HasSubstr("LOCKSTEP_SOCKET_IFNAME is '" + std::string(value) + "': "))
        << value;
  }
}

TEST(NetworkInterface, LockstepsVariableComesBeforeGloosAndNccls) {
  std::map<std::string, std::string> variables;
  const auto wish = [&] {
    const auto found = read_interface_wish([&](const char* name) -> std::optional<std::string> {
      const auto one = variables.find(name);
      return one == variables.end() ? std::nullopt : std::optional(one->second);
    });
    return found ? found->variable + "=" + found->value : "none";
  };
  EXPECT_EQ(wish(), "none");
  variables["NCCL_SOCKET_IFNAME"] = "^lo,docker";
  EXPECT_EQ(wish(), "NCCL_SOCKET_IFNAME=^lo,docker");
  variables["GLOO_SOCKET_IFNAME"] = "eth0";
  EXPECT_EQ(wish(), "GLOO_SOCKET_IFNAME=eth0");
  variables["LOCKSTEP_SOCKET_IFNAME"] = "eth1";
  EXPECT_EQ(wish(), "LOCKSTEP_SOCKET_IFNAME=eth1");
  variables["LOCKSTEP_SOCKET_IFNAME"] = "";
  EXPECT_EQ(wish(), "GLOO_SOCKET_IFNAME=eth0");
}

TEST(NetworkInterface, OfThisHost) {
  const auto interfaces = network_interfaces();
  const auto loopback = interface_between_hosts("127.0.0.1");
  EXPECT_TRUE(loopback.is_loopback);
  EXPECT_EQ(interface_between_hosts("localhost"), loopback);
  EXPECT_NE(std::find(interfaces.begin(), interfaces.end(), loopback), interfaces.end());
  const auto by_default = interface_between_hosts("");
  EXPECT_NE(std::find(interfaces.begin(), interfaces.end(), by_default), interfaces.end());
  pretend_host("host-a");
  EXPECT_EQ(interface_between_hosts(""), loopback) << "a pretended host is on this machine";
  pretend_host("");
}

}  // namespace
}  // namespace lockstep::network_interface_test
