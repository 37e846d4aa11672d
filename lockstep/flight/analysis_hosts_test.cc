#include <gmock/gmock.h>
#include <optional>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/flight/analysis.h>
#include <lockstep/flight/testing/recorded_rank.h>

// What the analysis says of ranks on several hosts.
namespace lockstep::flight::analysis_hosts_test {
namespace {

using namespace recorded_rank;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(FlightAnalysis, ComparesHostsByTheWallClock) {
  Rank here(0, 2);
  here.waits(at(50, all_reduce()));
  Rank there(1, 2);
  there.record().boot_id = "another";
  there.record().monotonic_ns = 5 * kSecond;  // booted later, written at the same moment
  EXPECT_STREQ(to_string(analyze({here.record(), there.record()}).findings.front().kind), "missing");
}

/// Two ranks on each of node-a and node-b, of which each rank's record tells.
Rank on_hosts(int rank) {
  Rank made(rank, 4);
  made.record().host = rank < 2 ? "node-a" : "node-b";
  made.record().groups.front().hosts = {"node-a", "node-a", "node-b", "node-b"};
  return made;
}

TEST(FlightAnalysis, NamesTheHostOfTheRankThatIsTheCause) {
  std::vector<RankRecord> records;
  for (int rank : {0, 1, 2, 3}) {
    Rank one = on_hosts(rank);
    one.done(all_reduce());
    if (rank != 3) one.waits(barrier());
    records.push_back(parse(to_json(one.record()), "record"));
  }
  const Analysis analysis = analyze(records);
  EXPECT_THAT(analysis.cause, ElementsAre(3));
  EXPECT_THAT(describe(analysis),
              AllOf(HasSubstr("HANG: rank 3 on node-b has not called barrier()"),
                    HasSubstr("rank 2 on node-b called it at rank2.cc:2"),
                    HasSubstr("Look first at rank 3 on node-b.\n"), Not(HasSubstr("no rank of host"))));
  const auto json = nlohmann::json::parse(to_json(analysis));
  EXPECT_EQ(json["cause"], nlohmann::json::parse(R"({"ranks": [3], "hosts": ["node-b"]})"));
  EXPECT_EQ(json["hosts"][1]["name"], "node-b");
  EXPECT_EQ(json["hosts"][1]["ranks"], nlohmann::json::parse("[2, 3]"));
  EXPECT_EQ(json["findings"][0]["hosts"], nlohmann::json::parse(R"(["node-b"])"));
}

TEST(FlightAnalysis, NamesAHostOfWhichNoRankIsThere) {
  Rank zero = on_hosts(0);
  Rank one = on_hosts(1);
  zero.waits(all_reduce());
  one.waits(all_reduce());
  const Analysis lost = analyze({zero.record(), one.record()});
  EXPECT_THAT(lost.cause, ElementsAre(2, 3));
  EXPECT_THAT(describe(lost),
              AllOf(HasSubstr("nothing is known of ranks 2 and 3 on node-b, which wrote no record"),
                    HasSubstr("no rank of host node-b wrote one: bring its records here too"),
                    HasSubstr("Look first at ranks 2 and 3 on node-b.")));
  const Analysis idle = analyze({zero.record(), one.record(), on_hosts(2).record(), on_hosts(3).record()});
  EXPECT_THAT(describe(idle), AllOf(HasSubstr("HANG: ranks 2 and 3 on node-b have not called"),
                                    HasSubstr("no rank of host node-b has called it")));
}

TEST(FlightAnalysis, AllowsForClocksThatCommonOperationsShowToDiffer) {
  Rank here(0, 2);
  here.record().host = "node-a";
  here.done(3, all_reduce()).waits(at(50, all_reduce()));
  Rank there(1, 2);  // all its clocks are 50 s ahead
  there.record().host = "node-b";
  there.record().boot_id = "another";
  there.done(at(51, all_reduce())).done(2, all_reduce());
  // Written when node-a's clock was at 40: that it had not called the last operation tells nothing. By the wall clocks
  // it would seem to be written long after the call.
  there.written_at(90);
  const Analysis analysis = analyze({here.record(), there.record()});
  EXPECT_STREQ(to_string(analysis.findings.front().kind), "unknown");
  ASSERT_EQ(analysis.hosts.size(), 2U);
  EXPECT_EQ(analysis.hosts[0].clock_ahead_ns, std::nullopt);
  EXPECT_EQ(analysis.hosts[1].clock_ahead_ns, 50 * kSecond);
  EXPECT_EQ(analysis.hosts[1].clock_error_ns, kSecond / 2);
  EXPECT_THAT(describe(analysis), HasSubstr("note: the clock of node-b is 50.0 s ahead of node-a's"));
}

}  // namespace
}  // namespace lockstep::flight::analysis_hosts_test
