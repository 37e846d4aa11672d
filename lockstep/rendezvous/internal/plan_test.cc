#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/rendezvous/internal/plan.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::rendezvous_internal::plan_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

LaunchEnvironment nothing() {
  return {.meeting = NoMeeting{"no address"}};
}
LaunchEnvironment launched(int rank, int world_size) {
  return {.launcher = "torchrun",
          .rank = rank,
          .world_size = world_size,
          .local_rank = 0,
          .local_world_size = 1,
          .meeting = TcpMeeting{.host = "h", .port = 1}};
}
RendezvousPlan plan(const RendezvousOptions& options, const LaunchEnvironment& environment) {
  return make_plan(options, environment, "./train");
}
std::string refusal(const RendezvousOptions& options, const LaunchEnvironment& environment) {
  return testing::message_of<c10::ValueError>([&] { plan(options, environment); });
}

TEST(InitMethod, Parses) {
  auto tcp = parse_init_method("tcp://10.1.1.20:23456?rank=3&world_size=4");
  EXPECT_EQ(tcp.scheme, InitMethod::Scheme::kTcp);
  EXPECT_EQ(tcp.host, "10.1.1.20");
  EXPECT_EQ(tcp.port, 23456);
  EXPECT_EQ(tcp.rank, 3);
  EXPECT_EQ(tcp.world_size, 4);
  EXPECT_EQ(parse_init_method("tcp://[::1]:5").host, "::1");
  EXPECT_EQ(parse_init_method("tcp://h:5/").port, 5);
  EXPECT_EQ(parse_init_method("tcp://h:5?use_libuv=0").rank, -1);
  auto file = parse_init_method("file:///mnt/shared/a b?rank=1");
  EXPECT_EQ(file.path, "/mnt/shared/a b");
  EXPECT_EQ(file.rank, 1);
  EXPECT_EQ(parse_init_method("env://?world_size=2").world_size, 2);
}

TEST(InitMethod, RefusesAndShowsWhatItGot) {
  for (const char* text : {"tcp", "http://h:1", "tcp://", "tcp://h", "tcp://h:", "tcp://:1", "tcp://h:65536",
                           "tcp://h:x", "tcp://h:-1", "tcp://::1:5", "file://", "file://relative", "env://h",
                           "tcp://h:1?rank=x", "tcp://h:1?rank=", "tcp://h:1?rank", "tcp://h:1?size=2"}) {
    try {
      parse_init_method(text);
      ADD_FAILURE() << text << " was accepted";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'" + std::string(text) + "'"));
    }
  }
}

TEST(RendezvousPlan, AloneNeedsNoEnvironment) {
  EXPECT_TRUE(std::holds_alternative<Alone>(plan({.rank = 0, .world_size = 1}, nothing()).meeting));
  EXPECT_TRUE(
      std::holds_alternative<Alone>(plan({.init_method = "env://?rank=0&world_size=1"}, nothing()).meeting));
  LaunchEnvironment mpi_of_one{.launcher = "mpirun", .rank = 0, .world_size = 1, .meeting = JobMeeting{}};
  EXPECT_TRUE(std::holds_alternative<Alone>(plan({}, mpi_of_one).meeting));
  EXPECT_TRUE(std::holds_alternative<TcpMeeting>(plan({}, launched(0, 1)).meeting)) << "an address was given";
}

TEST(RendezvousPlan, OptionsFillInButDoNotContradict) {
  auto from_environment = plan({}, launched(1, 2));
  EXPECT_EQ(from_environment.rank, 1);
  EXPECT_EQ(from_environment.world_size, 2);
  EXPECT_EQ(plan({.rank = 1, .world_size = 2}, launched(1, 2)).rank, 1);
  EXPECT_EQ(plan({.rank = 1}, launched(-1, 2)).rank, 1);
  EXPECT_THAT(refusal({.rank = 0}, launched(1, 2)),
              AllOf(HasSubstr("options say rank 0"), HasSubstr("started by torchrun as rank 1 of 2")));
  EXPECT_THAT(refusal({.rank = 0, .world_size = 1}, launched(0, 2)), HasSubstr("options say world_size 1"));
  EXPECT_EQ(plan({.init_method = "tcp://x:5", .rank = 0, .world_size = 3}, launched(1, 2)).world_size, 3)
      << "a world of its own";
}

TEST(RendezvousPlan, RefusesWhatIsMissing) {
  EXPECT_THAT(refusal({}, nothing()),
              AllOf(HasSubstr("lockstep run --nproc-per-node 2 ./train"), HasSubstr("RANK, WORLD_SIZE")));
  EXPECT_THAT(refusal({}, launched(-1, 2)), HasSubstr("RANK is not set"));
  EXPECT_THAT(refusal({}, launched(0, -1)), HasSubstr("WORLD_SIZE is not set"));
  EXPECT_THAT(refusal({.rank = 0, .world_size = 2}, nothing()),
              AllOf(HasSubstr("rank 0 of 2 does not know where to meet"), HasSubstr("no address")));
  EXPECT_THAT(refusal({.init_method = "tcp://h:1", .world_size = 2}, launched(0, 2)),
              HasSubstr("rank parameter"));
  EXPECT_THAT(refusal({.init_method = "file:///f", .rank = 0}, nothing()), HasSubstr("world_size parameter"));
  EXPECT_THAT(refusal({.store = c10::make_intrusive<c10d::HashStore>()}, launched(0, 2)),
              HasSubstr("a store needs"));
}

TEST(RendezvousPlan, RefusesWhatIsWrong) {
  EXPECT_THAT(refusal({.init_method = "tcp://h:1", .rank = 2, .world_size = 2}, nothing()),
              HasSubstr("rank 2 is not below world_size 2"));
  EXPECT_THAT(refusal({.init_method = "tcp://h:1?rank=0", .rank = 0, .world_size = 2}, nothing()),
              HasSubstr("give them once"));
  EXPECT_THAT(refusal({.init_method = "env://", .store = c10::make_intrusive<c10d::HashStore>()}, nothing()),
              HasSubstr("both init_method and store"));
  EXPECT_THAT(refusal({.init_method = "tcp://h:0", .rank = 0, .world_size = 2}, nothing()),
              HasSubstr("port"));
  EXPECT_THAT(refusal({.rank = -2, .world_size = 2}, nothing()), HasSubstr("rank -2"));
  EXPECT_THAT(refusal({.rank = 0, .world_size = 0}, nothing()), HasSubstr("world_size 0"));
  EXPECT_THAT(refusal({.rank = 0, .world_size = 1, .timeout = std::chrono::milliseconds(0)}, nothing()),
              HasSubstr("timeout is 0 ms"));
}

}  // namespace
}  // namespace lockstep::rendezvous_internal::plan_test
