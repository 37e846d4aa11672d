// Thousands of random histories of a job on several hosts: agents that come, are killed and stopped, hosts that are
// suspended, cables that are cut and mended, messages that are late, come twice or in another order, workers that
// fail or hang, clocks that run 4 % fast or slow. The state machines are the ones that the agents run.
#include <chrono>
#include <cstdint>
#include <random>

#include <gtest/gtest.h>

#include <lockstep/launch/membership/testing/simulation.h>
#include <lockstep/testing/long_run.h>

namespace lockstep::launch::membership_simulation_test {
namespace {

using simulation::kStopTime;
using simulation::Scene;
using simulation::Simulation;
using std::chrono::nanoseconds;
using std::chrono::seconds;

uint64_t histories() {
  return testing::long_run() ? 5000 : 80;
}

Scene random_scene(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Scene scene;
  scene.hosts = number(1, 7);
  scene.options.max_hosts = number(1, scene.hosts);
  scene.options.min_hosts = number(1, scene.options.max_hosts);
  scene.options.max_restarts = number(0, 3);
  scene.options.last_call = std::chrono::seconds(number(0, 15));
  scene.options.join_timeout = std::chrono::seconds(400);
  return scene;
}

TEST(MembershipSimulation, NeverRunsTwoWorldsAndAlwaysRunsOneOrEnds) {
  int generations = 0;
  for (uint64_t seed = 1; seed <= histories(); ++seed) {
    Scene scene = random_scene(seed);
    scene.options.max_restarts += 100 * static_cast<int>(seed % 2);
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    generations += simulation.generations();
  }
  EXPECT_GT(generations, static_cast<int>(histories()));
}

TEST(MembershipSimulation, EnoughSoundHostsAreNeverStoppedForLongByTheOthers) {
  for (uint64_t seed = 1; seed <= histories(); ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    // Each of the others can be lost at the worst moment: when a generation has just been started with it.
    const int others = scene.hosts - scene.options.min_hosts;
    const nanoseconds bound = (others + 1) * (scene.options.lost_after + kStopTime + seconds(3));
    EXPECT_LE(simulation.longest_outage().count(), bound.count()) << "seed " << seed;
    EXPECT_GT(simulation.generations(), 0) << "seed " << seed;
  }
}

TEST(MembershipSimulation, EndsWithSuccessWhenAllHaveFinished) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.work = seconds(40);
    scene.chaos = seconds(400);
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    EXPECT_EQ(simulation.exit_status(), 0) << "seed " << seed;
  }
}

TEST(MembershipSimulation, HostsThatHaveFinishedAreNotNeeded) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.finished_hosts_go = true;
    scene.chaos = seconds(40);
    scene.work = seconds(80);  // when what the chaos has left is over
    scene.spread = seconds(30);
    scene.calm = seconds(300);
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    EXPECT_EQ(simulation.exit_status(), 0) << "seed " << seed;
  }
}

TEST(MembershipSimulation, EndsWhenSomeAskToBeStartedAgain) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.work = seconds(40);
    scene.chaos = seconds(400);
    scene.asks_again = 0.3;
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    EXPECT_GE(simulation.exit_status(), 0) << "the job goes on, seed " << seed;
  }
}

TEST(MembershipSimulation, EndsWhenThoseOfOneHostAloneAskToBeStartedAgain) {
  for (uint64_t seed = 1; seed <= histories() / 5; ++seed) {
    Scene scene = random_scene(seed);
    scene.harmless_only = true;
    scene.chaos = seconds(40);
    scene.work = seconds(80);  // when what the chaos has left is over
    scene.calm = seconds(300);
    scene.one_asks_again = true;
    scene.asks_again = static_cast<double>(seed % 2);  // of the others, once they get a signal
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
    ASSERT_GE(simulation.exit_status(), 0) << "the job goes on, seed " << seed;
    if (scene.asks_again > 0) {
      EXPECT_EQ(simulation.exit_status(), 75) << "seed " << seed;
    }
  }
}

TEST(MembershipSimulation, AllEndWhenTheCoordinatorIsLost) {
  for (uint64_t seed = 1; seed <= histories() / 2; ++seed) {
    Scene scene = random_scene(seed);
    scene.coordinator_dies = true;
    Simulation simulation(scene, seed);
    ASSERT_TRUE(simulation.run()) << simulation.problem() << ", seed " << seed;
  }
}

}  // namespace
}  // namespace lockstep::launch::membership_simulation_test
