#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/rendezvous/network/no_reverse_lookups.h>

namespace lockstep::no_reverse_lookups_test {
namespace {

/// What getnameinfo() says of an address for which no name is in /etc/hosts.
int name_of_address(const char* numeric) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  EXPECT_EQ(::inet_pton(AF_INET6, numeric, &address.sin6_addr), 1);
  char name[NI_MAXHOST];
  return ::getnameinfo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), name, sizeof(name),
                       nullptr, 0, NI_NAMEREQD);
}

TEST(NoReverseLookups, AnAddressHasNoName) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      const NoReverseLookups guard;
      // EAI_AGAIN without a name server that answers, and a name where one knows it.
      EXPECT_EQ(name_of_address("::ffff:8.8.8.8"), EAI_NONAME);
      EXPECT_EQ(name_of_address("2001:db8::1"), EAI_NONAME);
    });
  }
}

}  // namespace
}  // namespace lockstep::no_reverse_lookups_test
