#include <chrono>
#include <gmock/gmock.h>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/launch/agent/worker_watch.h>

namespace lockstep::launch::worker_watch_test {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using Worker = WorkerWatch::Worker;

const std::chrono::steady_clock::time_point kStart{std::chrono::hours(1)};

ExitStatusTable::LongWait wait_for(const std::string& rank, std::chrono::steady_clock::time_point since,
                                   const std::string& state = "") {
  return {rank, state, std::chrono::nanoseconds(since.time_since_epoch()).count()};
}

TEST(WorkerWatch, TellsOnceOfAWorkerThatStaysStopped) {
  WorkerWatch watch("node-a");
  const std::vector<Worker> stopped = {{0, 100}, {1, 101, true}};
  for (int second = 0; second < 5; ++second)
    EXPECT_THAT(watch.look(stopped, kStart + seconds(second)), IsEmpty());
  EXPECT_THAT(watch.look(stopped, kStart + seconds(5)),
              ElementsAre(MatchesRegex("rank 1 .pid 101 on node-a. has been stopped for 5 s, since "
                                       "..:..:.. .by SIGSTOP, SIGTSTP or a debugger.; kill -CONT 101 "
                                       "continues it")));
  EXPECT_THAT(watch.look(stopped, kStart + seconds(60)), IsEmpty());
  const std::vector<Worker> running = {{0, 100}, {1, 101}};
  EXPECT_THAT(watch.look(running, kStart + seconds(61)), ElementsAre("rank 1 (pid 101 on node-a) goes on"));
  EXPECT_THAT(watch.look(running, kStart + seconds(62)), IsEmpty());
}

TEST(WorkerWatch, SaysNothingOfAShortStopAndOfAnEnd) {
  WorkerWatch watch("node-a");
  EXPECT_THAT(watch.look({{0, 100, true}}, kStart), IsEmpty());
  EXPECT_THAT(watch.look({{0, 100, false}}, kStart + seconds(4)), IsEmpty());
  EXPECT_THAT(watch.look({{0, 100, true}}, kStart + seconds(6)), IsEmpty()) << "another stop";
  EXPECT_EQ(watch.look({{0, 100, true}}, kStart + seconds(11)).size(), 1U);
  EXPECT_THAT(watch.look({}, kStart + seconds(12)), IsEmpty()) << "it has ended";
}

TEST(WorkerWatch, NamesTheRankThatOthersWaitFor) {
  WorkerWatch watch("node-a");
  const std::string far = "rank 5 (pid 205 on node-b)";
  std::vector<Worker> workers = {{0, 100}, {1, 101}, {2, 102}, {3, 103}};
  workers[0].wait = wait_for(far, kStart, "it has been silent for 3 s");
  EXPECT_THAT(watch.look(workers, kStart + seconds(10)), IsEmpty()) << "others may say the same soon";
  workers[1].wait = wait_for(far, kStart - seconds(1), "it has been silent for 4 s");
  workers[3].wait = wait_for(far, kStart, "it has been silent for 4 s");
  EXPECT_THAT(watch.look(workers, kStart + seconds(11)),
              ElementsAre(MatchesRegex("ranks 0, 1 and 3 have waited for rank 5 .pid 205 on node-b. for "
                                       "12 s, since ..:..:..; it has been silent for 4 s")));
  EXPECT_THAT(watch.look(workers, kStart + seconds(12)), IsEmpty());
  workers[0].wait = workers[1].wait = std::nullopt;
  EXPECT_THAT(watch.look(workers, kStart + seconds(13)), IsEmpty()) << "one still waits";
  workers[3].wait = std::nullopt;
  EXPECT_THAT(watch.look(workers, kStart + seconds(14)), ElementsAre(far + " is waited for no more"));
  EXPECT_THAT(watch.look(workers, kStart + seconds(15)), IsEmpty());
}

TEST(WorkerWatch, SaysNothingMoreOfARankForWhichNoneOfThoseThatRunHasWaited) {
  WorkerWatch watch("node-a");
  std::vector<Worker> workers = {{0, 100}, {1, 101}};
  workers[0].wait = wait_for("rank 1 (pid 101)", kStart);
  watch.look(workers, kStart + seconds(10));
  EXPECT_EQ(watch.look(workers, kStart + seconds(11)).size(), 1U);
  EXPECT_THAT(watch.look({{1, 101}}, kStart + seconds(12)), IsEmpty()) << "rank 0 has ended";
}

TEST(WorkerWatch, TellsTwoRanksThatWaitForEachOtherApart) {
  WorkerWatch watch("node-a");
  std::vector<Worker> workers = {{0, 100}, {1, 101}};
  workers[0].wait = wait_for("rank 1 (pid 101)", kStart);
  workers[1].wait = wait_for("rank 0 (pid 100)", kStart);
  watch.look(workers, kStart + seconds(10));
  EXPECT_THAT(
      watch.look(workers, kStart + seconds(11)),
      ElementsAre(MatchesRegex("rank 1 has waited for rank 0 .pid 100 on node-a. for 11 s, since ..:..:.."),
                  MatchesRegex("rank 0 has waited for rank 1 .pid 101 on node-a. for 11 s, since ..:..:..")));
}

}  // namespace
}  // namespace lockstep::launch::worker_watch_test
