#include <algorithm>
#include <gmock/gmock.h>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/monitor/job_table.h>

namespace lockstep::monitor::job_table_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

HostReport host(const std::string& name, std::vector<RankReport> ranks) {
  HostReport report;
  report.job = "job";
  report.program = "./train";
  report.host = name;
  report.cores = 2;
  report.ranks = std::move(ranks);
  return report;
}

RankReport rank(int number, std::vector<int> waits_for, const std::string& phase = "waiting") {
  return {.rank = number,
          .world_size = 4,
          .pid = 100 + number,
          .phase = phase,
          .waits_for = std::move(waits_for)};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

TEST(JobTable, FollowsWaitsToTheirEndOverHosts) {
  const std::vector<HostReport> hosts = {host("a", {rank(0, {1}), rank(1, {2})}),
                                         host("b", {rank(2, {3}), rank(3, {}, "forward")})};
  for (const int waits : {0, 1, 2}) EXPECT_EQ(held_up_by(hosts, waits), 3) << waits;
  EXPECT_EQ(held_up_by(hosts, 3), std::nullopt);
  EXPECT_EQ(held_up_by(hosts, 7), std::nullopt) << "nothing is known of it";
}

TEST(JobTable, NamesARankThatIsStoppedOrTellsNothing) {
  EXPECT_EQ(held_up_by({host("a", {rank(0, {2})})}, 0), 2) << "the other host is not heard";
  EXPECT_EQ(held_up_by({host("a", {rank(0, {1}), rank(1, {0})})}, 0), 1) << "in a circle";
  EXPECT_EQ(held_up_by({host("a", {rank(0, {1}), rank(1, {0, 2}), rank(2, {})})}, 0), 2)
      << "out of the circle";
  RankReport stopped = rank(1, {2});
  stopped.stopped = true;
  const std::vector<HostReport> hosts = {host("a", {rank(0, {1}), stopped, rank(2, {})})};
  EXPECT_EQ(held_up_by(hosts, 0), 1);
  EXPECT_EQ(held_up_by(hosts, 1), std::nullopt) << "it goes on when it may";
}

TEST(JobTable, HasALineForEachHostCardAndRank) {
  RankReport slow = rank(1, {}, "forward");
  slow.phase_seconds = 12.4;
  slow.step = 1200;
  slow.step_seconds = 0.0096;
  slow.samples_per_second = 6666.6;
  slow.loss = 0.25;
  slow.cpu_percent = 99.6;
  slow.memory = 350 << 20;
  slow.cards = {3};
  slow.card_memory = 1LL << 30;
  HostReport first = host("host-a", {rank(0, {1}), slow});
  first.cpu_percent = 92.6;
  first.memory_used = 3LL << 30;
  first.memory_total = 8LL << 30;
  first.received_per_second = 1.25e6;
  first.sent_per_second = 0;
  first.cards = {{.index = 3,
                  .name = "NVIDIA H100",
                  .used_percent = 97,
                  .memory_used = 1LL << 30,
                  .memory_total = 80LL << 30,
                  .others = {{.pid = 9, .name = "python3", .user = "bob", .memory = 2LL << 30}}},
                 {.index = 4, .name = "NVIDIA Thor"}};
  const auto lines = lines_of(draw_table({first}, {}));
  ASSERT_EQ(lines.size(), 10);
  EXPECT_EQ(lines[0], "job job: 2 ranks of 4 on 1 host, 6667 samples/s: ./train");
  EXPECT_THAT(lines[3], AllOf(HasSubstr("host-a"), HasSubstr("93 % of 2 cores"),
                              HasSubstr("3.0 GiB of 8.0 GiB"), HasSubstr("1.2, 0.0")));
  EXPECT_EQ(
      lines[4],
      "  gpu 3 NVIDIA H100: 97 %, 1.0 GiB of 80.0 GiB; not of this job: python3 (pid 9 of bob) 2.0 GiB");
  EXPECT_EQ(lines[5], "  gpu 4 NVIDIA Thor: -, -") << "its driver tells of neither";
  EXPECT_THAT(lines[8], AllOf(HasSubstr("waiting"), HasSubstr("rank 1 (forward 12 s)")));
  EXPECT_THAT(lines[9], AllOf(HasSubstr("1200"), HasSubstr("9.6"), HasSubstr("6667"), HasSubstr("0.25"),
                              HasSubstr("forward 12 s"), HasSubstr("100 %"), HasSubstr("350.0 MiB"),
                              HasSubstr("3: 1.0 GiB")));
  const auto heads = lines[7];
  EXPECT_EQ(lines[9].find("forward"), heads.find("phase")) << "columns are aligned";
  EXPECT_EQ(lines[9].find("1200") + 4, heads.find("step") + 4);
}

TEST(JobTable, FitsIntoTheTerminal) {
  std::vector<RankReport> ranks;
  for (int i = 0; i < 40; ++i) ranks.push_back(rank(i, {}));
  HostReport wide = host("hôte", ranks);
  wide.program = std::string(300, 'x');
  for (const int columns : {1, 20, 80}) {
    for (const int rows : {1, 10, 24, 100}) {
      const auto lines = lines_of(draw_table({wide}, {.columns = columns, .rows = rows}));
      for (const std::string& line : lines) {
        const auto shown = std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; });
        EXPECT_LE(shown, columns) << line;
      }
      EXPECT_LE(lines.size(), static_cast<size_t>(std::max(rows, 8))) << rows;
    }
  }
  EXPECT_THAT(draw_table({wide}, {.rows = 24}),
              HasSubstr("… and 23 ranks for which the terminal has no room\n"));
  EXPECT_THAT(draw_table({wide}, {}), Not(HasSubstr("no room")));
}

TEST(JobTable, FitsIntoTheTerminalWithManyHostsAndCards) {
  std::vector<HostReport> hosts;
  for (int i = 0; i < 8; ++i) {
    hosts.push_back(host("host-" + std::to_string(i), {}));
    for (int card = 0; card < 8; ++card) {
      hosts.back().ranks.push_back(rank(8 * i + card, {}));
      hosts.back().cards.push_back({.index = card, .name = "H100"});
    }
  }
  const auto shown = [](const std::string& table, const std::string& begin) {
    const auto lines = lines_of(table);
    return std::count_if(lines.begin(), lines.end(),
                         [&](const auto& line) { return line.starts_with(begin); });
  };
  for (int rows = 1; rows < 160; ++rows) {
    const std::string table = draw_table(hosts, {.columns = 80, .rows = rows});
    EXPECT_LE(lines_of(table).size(), static_cast<size_t>(std::max(rows, 8))) << table;
    EXPECT_THAT(table, ContainsRegex("\n +0  host-0")) << "one rank at least";
  }
  EXPECT_EQ(draw_table(hosts, {.rows = 1 + 1 + 1 + 8 * 9 + 1 + 1 + 64}), draw_table(hosts, {}));
  const std::string small = draw_table(hosts, {.rows = 24});
  EXPECT_EQ(shown(small, "host-"), 5);
  EXPECT_EQ(shown(small, "  gpu"), 0);
  EXPECT_THAT(small, AllOf(HasSubstr("\n… and 3 hosts and 64 cards for which the terminal has no room\n"),
                           HasSubstr("\n… and 52 ranks for which")));
  const std::string medium = draw_table(hosts, {.rows = 48});
  EXPECT_EQ(shown(medium, "host-"), 8);
  EXPECT_EQ(shown(medium, "  gpu"), 5) << "of the first host";
  EXPECT_THAT(medium, HasSubstr("\n… and 59 cards for which"));
  for (HostReport& one : hosts) one.ranks.resize(1);
  const std::string few = draw_table(hosts, {.rows = 48});
  EXPECT_THAT(few, Not(HasSubstr("ranks for which"))) << "the hosts have what the ranks do not need";
  EXPECT_EQ(lines_of(few).size(), 48);
}

TEST(JobTable, ShowsNoControlCharacters) {
  HostReport evil = host("a\033[31m", {rank(0, {}, "\033]0;x\a")});
  evil.job = "\r";
  evil.program = "x\nrank 7";
  evil.cards = {{.name = "\033", .others = {{.name = "\033", .user = "\n"}}}};
  const std::string table = draw_table({evil}, {});
  EXPECT_TRUE(std::none_of(table.begin(), table.end(), [](char c) {
    return c != '\n' && c >= 0 && c < 0x20;
  })) << table;
  EXPECT_EQ(lines_of(table).size(), 8);
  evil.program = "x\302\23331m";  // U+009B, with which escape sequences may begin, too
  EXPECT_THAT(draw_table({evil}, {}), AllOf(HasSubstr(": x??31m\n"), Not(HasSubstr("\xc2\x9b"))));
  EXPECT_THAT(job_json({evil}), AllOf(HasSubstr(R"("program": "x\u009b31m")"), Not(HasSubstr("\xc2\x9b"))));
}

HostReport in_generation(HostReport report, uint64_t generation, bool idles = false) {
  report.generation = generation;
  report.idles = idles;
  return report;
}

TEST(JobTable, BetweenTwoGenerationsSaysThatTheJobRestarts) {
  const HostReport forms = in_generation(host("a", {}), 0, true);
  EXPECT_EQ(restarting_generation({forms}), std::nullopt) << "the first one is formed";
  EXPECT_EQ(restarting_generation({host("a", {rank(0, {})}), host("b", {})}), std::nullopt)
      << "it has no agents";
  const HostReport trains = in_generation(host("a", {rank(0, {}, "forward")}), 1);
  const HostReport idle = in_generation(host("b", {}), 1, true);
  EXPECT_EQ(restarting_generation({trains, idle}), std::nullopt) << "a host too many";
  EXPECT_EQ(restarting_generation({in_generation(trains, 1, true), idle}), std::nullopt)
      << "some ranks are still there";
  const std::vector<HostReport> hosts = {in_generation(host("a", {}), 1, true), idle};
  EXPECT_EQ(restarting_generation(hosts), 2);
  EXPECT_EQ(lines_of(draw_table(hosts, {})).front(),
            "job job: restarting (generation 2) on 2 hosts: ./train");
  EXPECT_THAT(job_json(hosts), HasSubstr("\"restarting\": 2"));
}

TEST(JobTable, DoesNotSayThatAJobRestartsWhoseRanksItDoesNotSee) {
  for (const uint64_t generation : {1, 2}) {
    const std::vector<HostReport> hosts = {in_generation(host("a", {}), generation),
                                           in_generation(host("b", {}), generation)};
    EXPECT_EQ(lines_of(draw_table(hosts, {})).front(),
              "job job: no ranks of generation " + std::to_string(generation) + " on 2 hosts: ./train");
    EXPECT_THAT(job_json(hosts), Not(HasSubstr("restarting")));
  }
  EXPECT_THAT(draw_table({in_generation(host("a", {}), 2), in_generation(host("b", {}), 1, true)}, {}),
              HasSubstr("no ranks of generation 2"))
      << "the other host has not heard of it yet";
}

TEST(JobTable, RanksOfAFormerGenerationDoNotCount) {
  const HostReport lost = in_generation(host("a", {rank(0, {}), rank(1, {})}), 1);
  std::vector<RankReport> ranks = {rank(0, {}), rank(1, {})};
  for (RankReport& one : ranks) one.world_size = 2;
  const std::vector<HostReport> of_two = {in_generation(host("b", {ranks[0]}), 2),
                                          in_generation(host("c", {ranks[1]}), 2)};
  EXPECT_FALSE(has_all_ranks({}));
  EXPECT_FALSE(has_all_ranks({host("a", {})}));
  EXPECT_TRUE(has_all_ranks(of_two));
  std::vector<HostReport> hosts = {lost, of_two[0]};
  forget_former_generations(hosts);
  EXPECT_THAT(hosts[0].ranks, IsEmpty());
  EXPECT_EQ(hosts[1].ranks, of_two[0].ranks);
  EXPECT_FALSE(has_all_ranks(hosts)) << "rank 1 of the second one is missing";
}

TEST(JobTable, OfNoRanksSaysSo) {
  EXPECT_EQ(draw_table({}, {}), "no ranks\n");
  EXPECT_THAT(draw_table({host("a", {})}, {}), HasSubstr("no ranks\n"));
  EXPECT_THAT(job_json({}), HasSubstr("\"hosts\": []"));
  EXPECT_THAT(job_json({host("a", {rank(0, {1}), rank(1, {}, "data")})}), HasSubstr("\"held_up_by\": 1"));
}

}  // namespace
}  // namespace lockstep::monitor::job_table_test
