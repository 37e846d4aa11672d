#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/bench/internal/scaling_report.h>
#include <lockstep/bench/internal/throughput_log.h>
#include <lockstep/bench/scaling.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::bench::scaling_test {

using namespace internal;

namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;

constexpr int kOut = 1, kError = 2;

TEST(RankList, IsAscendingAndHoldsEachNumberOnce) {
  EXPECT_THAT(parse_rank_list("1"), ElementsAre(1));
  EXPECT_THAT(parse_rank_list("4,1,2,1"), ElementsAre(1, 2, 4));
  for (const char* text : {"", ",", "1,", ",1", "0", "-1", "1 2", "1,x", "1;2", "99999999999"}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { parse_rank_list(text); }),
                HasSubstr("--ranks is '" + std::string(text) + "'"));
  }
}

TEST(RankList, PowersOfTwoEndWithTheMost) {
  EXPECT_THAT(powers_of_two(1), ElementsAre(1));
  EXPECT_THAT(powers_of_two(2), ElementsAre(1, 2));
  EXPECT_THAT(powers_of_two(6), ElementsAre(1, 2, 4, 6));
  EXPECT_THAT(powers_of_two(8), ElementsAre(1, 2, 4, 8));
}

TEST(ThroughputLog, TakesTheLastLineOfTheLowestRank) {
  ThroughputLog log;
  log.feed(1, kOut, "LOCKSTEP_SCALING 5 images/s\n");
  EXPECT_EQ(log.marked()->value, 5);
  EXPECT_EQ(log.marked()->unit, "images/s");
  log.feed(0, kOut, "epoch 1\nLOCKSTEP_SCALING 10\nLOCKSTEP_SC");
  log.feed(0, kError, "something else\n");
  log.feed(1, kOut, "LOCKSTEP_SCALING 7 images/s\n");
  log.feed(0, kOut, "ALING 12.5 tokens a second");
  EXPECT_EQ(log.marked()->value, 10);
  EXPECT_EQ(log.marked()->unit, "samples/s");
  log.finish();
  EXPECT_EQ(log.marked()->value, 12.5);
  EXPECT_EQ(log.marked()->unit, "tokens a second");
  EXPECT_FALSE(log.trainer());
}

TEST(ThroughputLog, AMarkedLineIsOfItsRank) {
  ThroughputLog log;
  log.feed(1, kOut, "[rank 2] LOCKSTEP_SCALING 5\n[rank x] LOCKSTEP_SCALING 6\n[rank 1]LOCKSTEP_SCALING 6\n");
  log.feed(0, kOut, "[rank 7] LOCKSTEP_SCALING 8\n");
  EXPECT_EQ(log.marked()->value, 5);
  log.feed(1, kError, "[rank 0] epoch 1: 45% [00:12<00:15, samples/s=100]\n");
  EXPECT_EQ(log.trainer()->value, 100);
}

TEST(ThroughputLog, PassesOverWhatIsNoThroughput) {
  ThroughputLog log;
  for (const char* line :
       {"LOCKSTEP_SCALING", "LOCKSTEP_SCALING ", "LOCKSTEP_SCALING fast", "LOCKSTEP_SCALING 0",
        "LOCKSTEP_SCALING -3", "LOCKSTEP_SCALING nan", "LOCKSTEP_SCALING inf", "LOCKSTEP_SCALING 1e999",
        "LOCKSTEP_SCALING 3x", "say LOCKSTEP_SCALING 3", "samples/s=", "samples/s=-1"}) {
    log.feed(0, kOut, std::string(line) + "\n");
  }
  log.feed(0, kOut, std::string(1 << 20, 'x') + "\n");
  EXPECT_FALSE(log.marked());
  EXPECT_FALSE(log.trainer());
}

TEST(ThroughputLog, ReadsTheTrainersBarWhichIsDrawnAgain) {
  ThroughputLog log;
  log.feed(0, kError, "\repoch 1:  45% [00:12<00:15, 20 it/s, samples/s=100, lr=0.1]");
  EXPECT_FALSE(log.trainer());
  log.feed(0, kError, "\repoch 1: 100% [00:27<00:00, 22 it/s, samples/s=2250, lr=0.1]\n");
  log.feed(1, kError, "samples/s=3\n");
  EXPECT_EQ(log.trainer()->value, 2250);
  EXPECT_EQ(log.trainer()->unit, "samples/s");
}

ScalingRun timed(double seconds) {
  return {.seconds = seconds};
}

ScalingRun marked(double seconds, double value, const std::string& unit = "images/s") {
  return {.seconds = seconds, .marked = Throughput{value, unit}};
}

TEST(ScalingReport, TimeOfTheSameWorkTellsTheThroughput) {
  const auto report = make_scaling_report({{.ranks = 1, .runs = {timed(12), timed(10), timed(9)}},
                                           {.ranks = 2, .runs = {timed(6), timed(7)}, .barrier_us = 1.5}},
                                          Scaling::kStrong);
  EXPECT_EQ(report.source, ThroughputSource::kTime);
  EXPECT_EQ(report.unit, "runs/h");
  ASSERT_EQ(report.points.size(), 2u);
  EXPECT_DOUBLE_EQ(report.points[0].throughput, 360);
  EXPECT_DOUBLE_EQ(report.points[0].speedup, 1);
  EXPECT_DOUBLE_EQ(report.points[1].seconds, 6.5);
  EXPECT_NEAR(report.points[1].speedup, (3600 / 6.0 + 3600 / 7.0) / 2 / 360, 1e-12);
  EXPECT_DOUBLE_EQ(report.points[1].efficiency, report.points[1].speedup / 2);
  EXPECT_EQ(report.points[1].barrier_us, 1.5);
}

TEST(ScalingReport, OfRanksThatDoAsMuchEachTheTimeStays) {
  const auto report = make_scaling_report(
      {{.ranks = 1, .runs = {timed(10)}}, {.ranks = 4, .runs = {timed(12.5)}}}, Scaling::kWeak);
  EXPECT_DOUBLE_EQ(report.points[1].speedup, 3.2);
  EXPECT_DOUBLE_EQ(report.points[1].efficiency, 0.8);
}

TEST(ScalingReport, TheFirstPointIsTheMeasureOfTheOthers) {
  const auto report = make_scaling_report(
      {{.ranks = 2, .runs = {marked(1, 200)}}, {.ranks = 4, .runs = {marked(1, 300)}}}, Scaling::kStrong);
  EXPECT_EQ(report.source, ThroughputSource::kMarked);
  EXPECT_DOUBLE_EQ(report.points[0].speedup, 2);
  EXPECT_DOUBLE_EQ(report.points[0].efficiency, 1);
  EXPECT_DOUBLE_EQ(report.points[1].speedup, 3);
  EXPECT_DOUBLE_EQ(report.points[1].efficiency, 0.75);
}

TEST(ScalingReport, TakesWhatEveryRunSaysInOneUnit) {
  ScalingRun both = marked(10, 100);
  both.trainer = Throughput{90, "samples/s"};
  ScalingRun bar = timed(5);
  bar.trainer = Throughput{170, "samples/s"};
  auto report =
      make_scaling_report({{.ranks = 1, .runs = {both}}, {.ranks = 2, .runs = {bar}}}, Scaling::kStrong);
  EXPECT_EQ(report.source, ThroughputSource::kTrainer);
  EXPECT_DOUBLE_EQ(report.points[0].throughput, 90);
  report = make_scaling_report(
      {{.ranks = 1, .runs = {both}}, {.ranks = 2, .runs = {marked(5, 3, "tokens/s")}}}, Scaling::kStrong);
  EXPECT_EQ(report.source, ThroughputSource::kTime);
}

ScalingReport example() {
  return make_scaling_report({{.ranks = 1, .runs = {marked(10, 100)}},
                              {.ranks = 2, .runs = {marked(6, 180)}, .barrier_us = 1.25},
                              {.ranks = 4, .runs = {marked(5, 240)}, .barrier_us = 12.5}},
                             Scaling::kStrong);
}

const BenchMachine kMachine = {.host = "box", .cores = 2, .lockstep_version = "1.2", .torch_version = "2.13"};
const std::vector<std::string> kCommand = {"./train", "--name", "<a&b>\x01"};

TEST(ScalingReport, TheTableHasARowForEachNumberOfRanks) {
  const std::string text = format_scaling(example(), kMachine, kCommand);
  EXPECT_THAT(text, AllOf(HasSubstr("# throughput in images/s, by the program's lines LOCKSTEP_SCALING\n"),
                          HasSubstr("# note: 4 ranks share 2 cores\n"),
                          ContainsRegex("\n +1 +10.00 +100 +1.00 +100.0 % +-\n"),
                          ContainsRegex("\n +2 +6.00 +180 +1.80 +90.0 % +1.25\n"),
                          ContainsRegex("\n +4 +5.00 +240 +2.40 +60.0 % +12.50\n")));
  // 50 columns are four ranks: 1 and 1.8 and 2.4 of them, and the mark at 1, 2 and 4.
  EXPECT_THAT(text, AllOf(HasSubstr("\n#      1 #############|\n"),
                          HasSubstr("\n#      2 #######################  |\n"),
                          HasSubstr("\n#      4 ##############################                    |\n")));
}

TEST(ScalingReport, OverHostsARowSaysHowMany) {
  auto report = example();
  report.points[2].hosts = 2;
  report.hosts = "node-a:2,node-b:2";
  EXPECT_THAT(format_scaling(report, kMachine, kCommand),
              AllOf(HasSubstr(", hosts node-a:2,node-b:2\n"), HasSubstr("\n#  ranks  hosts    time(s)"),
                    ContainsRegex("\n +2 +1 +6.00 +180 "), ContainsRegex("\n +4 +2 +5.00 +240 "),
                    Not(HasSubstr("cores"))));
  const auto json = nlohmann::json::parse(scaling_json(report, kMachine, kCommand));
  EXPECT_EQ(json["hosts"], "node-a:2,node-b:2");
  EXPECT_EQ(json["results"][2]["hosts"], 2);
}

TEST(ScalingReport, ASpeedupBeyondTheIdealFitsInToo) {
  const auto report = make_scaling_report(
      {{.ranks = 1, .runs = {marked(1, 100)}}, {.ranks = 2, .runs = {marked(1, 400)}}}, Scaling::kStrong);
  const std::string text = format_scaling(report, kMachine, kCommand);
  EXPECT_THAT(text, HasSubstr("\n#      2 #########################|#########################\n"));
  EXPECT_THAT(text, Not(HasSubstr("note:")));
}

TEST(ScalingReport, JsonHoldsAllNumbers) {
  const auto json = nlohmann::json::parse(scaling_json(example(), kMachine, kCommand));
  EXPECT_EQ(json["command"], kCommand);
  EXPECT_EQ(json["throughput_from"], "program");
  EXPECT_EQ(json["work"], "fixed");
  EXPECT_EQ(json["unit"], "images/s");
  ASSERT_EQ(json["results"].size(), 3u);
  EXPECT_TRUE(json["results"][0]["barrier_us"].is_null());
  EXPECT_EQ(json["results"][2]["ranks"], 4);
  EXPECT_DOUBLE_EQ(json["results"][2]["seconds"], 5);
  EXPECT_DOUBLE_EQ(json["results"][2]["throughput"], 240);
  EXPECT_DOUBLE_EQ(json["results"][2]["speedup"], 2.4);
  EXPECT_DOUBLE_EQ(json["results"][2]["efficiency"], 0.6);
  EXPECT_DOUBLE_EQ(json["results"][2]["barrier_us"], 12.5);
}

TEST(ScalingReport, ThePictureHoldsEachPointAndNoBareMarkup) {
  const std::string svg = scaling_svg(example(), kCommand);
  // From (60, 360) to (380, 40): 4 ranks at the right end, 2.4 of 4 upwards.
  EXPECT_THAT(svg, AllOf(HasSubstr("<circle cx=\"380\" cy=\"168\""), HasSubstr("L380 168\""),
                         HasSubstr(">2.40</text>"), HasSubstr(">./train --name &lt;a&amp;b&gt; </text>")));
}

}  // namespace
}  // namespace lockstep::bench::scaling_test
