#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/monitor/host_report.h>

namespace lockstep::monitor::host_report_test {
namespace {

HostReport full_report() {
  HostReport report;
  report.job = "job";
  report.program = "./train --name \"a\"\n";
  report.host = "host-a";
  report.cores = 96;
  report.cpu_percent = 12.5;
  report.memory_used = 1LL << 40;
  report.memory_total = 1LL << 41;
  report.received_per_second = 1e9;
  report.sent_per_second = 0;
  report.cards = {{.index = 1,
                   .name = "NVIDIA H100",
                   .used_percent = 97,
                   .memory_used = 5,
                   .memory_total = 6,
                   .others = {{.pid = 7, .name = "python3", .user = "bob", .memory = 8}, {.pid = 9}}},
                  {.index = 2}};
  report.ranks = {{.rank = 0, .world_size = 2, .pid = 10},
                  {.rank = 1,
                   .world_size = 2,
                   .pid = 11,
                   .step = 1LL << 40,
                   .step_seconds = 0.25,
                   .samples_per_second = 1e4,
                   .loss = -0.5,
                   .phase = "waiting",
                   .phase_seconds = 3,
                   .stopped = true,
                   .waits_for = {0},
                   .cpu_percent = 99,
                   .memory = 1 << 30,
                   .cards = {1, 2},
                   .card_memory = 4}};
  report.generation = 3;
  report.idles = true;
  return report;
}

TEST(HostReport, IsReadAsItWasWritten) {
  EXPECT_EQ(parse_host_report(to_json(full_report())), full_report());
  EXPECT_EQ(parse_host_report(to_json({})), HostReport{});
  EXPECT_EQ(to_json(full_report()).find('\n'), std::string::npos) << "it is one line";
}

TEST(HostReport, LeavesOutWhatACardDoesNotTell) {
  HostReport report;
  report.cards = {{.index = 2}};
  EXPECT_NE(to_json(report).find(R"("cards":[{"index":2,"name":"","others":[]}])"), std::string::npos)
      << to_json(report);
}

TEST(HostReport, TellsOfALossThatIsNoNumber) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double loss : {kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN()}) {
    HostReport report = full_report();
    report.ranks.back().loss = loss;
    const auto again = parse_host_report(to_json(report));
    ASSERT_TRUE(again && again->ranks.back().loss);
    const double read = *again->ranks.back().loss;
    EXPECT_TRUE(std::isnan(loss) ? std::isnan(read) : read == loss) << loss << " became " << read;
  }
}

TEST(HostReport, IsNothingElse) {
  const std::string text = to_json(full_report());
  for (size_t size = 0; size < text.size(); ++size) {
    EXPECT_EQ(parse_host_report(text.substr(0, size)), std::nullopt) << size;
  }
  for (const char* odd : {"[]", "7", "{\"job\": 1}", "null"})
    EXPECT_EQ(parse_host_report(odd), std::nullopt) << odd;
  std::string other = text;
  other.replace(other.find("\"cores\":96"), 10, "\"cores\":[]");
  EXPECT_EQ(parse_host_report(other), std::nullopt);
}

TEST(HostReport, IsNotOneWithNumbersThatNoIntegerHolds) {
  HostReport report = full_report();
  report.generation = 2;
  const std::string text = to_json(report);
  for (const char* number : {"99999999999999999999999", "1e23", "2.5"}) {
    std::string other = text;
    other.replace(other.find("\"generation\":2"), 14, std::string("\"generation\":") + number);
    EXPECT_EQ(parse_host_report(other), std::nullopt) << number;
  }
}

}  // namespace
}  // namespace lockstep::monitor::host_report_test
