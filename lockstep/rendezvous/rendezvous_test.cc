#include <algorithm>
#include <arpa/inet.h>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <numeric>
#include <random>
#include <stdexcept>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/internal/job_file.h>
#include <lockstep/rendezvous/internal/sockets.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::rendezvous_test {
namespace {

using namespace std::chrono_literals;
using rendezvous_internal::JobFile;
using rendezvous_internal::listen_at;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::StartsWith;
using testing::TemporaryFolder;

/// A launcher's variables, left over from whatever started this test, must not matter.
class Rendezvous : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
          "LOCKSTEP_RUN", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
      ::unsetenv(name);
    }
    ::setenv("LOCKSTEP_SOCKET_IFNAME", "lo", 1);  // no test listens on a network
  }
};

/// A free port below those that the kernel gives to others, which no other test program gets until this
/// process ends: tests/ports.py takes the same locks.
uint16_t free_port() {
  constexpr uint16_t kLowest = 20000;
  uint16_t end = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> end;
  std::vector<uint16_t> ports(static_cast<size_t>(std::max(end, kLowest) - kLowest));
  std::iota(ports.begin(), ports.end(), kLowest);
  std::shuffle(ports.begin(), ports.end(), std::mt19937(std::random_device()()));
  const auto folder =
      std::filesystem::temp_directory_path() / ("lockstep-ports-" + std::to_string(::getuid()));
  ::mkdir(folder.c_str(), 0700);
  for (const uint16_t port : ports) {
    UniqueFd lock(::open((folder / std::to_string(port)).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!lock || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) continue;
    try {
      listen_at("127.0.0.1", port, true);
    } catch (const c10::DistNetworkError&) {
      continue;
    }
    lock.release();  // held until this process ends
    return port;
  }
  throw std::runtime_error("no port from 20000 to those of ip_local_port_range is free");
}

std::string tcp(uint16_t port) {
  return "tcp://127.0.0.1:" + std::to_string(port);
}

/// Every rank on a thread: makes a world, sets a key, reads its left neighbour's. "ok" or the error, by rank.
std::vector<std::string> run(const std::vector<int>& ranks, int world_size, RendezvousOptions options,
                             const std::string& value = "v") {
  std::vector<std::string> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i, mine = options]() mutable {
      mine.rank = ranks[i];
      mine.world_size = world_size;
      try {
        auto world = rendezvous(mine);
        auto text = value + std::to_string(world.rank);
        world.store->set(std::to_string(world.rank), std::vector<uint8_t>(text.begin(), text.end()));
        int left = (world.rank + world.world_size - 1) % world.world_size;
        auto bytes = world.store->get(std::to_string(left));
        bool right = std::string(bytes.begin(), bytes.end()) == value + std::to_string(left);
        results[i] = right && world.world_size == world_size ? "ok" : "wrong";
      } catch (const DistTimeoutError& error) {
        results[i] = std::string("timeout: ") + error.what_without_backtrace();
      } catch (const c10::DistNetworkError& error) {
        results[i] = std::string("network: ") + error.what_without_backtrace();
      } catch (const c10::DistStoreError& error) {
        results[i] = std::string("store: ") + error.what_without_backtrace();
      } catch (const std::exception& error) {
        results[i] = std::string("other: ") + error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

TEST_F(Rendezvous, AloneWithoutEnvironment) {
  auto world = rendezvous({.rank = 0, .world_size = 1});
  EXPECT_EQ(world.rank, 0);
  EXPECT_EQ(world.world_size, 1);
  EXPECT_EQ(world.local_rank, 0);
  EXPECT_EQ(world.local_world_size, 1);
  EXPECT_EQ(world.topology.nodes(), 1);
  EXPECT_EQ(world.launcher, "none");
  world.store->set("k", std::vector<uint8_t>{1});
  EXPECT_TRUE(world.store->check({"k"}));
}

TEST_F(Rendezvous, NothingSetShowsTheLineToType) {
  try {
    rendezvous();
    FAIL() << "no rank was given";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("lockstep run --nproc-per-node 2 "), HasSubstr(program_invocation_name)));
  }
}

TEST_F(Rendezvous, Environment) {
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "1", 1);
  ::setenv("LOCAL_RANK", "0", 1);
  ::setenv("LOCAL_WORLD_SIZE", "1", 1);
  ::setenv("MASTER_ADDR", "localhost", 1);
  ::setenv("MASTER_PORT", std::to_string(free_port()).c_str(), 1);
  auto world = rendezvous();
  EXPECT_EQ(world.world_size, 1);
  EXPECT_EQ(world.local_world_size, 1);
  EXPECT_EQ(world.launcher, "environment");
  EXPECT_THROW(rendezvous({.rank = 0, .world_size = 2}), c10::ValueError);
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    ::unsetenv(name);
  }
}

TEST_F(Rendezvous, TcpAgainAndAgain) {
  RendezvousOptions options{.init_method = tcp(free_port()), .timeout = 60s};
  for (const char* value : {"first", "second", "third"}) {
    EXPECT_THAT(run({3, 1, 0, 2}, 4, options, value), Each("ok"));
  }
}

TEST_F(Rendezvous, FileAgainAndAgain) {
  const TemporaryFolder folder;
  const std::string file = folder.path("meet");
  RendezvousOptions options{.init_method = "file://" + file, .timeout = 60s};
  EXPECT_THAT(run({0, 1, 2}, 3, options, "first"), Each("ok"));
  EXPECT_THAT(run({0, 1, 2}, 3, options, "second"), Each("ok"));
  std::filesystem::remove(file);
  EXPECT_THAT(run({0, 1, 2}, 3, options, "third"), Each("ok")) << "after the file was deleted";
}

TEST_F(Rendezvous, GivenStoreAgain) {
  RendezvousOptions options{.store = c10::make_intrusive<c10d::HashStore>(), .timeout = 60s};
  EXPECT_THAT(run({0, 1, 2}, 3, options, "first"), Each("ok"));
  EXPECT_THAT(run({0, 1, 2}, 3, options, "second"), Each("ok"));
}

TEST_F(Rendezvous, MissingRanksAreNamedToAllThatCame) {
  EXPECT_THAT(run({0, 2}, 5, {.init_method = tcp(free_port()), .timeout = 1s}),
              Each(StartsWith("timeout: ranks 1, 3 and 4 of 5 did not join")));
}

TEST_F(Rendezvous, MissingHostIsNamed) {
  auto port = free_port();
  auto results = run({1}, 2, {.init_method = tcp(port), .timeout = 300ms});
  EXPECT_THAT(results[0], AllOf(StartsWith("network: rank 1 could not reach rank 0 at 127.0.0.1 port"),
                                HasSubstr(std::to_string(port)), HasSubstr("connection refused")));
  results = run({1}, 2, {.init_method = "tcp://no-such-host.invalid:1", .timeout = 300ms});
  EXPECT_THAT(results[0], AllOf(StartsWith("network: "), HasSubstr("cannot be resolved")));
}

TEST_F(Rendezvous, AnInterruptionEndsTheWaitForRankZero) {
  struct Stop : std::runtime_error, Interruption {
    Stop() : std::runtime_error("stop") {}
  };
  set_interrupt_check([] { throw Stop(); });
  EXPECT_THROW(rendezvous({.init_method = tcp(free_port()), .rank = 1, .world_size = 2, .timeout = 60s}),
               Stop);
  set_interrupt_check(nullptr);
}

TEST_F(Rendezvous, TwoProcessesWithOneRank) {
  const TemporaryFolder folder;
  for (const auto& method : {tcp(free_port()), "file://" + folder.path("meet")}) {
    EXPECT_THAT(run({0, 1, 1}, 3, {.init_method = method, .timeout = 60s}),
                Each(StartsWith("store: rank 1 of 3 is claimed twice")));
  }
  // Two rank 0 over TCP contend for the port as soon as they are processes; as threads they share its server.
  EXPECT_THAT(run({0, 0}, 2, {.init_method = tcp(free_port()), .timeout = 60s}),
              Each(StartsWith("store: rank 0 of 2 is claimed twice")));
}

TEST_F(Rendezvous, PortInUse) {
  auto holder = listen_at("127.0.0.1", 0, true);
  auto results = run({0}, 2, {.init_method = tcp(holder.port), .timeout = 60s});
  EXPECT_THAT(results[0],
              AllOf(StartsWith("network: "), HasSubstr("port " + std::to_string(holder.port) + " is in use"),
                    HasSubstr("choose another port")));
}

TEST_F(Rendezvous, SomethingElseListensAndIsSilent) {
  auto silent = listen_at("127.0.0.1", 0, true);
  auto results = run({1}, 2, {.init_method = tcp(silent.port), .timeout = 300ms});
  EXPECT_THAT(results[0], AllOf(StartsWith("network: "), HasSubstr("does not answer as a store")));
}

TEST_F(Rendezvous, SomethingElseListensAndAnswersOtherwise) {
  auto foreign = listen_at("127.0.0.1", 0, true);
  std::thread server([&] {
    const std::string answer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    for (int fd = 0; (fd = ::accept(foreign.socket.get(), nullptr, nullptr)) >= 0; ::close(fd)) {
      [[maybe_unused]] auto sent = ::send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
    }
  });
  ::testing::internal::CaptureStderr();
  auto results = run({1}, 2, {.init_method = tcp(foreign.port), .timeout = 1s});
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::shutdown(foreign.socket.get(), SHUT_RDWR);  // ends accept()
  server.join();
  EXPECT_THAT(results[0], AllOf(StartsWith("network: rank 1 could not reach rank 0"),
                                HasSubstr("does not answer as a store")));
  EXPECT_THAT(said, ::testing::Not(HasSubstr("frame #"))) << "TCPStore's stack traces";
}

TEST_F(Rendezvous, RankZeroSaysThatItsNameCannotBeResolved) {
  ::testing::internal::CaptureStderr();
  auto listener = listen_at("no-such-host.invalid", 0, true);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("'no-such-host.invalid' cannot be resolved"), HasSubstr("MASTER_ADDR")));
  EXPECT_NE(listener.port, 0);
}

TEST_F(Rendezvous, BadFilesAreRefusedAtOnce) {
  const TemporaryFolder folder;
  for (const auto& path : {folder.path("missing/meet"), folder.path().string()}) {
    EXPECT_THAT(run({0}, 2, {.init_method = "file://" + path, .timeout = 60s}), Each(HasSubstr(path)));
  }
}

// In a process of its own, for a thread of it goes on reading.
TEST_F(Rendezvous, FileThatEndsInARecordIsNamedAtTheDeadline) {
  testing::run_ranks(1, [](int) {
    const TemporaryFolder folder;
    const std::string file = folder.write("meet", std::string("\x14\0\0\0\0\0\0\0abc", 11));
    EXPECT_THAT(run({0}, 2, {.init_method = "file://" + file, .timeout = 300ms})[0],
                AllOf(StartsWith("store: the file " + file), HasSubstr("delete the file")));
  });
}

TEST_F(Rendezvous, ListensOnAsFewInterfacesAsWillDo) {
  auto bound = [](const rendezvous_internal::ListeningSocket& listener) {
    sockaddr_storage storage{};
    socklen_t size = sizeof(storage);
    EXPECT_EQ(::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&storage), &size), 0);
    if (storage.ss_family == AF_INET6) return std::string("all");
    auto address = ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr);
    return address >> 24 == 127 ? std::string("loopback")
           : address == 0       ? std::string("all")
                                : std::string("one");
  };
  EXPECT_EQ(bound(listen_at("127.0.0.1", 0, false)), "loopback");
  EXPECT_EQ(bound(listen_at("127.1.2.3", 0, false)), "loopback");
  EXPECT_EQ(bound(listen_at("localhost", 0, false)), "loopback");
  EXPECT_EQ(bound(listen_at("0.0.0.0", 0, true)), "loopback");
  EXPECT_EQ(bound(listen_at("198.51.100.77", 0, false)), "loopback")
      << "not an address of this machine: at the interface that is wished";
}

/// A world of each rank, on a thread that pretends its host.
std::vector<World> worlds_on(const std::vector<std::string>& hosts, const std::string& method) {
  std::vector<World> worlds(hosts.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    threads.emplace_back([&, rank] {
      pretend_host(hosts[rank]);
      worlds[rank] = rendezvous({.init_method = method,
                                 .rank = static_cast<int>(rank),
                                 .world_size = static_cast<int>(hosts.size()),
                                 .timeout = 60s});
    });
  }
  for (auto& thread : threads) thread.join();
  return worlds;
}

TEST_F(Rendezvous, TellsOnWhichHostsTheRanksAre) {
  const TemporaryFolder folder;
  for (const auto& method : {tcp(free_port()), "file://" + folder.path("meet")}) {
    const auto worlds = worlds_on({"b", "a", "a", "b", "a"}, method);
    for (const auto& world : worlds) {
      EXPECT_EQ(world.topology.describe(), "2 hosts: b (ranks 0 and 3), a (ranks 1, 2 and 4)");
      EXPECT_EQ(world.topology.rank, world.rank);
      EXPECT_EQ(world.local_rank, world.topology.local_rank());
      EXPECT_EQ(world.local_world_size, world.topology.local_world_size());
      EXPECT_EQ(world.meeting_host, method.starts_with("tcp") ? "127.0.0.1" : "");
    }
    EXPECT_EQ(worlds[4].local_rank, 2);
    EXPECT_EQ(worlds[4].topology.node_rank(), 1);
  }
}

TEST_F(Rendezvous, TheLaunchersNumbersComeBeforeTheTopologys) {
  ::setenv("LOCAL_RANK", "3", 1);
  ::setenv("LOCAL_WORLD_SIZE", "4", 1);
  for (const auto& world : worlds_on({"a", "b"}, tcp(free_port()))) {
    EXPECT_EQ(world.local_rank, 3);
    EXPECT_EQ(world.local_world_size, 4);
    EXPECT_EQ(world.topology.nodes(), 2);
  }
  ::unsetenv("LOCAL_RANK");
  ::unsetenv("LOCAL_WORLD_SIZE");
}

TEST_F(Rendezvous, SixteenAndSixtyFourHosts) {
  for (const int size : {16, 64}) {
    std::vector<std::string> hosts;
    for (int rank = 0; rank < size; ++rank) hosts.push_back("host-" + std::to_string(rank));
    for (const auto& world : worlds_on(hosts, tcp(free_port()))) {
      EXPECT_EQ(world.topology.nodes(), size);
      EXPECT_EQ(world.topology.node_rank(), world.rank);
    }
  }
}

TEST_F(Rendezvous, PortsThatAreChosenLieInTheRange) {
  const auto port = free_port();
  ::setenv("LOCKSTEP_PORT_RANGE", std::to_string(port).c_str(), 1);
  {
    const auto listener = listen_at("127.0.0.1", 0, true);
    EXPECT_EQ(listener.port, port);
    EXPECT_THAT(message_of<c10::DistNetworkError>([] { listen_at("127.0.0.1", 0, true); }),
                HasSubstr("no port of LOCKSTEP_PORT_RANGE (" + std::to_string(port) + "-"));
    EXPECT_NE(listen_at("127.0.0.1", free_port(), true).port, port) << "one that the user gives counts";
  }
  ::setenv("LOCKSTEP_PORT_RANGE", "many", 1);
  EXPECT_THROW(listen_at("127.0.0.1", 0, true), c10::ValueError);
  ::unsetenv("LOCKSTEP_PORT_RANGE");
}

// /etc/hosts has "localhost", in any case; Lockstep takes LOCALHOST for any name there, such as Debian's for the
// host itself.
TEST_F(Rendezvous, ANameThatIsLoopbackHereOnlyIsMetAtTheInterface) {
  ::setenv("LOCKSTEP_SOCKET_IFNAME", "::1", 1);
  try {
    listen_at("::1", 0, true);
  } catch (const c10::DistNetworkError& error) {
    ::setenv("LOCKSTEP_SOCKET_IFNAME", "lo", 1);
    GTEST_SKIP() << "no IPv6 here: " << error.what_without_backtrace();
  }
  EXPECT_EQ(listen_at("LOCALHOST", 0, true).address, "127.0.0.1");
  EXPECT_EQ(listen_at("LOCALHOST", 0, false).address, "::1") << "other hosts must reach it";
  const auto method = "tcp://LOCALHOST:" + std::to_string(free_port());
  EXPECT_THAT(run({0, 1, 2}, 3, {.init_method = method, .timeout = 60s}), Each("ok"));
  ::setenv("LOCKSTEP_SOCKET_IFNAME", "lo", 1);
}

TEST_F(Rendezvous, MeetsAtAnIpv6Address) {
  try {
    listen_at("::1", 0, true);
  } catch (const c10::DistNetworkError& error) {
    GTEST_SKIP() << "no IPv6 here: " << error.what_without_backtrace();
  }
  const auto method = "tcp://[::1]:" + std::to_string(free_port());
  EXPECT_THAT(run({0, 1, 2}, 3, {.init_method = method, .timeout = 60s}), Each("ok"));
}

TEST_F(Rendezvous, JobFileAppearsWholeAndGoesAway) {
  const TemporaryFolder folder;
  JobFile file(folder.path("meet"));
  EXPECT_EQ(file.read(), std::nullopt);
  file.publish(12345);
  EXPECT_EQ(file.read(), 12345);
  file.publish(54321);
  EXPECT_EQ(file.read(), 54321) << "in place of a stale one";
  file.remove();
  EXPECT_EQ(file.read(), std::nullopt);
  std::ofstream(file.path()) << "no port";
  EXPECT_EQ(file.read(), std::nullopt);
  std::filesystem::remove(file.path());
  std::filesystem::create_symlink("/etc/hostname", file.path());
  EXPECT_EQ(file.read(), std::nullopt) << "a link is not followed";
}

TEST_F(Rendezvous, JobFileLiesInAPrivateDirectoryAndTellsJobsApart) {
  const TemporaryFolder folder;
  ::setenv("TMPDIR", folder.path().c_str(), 1);
  auto file = JobFile::of_job("job 1");
  EXPECT_EQ(file.path(), JobFile::of_job("job 1").path());
  EXPECT_NE(file.path(), JobFile::of_job("job 2").path());
  auto parent = std::filesystem::path(file.path()).parent_path();
  struct stat status {};
  ASSERT_EQ(::stat(parent.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700U);
  EXPECT_THAT(parent.string(), StartsWith(folder.path().string()));
  // One that others can enter is not used.
  ASSERT_EQ(::chmod(parent.c_str(), 0755), 0);
  EXPECT_THAT(JobFile::of_job("job 1").path(), ::testing::Not(StartsWith(folder.path().string())));
  ::unsetenv("TMPDIR");
}

}  // namespace
}  // namespace lockstep::rendezvous_test
