#include <algorithm>
#include <gmock/gmock.h>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/rendezvous/topology.h>

namespace lockstep::topology_test {
namespace {

using ::testing::ElementsAre;

HostIdentity host(const std::string& name, uint64_t network = 1) {
  return {.boot_id = "boot-" + name,
          .network_namespace = network,
          .pid_namespace = 1,
          .user_namespace = 1,
          .hostname = name};
}

TEST(Topology, HostsStandInTheOrderOfTheirFirstRanks) {
  const auto b = host("b");
  const auto a = host("a");
  const auto topology = Topology::make({b, a, a, b, a}, 4);
  ASSERT_EQ(topology.nodes(), 2);
  EXPECT_TRUE(topology.spans_hosts());
  EXPECT_THAT(topology.ranks_by_host(), ElementsAre(ElementsAre(0, 3), ElementsAre(1, 2, 4)));
  EXPECT_THAT(topology.host_of, ElementsAre(0, 1, 1, 0, 1));
  EXPECT_EQ(topology.node_rank(), 1);
  EXPECT_EQ(topology.local_rank(), 2);
  EXPECT_EQ(topology.local_world_size(), 3);
  EXPECT_EQ(topology.host_name(3), "b");
  EXPECT_EQ(topology.describe(), "2 hosts: b (ranks 0 and 3), a (ranks 1, 2 and 4)");
}

TEST(Topology, ContainersOfOneNameAreHostsOfTheirOwn) {
  const auto topology = Topology::make({host("a", 1), host("a", 2), host("a", 3)}, 0);
  EXPECT_EQ(topology.nodes(), 3);
  EXPECT_EQ(topology.describe(), "3 hosts: a (rank 0), a#2 (rank 1), a#3 (rank 2)");
}

TEST(Topology, OfAProcessAlone) {
  for (const auto& topology : {Topology{}, Topology::make({host("a")}, 0)}) {
    EXPECT_EQ(topology.nodes(), 1);
    EXPECT_FALSE(topology.spans_hosts());
    EXPECT_EQ(topology.node_rank(), 0);
    EXPECT_EQ(topology.local_rank(), 0);
    EXPECT_EQ(topology.local_world_size(), 1);
  }
}

TEST(Topology, OfAPartOfTheRanksHasNewNumbers) {
  const auto whole = Topology::make({host("a"), host("a"), host("b"), host("c"), host("c")}, 3);
  const auto part = whole.among({4, 3, 1}, 1);
  EXPECT_EQ(part.describe(), "2 hosts: c (ranks 0 and 1), a (rank 2)");
  EXPECT_THAT(part.host_of, ElementsAre(0, 0, 1));
  EXPECT_EQ(part.local_rank(), 1);
  EXPECT_EQ(part.node_rank(), 0);
}

/// Against the definition: two ranks have one host exactly if their identities are equal.
TEST(Topology, RandomIdentities) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto below = [&](int end) { return std::uniform_int_distribution<int>(0, end - 1)(random); };
    std::vector<HostIdentity> identities(static_cast<size_t>(1 + below(20)));
    for (auto& identity : identities) {
      identity = {.boot_id = std::to_string(below(2)),
                  .network_namespace = static_cast<uint64_t>(below(2)),
                  .pid_namespace = static_cast<uint64_t>(below(2)),
                  .user_namespace = static_cast<uint64_t>(below(2)),
                  .hostname = std::to_string(below(2))};
    }
    const int size = static_cast<int>(identities.size());
    const auto topology = Topology::make(identities, below(size));
    ASSERT_EQ(static_cast<int>(topology.host_of.size()), size);
    int ranks = 0;
    int last_first = -1;
    for (const auto& host : topology.hosts) {
      ranks += static_cast<int>(host.ranks.size());
      ASSERT_TRUE(std::is_sorted(host.ranks.begin(), host.ranks.end()));
      ASSERT_GT(host.ranks.front(), last_first);
      last_first = host.ranks.front();
    }
    EXPECT_EQ(ranks, size);
    EXPECT_EQ(topology.neighbours()[static_cast<size_t>(topology.local_rank())], topology.rank);
    for (size_t a = 0; a < identities.size(); ++a) {
      for (size_t b = 0; b < identities.size(); ++b) {
        EXPECT_EQ(topology.host_of[a] == topology.host_of[b], identities[a] == identities[b]);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::topology_test
