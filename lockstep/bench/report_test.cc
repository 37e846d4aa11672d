#include <array>
#include <gmock/gmock.h>
#include <sstream>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/bench/internal/report.h>
#include <lockstep/bench/internal/status_line.h>

namespace lockstep::bench::report_test {

using namespace internal;

namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Statistics, PercentilesAreNearestRanks) {
  const std::vector<int64_t> values = {10, 20, 30, 40, 50};
  EXPECT_EQ(percentile(values, 50), 30);
  EXPECT_EQ(percentile(values, 99), 50);
  EXPECT_EQ(percentile(values, 20), 10);
  EXPECT_EQ(percentile(values, 21), 20);
  EXPECT_EQ(percentile(values, 0.1), 10);
  EXPECT_EQ(percentile({7}, 99), 7);
  std::vector<int64_t> hundred(100);
  std::iota(hundred.begin(), hundred.end(), 1);
  EXPECT_EQ(percentile(hundred, 99), 99);
  EXPECT_EQ(percentile(hundred, 50), 50);
}

TEST(Statistics, SummaryIsInMicroseconds) {
  const TimeSummary summary = summarize({4000, 1000, 2000, 9000});
  EXPECT_DOUBLE_EQ(summary.mean, 4);
  EXPECT_DOUBLE_EQ(summary.min, 1);
  EXPECT_DOUBLE_EQ(summary.p50, 2);
  EXPECT_DOUBLE_EQ(summary.p99, 9);
  EXPECT_DOUBLE_EQ(summary.max, 9);
}

TEST(Statistics, AnIterationLastsAsLongAsItsSlowestRank) {
  EXPECT_THAT(slowest({1, 20, 3, 10, 2, 30}, 3), ElementsAre(10, 20, 30));
  EXPECT_THAT(slowest({5, 6}, 2), ElementsAre(5, 6));
}

TEST(Bandwidth, IsInUnitsOfTenToTheNinth) {
  EXPECT_DOUBLE_EQ(bandwidth(1'000'000, 1000), 1);
  EXPECT_DOUBLE_EQ(bandwidth(4096, 0), 0);
}

// nccl-tests, doc/PERFORMANCE.md.
TEST(Bandwidth, FactorsAreThoseOfNcclTests) {
  using enum Collective;
  EXPECT_DOUBLE_EQ(bus_factor(kAllReduce, 4).value(), 1.5);
  for (const Collective collective : {kAllGather, kReduceScatter, kAllToAll, kGather, kScatter}) {
    EXPECT_DOUBLE_EQ(bus_factor(collective, 4).value(), 0.75);
    EXPECT_DOUBLE_EQ(bus_factor(collective, 1).value(), 0);
  }
  for (const Collective collective : {kReduce, kBroadcast, kSendRecv, kPingPong}) {
    EXPECT_DOUBLE_EQ(bus_factor(collective, 4).value(), 1);
  }
  EXPECT_EQ(bus_factor(kBarrier, 4), std::nullopt);
}

struct Table : ::testing::Test {
  Plan plan = make_plan({.collectives = {"reduce", "all_gather", "barrier"}, .iterations = 7, .root = 1}, 2);
  BenchMachine machine{
      .host = "somewhere", .cores = 1, .lockstep_version = "1.2.3", .torch_version = "2.13.0"};

  Row row(const char* name, int64_t count, std::optional<int64_t> out_of_place_wrong,
          std::optional<int64_t> in_place_wrong) const {
    const CollectiveInfo& info = find_collective(name);
    Row row{.info = &info, .bytes = shown_bytes(info, count, 2, plan.dtype), .count = count};
    const auto measured = [&](int64_t wrong) {
      return make_measurement(info, row.bytes, 2, {1000, 3000}, wrong);
    };
    if (out_of_place_wrong) row.out_of_place = measured(*out_of_place_wrong);
    if (in_place_wrong) row.in_place = measured(*in_place_wrong);
    return row;
  }
  std::vector<std::string> fields(const Row& row) const {
    std::istringstream line(format_row(plan, row));
    return {std::istream_iterator<std::string>(line), {}};
  }
};

TEST_F(Table, HeaderAndJsonTellTheHosts) {
  machine.topology = {.hosts = {{"node-a", {0}}, {"node-b", {1}}}, .host_of = {0, 1}, .rank = 0};
  const std::string header = format_header(plan, machine);
  EXPECT_THAT(
      header,
      AllOf(HasSubstr(
                "# ranks 2, 2 hosts: node-a (rank 0), node-b (rank 1), usable cores of the first one 1\n"),
            Not(HasSubstr("ranks share"))));
  const auto json = nlohmann::json::parse(to_json(plan, machine, {}));
  EXPECT_EQ(json["hosts"],
            nlohmann::json::parse(R"([{"name": "node-a", "ranks": [0]}, {"name": "node-b", "ranks": [1]}])"));
}

TEST_F(Table, HeaderSaysWhatAndWhere) {
  EXPECT_THAT(format_header(plan, machine),
              AllOf(HasSubstr("1.2.3"), HasSubstr("2.13.0"), HasSubstr("ranks 2"), HasSubstr("somewhere"),
                    HasSubstr("memory arena"), HasSubstr("minBytes 1024"), HasSubstr(" iters: 7 "),
                    HasSubstr("2 ranks share 1 cores")));
  machine.cores = 2;
  plan.memory = MemoryKind::kStaged;
  EXPECT_THAT(format_header(plan, machine), AllOf(HasSubstr("memory staged"), Not(HasSubstr("ranks share"))));
}

TEST_F(Table, RowsHaveTheColumnsOfNcclTestsAndThePercentiles) {
  EXPECT_THAT(fields(row("all_gather", 1000, 0, 5)),
              ElementsAre("8000", "1000", "float", "none", "-1", "2.00", "4.00", "2.00", "0", "2.00", "4.00",
                          "2.00", "5", "1.00", "3.00", "1.00", "3.00"));
  EXPECT_THAT(fields(row("reduce", 1000, {}, 0)),
              ElementsAre("4000", "1000", "float", "sum", "1", "-", "-", "-", "-", "2.00", "2.00", "2.00",
                          "0", "-", "-", "1.00", "3.00"));
  EXPECT_THAT(fields(row("barrier", 0, 0, {})),
              ElementsAre("0", "0", "none", "none", "-1", "2.00", "-", "-", "0", "-", "-", "-", "-", "1.00",
                          "3.00", "-", "-"));
}

TEST_F(Table, ColumnsStandOverTheRows) {
  std::istringstream lines(format_columns(find_collective("reduce")) +
                           format_row(plan, row("reduce", 9, {}, 0)));
  std::vector<std::string> text;
  for (std::string line; std::getline(lines, line);) text.push_back(line);
  ASSERT_EQ(text.size(), 6u);
  EXPECT_EQ(text[1], "# reduce");
  EXPECT_EQ(text[3].size(), text[5].size());
  EXPECT_EQ(text[3].find("size") + 4, text[5].find("36") + 2);
  EXPECT_EQ(text[3].find("root") + 4, text[5].find(" 1 ") + 2);
  for (const size_t line : {1u, 2u, 3u, 4u}) EXPECT_EQ(text[line].front(), '#');
}

TEST_F(Table, FooterCountsWhatIsWrongAndAveragesTheBandwidth) {
  const std::vector<Row> rows = {row("all_gather", 1000, 0, 0), row("all_gather", 3000, 0, {})};
  EXPECT_EQ(format_footer(rows), "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 3.33333\n");
  EXPECT_THAT(format_footer({row("all_gather", 1000, 2, 3)}), HasSubstr(": 5 FAILED"));
  EXPECT_EQ(format_footer({row("barrier", 0, 0, {})}), "# Out of bounds values : 0 OK\n");
}

TEST_F(Table, JsonHoldsTheSame) {
  const auto json =
      nlohmann::json::parse(to_json(plan, machine, {row("reduce", 1000, {}, 3), row("barrier", 0, 0, {})}));
  EXPECT_EQ(json["lockstep"], "1.2.3");
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["memory"], "arena");
  EXPECT_EQ(json["wrong"], 3);
  const auto& reduce = json["results"][0];
  EXPECT_EQ(reduce["collective"], "reduce");
  EXPECT_EQ(reduce["root"], 1);
  EXPECT_EQ(reduce["redop"], "sum");
  EXPECT_TRUE(reduce["out_of_place"].is_null());
  EXPECT_EQ(reduce["in_place"]["wrong"], 3);
  EXPECT_EQ(reduce["in_place"]["p99_us"], 3.0);
  EXPECT_EQ(reduce["in_place"]["busbw_gbps"], 2.0);
  EXPECT_TRUE(json["results"][1]["out_of_place"]["algbw_gbps"].is_null());
}

TEST(StatusLineTest, AppearsAfterASecondAndIsTakenAway) {
  std::array<int, 2> ends = {};
  ASSERT_EQ(::pipe(ends.data()), 0);
  StatusLine::Clock::time_point now;
  const auto written = [&] {
    EXPECT_EQ(::write(ends[1], "|", 1), 1);  // so that there is something to read
    std::array<char, 200> text{};
    return std::string(text.data(),
                       static_cast<size_t>(std::max<ssize_t>(0, ::read(ends[0], text.data(), text.size()))));
  };
  {
    StatusLine line(true, ends[1], [&] { return now; });
    StatusLine silent(false, ends[1], [&] { return now; });
    now += std::chrono::milliseconds(999);
    line.show([] { return "early"; });
    line.clear();
    EXPECT_EQ(written(), "|");
    now += std::chrono::seconds(1);
    line.show([] { return "one"; });
    line.show([] { return "too soon"; });
    silent.show([] { return "never"; });
    EXPECT_EQ(written(), "\r\x1b[Kone|");
    now += std::chrono::milliseconds(100);
    line.show([] { return "two"; });
    EXPECT_EQ(written(), "\r\x1b[Ktwo|");
  }
  EXPECT_EQ(written(), "\r\x1b[K|");
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace
}  // namespace lockstep::bench::report_test
