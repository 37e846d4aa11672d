#include <cmath>
#include <cstdlib>
#include <functional>
#include <gmock/gmock.h>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/collectives/hosts/cost_model.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::cost_model_test {
namespace {

using namespace hosts;
using ::testing::HasSubstr;
using Algorithm = HostAlgorithm;

std::string error_of(const std::function<void()>& action) {
  return testing::message_of<c10::ValueError>(action);
}

/// A wire on which a message costs 1 and a byte 2^-16; nothing within the host.
constexpr CostModel kSimple{.wire = {1, 1.0 / (1 << 16)}, .host = {0, 0}};
/// What is one segment for one slice.
constexpr uint64_t kOneSegment = 1 << 16;

HostReduction all_reduce(int hosts, uint64_t bytes) {
  return {.hosts = hosts, .bytes = bytes};
}

TEST(CostModel, CountsMessagesAndBytesOfEachAlgorithm) {
  // Without the agreement: a message to each of up to three others, of which all but one cost half; then rounds.
  const auto seconds = [](Algorithm algorithm, int hosts, bool to_root = false) {
    const double agreement = hosts <= 4 ? hosts / 2.0 : std::ceil(std::log2(hosts));
    return forecast(algorithm, {.hosts = hosts, .bytes = kOneSegment, .to_root = to_root}, kSimple) -
           agreement;
  };
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kRing, 4), 6 + 1.5);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kHalving, 4), 4 + 1.5);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kPairwise, 4), 4 + 1.5);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kPairwise, 5, true), 5 + 1.6);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kTree, 4), 4 + 4);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kTree, 5), 6 + 6);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kTree, 5, true), 3 + 3);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kChain, 5, true), 4 + 4);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kDirect, 2), 1 + 1);
  EXPECT_DOUBLE_EQ(seconds(Algorithm::kDirect, 4), 2 + 3);
  const double never = std::numeric_limits<double>::infinity();
  EXPECT_EQ(seconds(Algorithm::kHalving, 6), never);
  EXPECT_EQ(seconds(Algorithm::kHalving, 4, true), never);
  EXPECT_EQ(seconds(Algorithm::kRing, 4, true), never);
  EXPECT_EQ(seconds(Algorithm::kChain, 4), never);
}

TEST(CostModel, AddsTheTimeWithinTheHost) {
  CostModel with_host = kSimple;
  with_host.host = {10, 100.0 / kOneSegment};
  EXPECT_EQ(forecast(Algorithm::kRing, all_reduce(1, kOneSegment), kSimple), 0);
  EXPECT_EQ(forecast(Algorithm::kRing, all_reduce(1, kOneSegment), with_host), 20 + 100);
  EXPECT_DOUBLE_EQ(forecast(Algorithm::kRing, all_reduce(3, kOneSegment), with_host),
                   forecast(Algorithm::kRing, all_reduce(3, kOneSegment), kSimple) + 20 + 100);
}

TEST(CostModel, SmallTensorsTravelWithTheCall) {
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kDirect, Algorithm::kTree}) {
    EXPECT_DOUBLE_EQ(forecast(algorithm, all_reduce(3, 8192), kSimple), 1.5 + 2.0 / 8);
    EXPECT_DOUBLE_EQ(forecast(algorithm, all_reduce(9, 8192), kSimple), 4 + 8.0 / 8);
  }
}

TEST(CostModel, SegmentsFollowEachOther) {
  const HostReduction many = all_reduce(4, 100 * kOneSegment);
  const auto segments = static_cast<double>(many.segments());
  ASSERT_GE(segments, 8);
  const double size = 100 / segments;
  // Each further one costs the busiest host its bytes and half a message for each that it sends or takes part in.
  const auto seconds = [&](Algorithm algorithm) { return forecast(algorithm, many, kSimple) - 2; };
  EXPECT_NEAR(seconds(Algorithm::kDirect), 2 + 3 * size + (segments - 1) * (1.5 + 3 * size), 1e-9);
  EXPECT_NEAR(seconds(Algorithm::kPairwise), 4 + 1.5 * size + (segments - 1) * (3 + 1.5 * size), 1e-9);
  EXPECT_NEAR(seconds(Algorithm::kHalving), 4 + 1.5 * size + (segments - 1) * (2 + 1.5 * size), 1e-9);
  EXPECT_NEAR(seconds(Algorithm::kTree), 4 + 4 * size + (segments - 1) * (2 + 2 * size), 1e-9);
  EXPECT_NEAR(seconds(Algorithm::kRing), 6 + 1.5 * size + (segments - 1) * (3 + 1.5 * size), 1e-9);
  // Four segments are on their way at a time, in a chain of twelve links.
  const HostReduction chain{.hosts = 13, .bytes = 100 * kOneSegment, .to_root = true};
  const auto links = static_cast<double>(chain.segments());
  EXPECT_NEAR(forecast(Algorithm::kChain, chain, kSimple),
              4 + 12 + 12 * 100 / links + (links - 1) * (3 + 3 * 100 / links), 1e-9);
}

TEST(CostModel, SegmentsAreCutByWhatTravels) {
  for (const int slices : {1, 3, 8}) {
    for (const int hosts : {2, 3, 9}) {
      for (uint64_t bytes = 16384; bytes < (uint64_t{1} << 33); bytes = bytes * 5 + 4) {
        for (const auto compression :
             {HostCompression::kNone, HostCompression::kBf16, HostCompression::kInt8}) {
          const HostReduction reduction{
              .hosts = hosts, .bytes = bytes, .slices = slices, .compression = compression};
          const uint64_t slice = reduction.slice_bytes();
          EXPECT_EQ(slice % 64, 0u);
          EXPECT_LE(slice * slices, uint64_t{8} << 20) << "the scratch of a rank";
          EXPECT_LE(reduction.on_wire(slice), uint64_t{1} << 20);
          EXPECT_GE(reduction.segments() * slice * slices, bytes);
          EXPECT_LT((reduction.segments() - 1) * slice * slices, bytes);
          if (bytes > uint64_t{100} << 20) {
            const bool scratch_limits = slice * slices > (uint64_t{8} << 20) - 1024 * slices;
            EXPECT_TRUE(scratch_limits || reduction.on_wire(slice) > uint64_t{255} << 10);
          }
        }
      }
    }
  }
}

TEST(CostModel, ChoosesTheCheapest) {
  const CostModel model;
  for (int hosts = 1; hosts <= 16; ++hosts) {
    for (uint64_t bytes = 8; bytes < (uint64_t{1} << 32); bytes *= 3) {
      for (const bool to_root : {false, true}) {
        const HostReduction reduction{.hosts = hosts, .bytes = bytes, .slices = 2, .to_root = to_root};
        const Algorithm chosen = choose(reduction, model);
        EXPECT_TRUE(can_run(chosen, reduction));
        for (const Algorithm other : kHostAlgorithms) {
          EXPECT_LE(forecast(chosen, reduction, model), forecast(other, reduction, model));
        }
      }
    }
  }
  constexpr uint64_t kGibi = uint64_t{1} << 30;
  EXPECT_EQ(choose(all_reduce(2, 8), model), Algorithm::kDirect);
  EXPECT_EQ(choose(all_reduce(2, kGibi), model), Algorithm::kDirect);
  EXPECT_EQ(choose(all_reduce(3, kGibi), model), Algorithm::kPairwise);
  EXPECT_EQ(choose(all_reduce(8, kGibi), model), Algorithm::kHalving);
  EXPECT_EQ(choose(all_reduce(17, kGibi), model), Algorithm::kRing) << "pairwise would be too many at once";
  EXPECT_EQ(choose(all_reduce(64, kGibi), model), Algorithm::kHalving);
  EXPECT_EQ(choose(all_reduce(100, 16384), model), Algorithm::kTree);
  EXPECT_EQ(choose({.hosts = 3, .bytes = kGibi, .to_root = true}, model), Algorithm::kChain);
}

TEST(CostModel, EncodedReductionsRoundNoPartialTwice) {
  for (const bool to_root : {false, true}) {
    for (const int hosts : {2, 3, 8, 100}) {
      const HostReduction reduction{.hosts = hosts,
                                    .bytes = uint64_t{1} << 24,
                                    .compression = HostCompression::kInt8,
                                    .to_root = to_root};
      EXPECT_EQ(choose(reduction, {}), hosts == 2 ? Algorithm::kDirect : Algorithm::kPairwise);
      EXPECT_FALSE(can_run(Algorithm::kTree, reduction));
    }
  }
}

std::vector<HostMeasurement> measurements_of(const CostModel& model, const std::vector<int>& hosts,
                                             const std::function<double(size_t)>& noise) {
  std::vector<HostMeasurement> list;
  for (const int n : hosts) {
    for (const Algorithm algorithm : kHostAlgorithms) {
      for (uint64_t bytes = 1024; bytes <= (uint64_t{64} << 20); bytes *= 4) {
        const HostReduction reduction = all_reduce(n, bytes);
        if (!can_run(algorithm, reduction)) continue;
        list.push_back({algorithm, reduction, forecast(algorithm, reduction, model) * noise(list.size())});
      }
    }
  }
  return list;
}

void expect_close(const LevelCost& level, const LevelCost& expected, double tolerance) {
  EXPECT_NEAR(level.alpha / expected.alpha, 1, tolerance);
  EXPECT_NEAR(level.beta / expected.beta, 1, tolerance);
}

TEST(CostModel, FitFindsTheModelThatMeasurementsCameFrom) {
  const CostModel truth{.wire = {42e-6, 3e-10}, .host = {3e-6, 2e-10}};
  const CostModel exact = fit(measurements_of(truth, {1, 2, 4, 6}, [](size_t) { return 1.0; }));
  expect_close(exact.wire, truth.wire, 1e-6);
  expect_close(exact.host, truth.host, 1e-6);
  // 10 % up and down: each constant stands in dozens of them.
  const CostModel noisy =
      fit(measurements_of(truth, {1, 2, 4, 6}, [](size_t i) { return i % 2 ? 1.1 : 0.9; }));
  expect_close(noisy.wire, truth.wire, 0.1);
  expect_close(noisy.host, truth.host, 0.1);
}

TEST(CostModel, FitKeepsWhatWasNotMeasured) {
  CostModel truth;
  truth.wire = {42e-6, 3e-10};
  const CostModel wire_only = fit(measurements_of(truth, {2}, [](size_t) { return 1.0; }));
  expect_close(wire_only.wire, truth.wire, 1e-6);
  EXPECT_EQ(wire_only.host.alpha, CostModel().host.alpha);
  EXPECT_EQ(
      fit({{Algorithm::kRing, all_reduce(1, 8), 1}, {Algorithm::kRing, all_reduce(1, 16), 1}}).wire.beta,
      CostModel().wire.beta);
}

TEST(CostModel, FitGivesNoNegativeCosts) {
  // Larger messages that take less time: only alpha can explain them.
  const CostModel latency =
      fit({{Algorithm::kRing, all_reduce(1, 1000), 2e-3}, {Algorithm::kRing, all_reduce(1, 2000), 1e-3}});
  EXPECT_GT(latency.host.alpha, 0);
  EXPECT_EQ(latency.host.beta, 0);
  // More than twice the time for twice the bytes: only beta can.
  const CostModel bandwidth =
      fit({{Algorithm::kRing, all_reduce(1, 1000), 1e-3}, {Algorithm::kRing, all_reduce(1, 2000), 4e-3}});
  EXPECT_EQ(bandwidth.host.alpha, 0);
  EXPECT_GT(bandwidth.host.beta, 0);
}

TEST(CostModel, FitRefusesWhatCannotTellAlphaFromBeta) {
  EXPECT_THAT(error_of([] { fit({}); }), HasSubstr("no measurements"));
  EXPECT_THAT(error_of([] {
                fit({{Algorithm::kDirect, all_reduce(2, 4096), 1e-3},
                     {Algorithm::kDirect, all_reduce(2, 4096), 2e-3}});
              }),
              HasSubstr("the wire are of one size"));
  EXPECT_THAT(error_of([] { fit({{Algorithm::kDirect, all_reduce(0, 4096), 1e-3}}); }), HasSubstr("0 hosts"));
  EXPECT_THAT(error_of([] { fit({{Algorithm::kDirect, all_reduce(2, 4096), 0}}); }), HasSubstr("0 s"));
  EXPECT_THAT(error_of([] {
                fit({{Algorithm::kHalving, all_reduce(3, 1 << 20), 1}});
              }),
              HasSubstr("halving over 3 hosts"));
}

TEST(CostModel, TextIsReadBackAsItWas) {
  const CostModel model{.wire = {1.0 / 3e6, 1.0 / 7e9}, .host = {0, 1e-10}};
  const CostModel read = parse_cost_model(to_json(model), "test");
  EXPECT_EQ(read.wire.alpha, model.wire.alpha);
  EXPECT_EQ(read.wire.beta, model.wire.beta);
  EXPECT_EQ(read.host.alpha, 0);
  EXPECT_EQ(read.host.beta, model.host.beta);
  EXPECT_EQ(parse_cost_model(R"({"wire": {"alpha": 1}})", "test").wire.beta, CostModel().wire.beta);
}

TEST(CostModel, MalformedTextIsRefusedWithItsSource) {
  for (const char* text :
       {"", "[]", "{", "3", R"({"wires": {}})", R"({"wire": 3})", R"({"wire": {"alpha": "1"}})",
        R"({"wire": {"alpha": -1}})", R"({"wire": {"gamma": 1}})"}) {
    EXPECT_THAT(error_of([&] { parse_cost_model(text, "a.json"); }), HasSubstr("a.json")) << text;
  }
  for (const char* text :
       {"{}", "[1]", R"([{"hosts": 2}])", R"([{"hosts": "2", "bytes": 1, "seconds": 1}])",
        R"([{"hosts": 1e30, "bytes": 1, "seconds": 1}])", R"([{"hosts": 2, "bytes": -1e9, "seconds": 1}])"}) {
    EXPECT_THAT(error_of([&] { parse_measurements(text, "b.json"); }), HasSubstr("b.json")) << text;
  }
  EXPECT_THAT(error_of([] {
                parse_measurements(R"([{"algorithm": "star", "hosts": 2, "bytes": 1, "seconds": 1}])",
                                   "b.json");
              }),
              HasSubstr("'star'"));
}

TEST(CostModel, MeasurementsAreRead) {
  const auto list = parse_measurements(
      R"([{"hosts": 1, "bytes": 8, "seconds": 0.5},
          {"algorithm": "tree", "hosts": 4, "ranks": 2, "bytes": 4096, "seconds": 2}])",
      "test");
  ASSERT_EQ(list.size(), 2u);
  EXPECT_EQ(list[1].algorithm, Algorithm::kTree);
  EXPECT_EQ(list[1].reduction.hosts, 4);
  EXPECT_EQ(list[1].reduction.slices, 2);
  EXPECT_EQ(list[1].reduction.bytes, 4096u);
  EXPECT_EQ(list[0].reduction.slices, 1);
  EXPECT_EQ(list[1].seconds, 2);
}

TEST(CostModel, TheEnvironmentNamesTheFile) {
  const testing::TemporaryFolder folder;
  ::setenv("LOCKSTEP_WIRE_MODEL", folder.path("model.json").c_str(), 1);
  EXPECT_THAT(error_of([] { read_cost_model(); }), HasSubstr("LOCKSTEP_WIRE_MODEL"));
  folder.write("model.json", to_json(CostModel::of_wire(100)));
  EXPECT_EQ(read_cost_model().wire.beta, CostModel::of_wire(100).wire.beta);
  ::unsetenv("LOCKSTEP_WIRE_MODEL");
  EXPECT_EQ(read_cost_model().wire.beta, CostModel().wire.beta);
}

TEST(CostModel, MeasurementsAreReadFromAFileWhichErrorsName) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path("measured.json");
  EXPECT_THAT(error_of([&] { read_measurements(path); }), HasSubstr(path + " can't be read, or is empty"));
  folder.write("measured.json", "");
  EXPECT_THAT(error_of([&] { read_measurements(path); }), HasSubstr(path + " can't be read, or is empty"));
  folder.write("measured.json", "{");
  EXPECT_THAT(error_of([&] { read_measurements(path); }), HasSubstr(path + ": "));
  folder.write("measured.json", R"([{"hosts": 1, "bytes": 8, "seconds": 0.5}])");
  EXPECT_EQ(read_measurements(path).size(), 1u);
}

TEST(CostModel, TheTableHasARowForEachNumberOfHosts) {
  const std::string table = forecast_table(CostModel());
  EXPECT_THAT(table, HasSubstr("| hosts | 4 KiB |"));
  EXPECT_THAT(table, HasSubstr("| 1000 | "));
}

}  // namespace
}  // namespace lockstep::cost_model_test
