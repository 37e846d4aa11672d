#include <arpa/inet.h>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <string>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/network/port_range.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::port_range_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

TEST(PortRange, Parse) {
  const auto range = PortRange::parse("20000-20100");
  EXPECT_EQ(range.first, 20000);
  EXPECT_EQ(range.last, 20100);
  EXPECT_EQ(range.count(), 101);
  EXPECT_EQ(range.to_string(), "20000-20100");
  EXPECT_EQ(PortRange::parse("7").to_string(), "7-7");
  EXPECT_EQ(PortRange::parse("1-65535").count(), 65535);
}

TEST(PortRange, RefusesWhatIsNone) {
  for (const char* text : {"", "a", "1-", "-1", "2-1", "0-5", "1-65536", "1:2", "1-2-3", "1-2 ", " 1", "1 -2",
                           "99999999999", "+1-2"}) {
    EXPECT_THAT(
        message_of<c10::ValueError>([&] { PortRange::parse(text); }),
        AllOf(HasSubstr("LOCKSTEP_PORT_RANGE is '" + std::string(text) + "'"), HasSubstr("20000-20100")));
  }
}

/// At loopback.
UniqueFd listen_anywhere() {
  sockaddr_storage storage{};
  auto& address = reinterpret_cast<sockaddr_in&>(storage);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return listen_tcp(storage, sizeof(address));
}

uint16_t port_of(const UniqueFd& socket) {
  sockaddr_in bound{};
  socklen_t size = sizeof(bound);
  EXPECT_EQ(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound), &size), 0);
  return ntohs(bound.sin_port);
}

TEST(PortRange, ListensAtTheLowestFreePort) {
  const auto first = listen_anywhere();
  ASSERT_TRUE(first) << "any port";
  const auto taken = std::to_string(port_of(first));
  ::setenv("LOCKSTEP_PORT_RANGE", taken.c_str(), 1);
  EXPECT_FALSE(listen_anywhere());
  EXPECT_EQ(errno, EADDRINUSE);
  ::setenv("LOCKSTEP_PORT_RANGE", (taken + "-65535").c_str(), 1);
  const auto second = listen_anywhere();
  ASSERT_TRUE(second);
  EXPECT_GT(port_of(second), port_of(first));
  ::unsetenv("LOCKSTEP_PORT_RANGE");
}

TEST(PortTurn, IsOnesAtATime) {
  ::setenv("LOCKSTEP_PORT_RANGE", "20000-60000", 1);
  std::atomic<int> holders = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        const PortTurn turn("127.0.0.1");
        EXPECT_EQ(++holders, 1);
        std::this_thread::yield();
        --holders;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  ::unsetenv("LOCKSTEP_PORT_RANGE");
}

TEST(PortTurn, SaysThatNoPortIsFree) {
  const auto taken = listen_anywhere();
  const auto port = std::to_string(port_of(taken));
  EXPECT_NO_THROW(PortTurn("127.0.0.1")) << "without a range the kernel chooses";
  ::setenv("LOCKSTEP_PORT_RANGE", port.c_str(), 1);
  EXPECT_THAT(
      message_of<c10::DistNetworkError>([] { PortTurn("127.0.0.1"); }),
      AllOf(HasSubstr("no port of LOCKSTEP_PORT_RANGE (" + port + "-" + port + ") is free at 127.0.0.1"),
            HasSubstr("wider range")));
  ::unsetenv("LOCKSTEP_PORT_RANGE");
}

}  // namespace
}  // namespace lockstep::port_range_test
