#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <map>
#include <random>
#include <string>
#include <sys/stat.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/profiler/merge_traces.h>
#include <lockstep/profiler/testing/synthetic_trace.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::profiler::merge_traces_test {
namespace {

using lockstep::testing::message_of;
using lockstep::testing::TemporaryFolder;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::SyntheticTrace;

constexpr int64_t kMs = 1'000'000;

json merged(const TemporaryFolder& folder, MergeReport& report) {
  report = merge_traces(folder.path().string(), folder.path("all.json"));
  std::ifstream file(folder.path("all.json"));
  return json::parse(file);
}

std::vector<json> events_of(const json& trace, const std::string& phase) {
  std::vector<json> found;
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == phase) found.push_back(event);
  }
  return found;
}

TEST(MergeTraces, ARankIsAProcessAndPartsOfACollectiveAreLinked) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 3; ++rank) {
    SyntheticTrace trace({.rank = rank, .world_size = 3});
    trace.add_operator("aten::mm", rank * kMs, rank * kMs + 100'000);
    trace.add_collective("all_reduce", 5, (1 + rank) * kMs, 4 * kMs);
    trace.write(folder);
  }
  MergeReport report;
  const json trace = merged(folder, report);
  EXPECT_THAT(report.ranks, ElementsAre(0, 1, 2));
  EXPECT_EQ(report.collectives, 1);
  EXPECT_EQ(report.arrows, 2) << "from the one that came last to each other";
  EXPECT_EQ(report.backward, 0);
  std::map<int64_t, double> waiting;
  for (const json& event : events_of(trace, "X")) {
    EXPECT_LT(event["pid"], 3);
    if (event["name"] == "lockstep:all_reduce") {
      waiting[event["pid"]] = event["args"]["Waiting (us)"];
      EXPECT_DOUBLE_EQ(event["args"]["Moving (us)"], 1000);
    }
  }
  EXPECT_EQ(waiting, (std::map<int64_t, double>{{0, 2000}, {1, 1000}, {2, 0}}));
  for (const json& event : events_of(trace, "s")) EXPECT_EQ(event["pid"], 2);
  EXPECT_FALSE(trace.contains("distributedInfo"));
  EXPECT_THAT(describe(report), HasSubstr("3 ranks"));
}

/// All announce an operation before any of them moves data.
TEST(MergeTraces, AlsoOperationsWithARootWaitForAllMembers) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 3; ++rank) {
    SyntheticTrace trace({.rank = rank, .world_size = 3});
    trace.add_collective("broadcast", 1, (rank + 1) * kMs, 4 * kMs, /*root=*/0);
    trace.add_collective("reduce", 2, (8 - rank) * kMs, 9 * kMs, /*root=*/0);
    trace.write(folder);
  }
  MergeReport report;
  const json trace = merged(folder, report);
  std::map<std::string, std::map<int64_t, double>> waiting;
  for (const json& event : events_of(trace, "X"))
    waiting[event["name"]][event["pid"]] = event["args"]["Waiting (us)"];
  EXPECT_EQ(waiting["lockstep:broadcast"], (std::map<int64_t, double>{{0, 2000}, {1, 1000}, {2, 0}}));
  EXPECT_EQ(waiting["lockstep:reduce"], (std::map<int64_t, double>{{0, 0}, {1, 1000}, {2, 2000}}));
  std::vector<int64_t> causes;
  for (const json& event : events_of(trace, "s")) causes.push_back(event["pid"]);
  EXPECT_THAT(causes, ElementsAre(2, 2, 0, 0));
}

/// As NCCL's root may: nothing has gone back in time.
TEST(MergeTraces, ARootThatHasEndedBeforeOthersBeganHasNotWaited) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 2; ++rank) {
    SyntheticTrace trace({.rank = rank});
    trace.add_collective("broadcast", 1, (1 + 2 * rank) * kMs, (2 + 2 * rank) * kMs, /*root=*/0);
    trace.write(folder);
  }
  MergeReport report;
  const json trace = merged(folder, report);
  EXPECT_EQ(report.arrows + report.backward, 0);
  for (const json& event : events_of(trace, "X")) EXPECT_EQ(event["args"]["Waiting (us)"], 0);
}

/// The first receive's send was before its trace began.
TEST(MergeTraces, MessagesAreLinkedInTheirOrder) {
  const TemporaryFolder folder;
  SyntheticTrace sender({.rank = 0}), receiver({.rank = 1});
  for (int64_t i = 0; i < 5; ++i) {
    if (i > 0) sender.add_message("send", 1, 10 * i * kMs, (10 * i + 1) * kMs);
    receiver.add_message("recv", 0, (10 * i - 2) * kMs, (10 * i + 1) * kMs);
  }
  sender.write(folder);
  receiver.write(folder);
  MergeReport report;
  const json trace = merged(folder, report);
  EXPECT_EQ(report.messages, 4);
  EXPECT_EQ(report.arrows, 4);
  for (const json& event : events_of(trace, "X")) {
    if (event["name"] == "lockstep:recv" && event["args"].contains("Waiting (us)")) {
      EXPECT_DOUBLE_EQ(event["args"]["Waiting (us)"], 2000);
    }
  }
}

/// The sends of each way and the receives there, in their order: {begin, end} in the merged trace.
using Times = std::vector<std::pair<double, double>>;
std::map<std::pair<int64_t, int64_t>, std::array<Times, 2>> messages_of(const json& trace) {
  std::map<std::pair<int64_t, int64_t>, std::array<Times, 2>> ways;
  for (const json& event : events_of(trace, "X")) {
    const json& arguments = event["args"];
    if (!arguments.value("Is P2P", false)) continue;
    const bool sends = arguments["Collective name"] == "send";
    const int64_t rank = arguments["Rank"], peer = arguments["Peer Rank"];
    const double begin = event["ts"], end = begin + event["dur"].get<double>();
    ways[sends ? std::pair(rank, peer) : std::pair(peer, rank)][sends ? 0 : 1].emplace_back(begin, end);
  }
  return ways;
}

/// A double at this distance from the base knows two nanoseconds.
constexpr double kRounding = 0.002;

/// Hosts with wrong clocks, by up to seconds, and operations at random, as Lockstep's and as NCCL's, where a root and those that
/// send to it do not wait for all: in the merged trace no part ends before what it needs has begun, and the error that is
/// told is one.
TEST(MergeTraces, NothingGoesBackInTime) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t most) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    };
    const int64_t hosts = 2 + below(3), ranks = hosts * (1 + below(3));
    std::vector<int64_t> ahead = {0};
    while (static_cast<int64_t>(ahead.size()) < hosts) ahead.push_back(below(4'000 * kMs) - 2'000 * kMs);
    std::vector<SyntheticTrace> traces;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t host = rank * hosts / ranks;
      traces.emplace_back(SyntheticTrace::Options{.rank = rank,
                                                  .world_size = ranks,
                                                  .host = "host" + std::to_string(host),
                                                  .ahead_ns = ahead[static_cast<size_t>(host)]});
    }
    std::map<int64_t, std::pair<std::string, int64_t>> rooted;  // kind and root, by sequence
    int64_t messages = 0;
    for (int64_t i = 1; i <= 90; ++i) {
      const int64_t slot = 10'000 * kMs + i * 10 * kMs;
      std::vector<int64_t> begins;
      for (int64_t rank = 0; rank < ranks; ++rank) begins.push_back(slot + below(5 * kMs));
      const int64_t last = *std::max_element(begins.begin(), begins.end());
      if (i % 3 == 0) rooted[i] = {below(2) == 0 ? "broadcast" : "reduce", below(ranks)};
      const std::string kind = i % 3 == 0 ? rooted[i].first : i % 3 == 1 ? "all_reduce" : "barrier";
      const int64_t root = i % 3 == 0 ? rooted[i].second : -1;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int64_t begin = begins[static_cast<size_t>(rank)];
        int64_t needs = last;
        if (kind == "broadcast") needs = std::max(begin, begins[static_cast<size_t>(root)]);
        if (kind == "reduce" && rank != root) needs = begin;
        traces[static_cast<size_t>(rank)].add_collective(kind, i, begin, needs + 1 + below(100'000), root);
      }
      for (int64_t many = below(3); many > 0; --many, ++messages) {
        const int64_t from = below(ranks), to = (from + 1 + below(ranks - 1)) % ranks;
        const int64_t sent = slot + (9 - 2 * many) * kMs, received = sent + 1 + below(100'000);
        traces[static_cast<size_t>(from)].add_message("send", to, sent, received);
        traces[static_cast<size_t>(to)].add_message("recv", from, received - 1 - below(kMs), received);
      }
    }
    const TemporaryFolder folder;
    for (const SyntheticTrace& trace : traces) trace.write(folder);
    MergeReport report;
    const json trace = merged(folder, report);
    EXPECT_EQ(report.backward, 0) << "seed " << seed;
    EXPECT_EQ(report.collectives, 90);
    EXPECT_EQ(report.messages, messages);
    EXPECT_GE(report.arrows, 60 * (ranks - 1) + messages);
    ASSERT_EQ(static_cast<int64_t>(report.hosts.size()), hosts);
    for (size_t host = 0; host < report.hosts.size(); ++host) {
      EXPECT_TRUE(report.hosts[host].known);
      EXPECT_LE(std::abs(report.hosts[host].clock_ahead_ns - ahead[host]),
                report.hosts[host].clock_error_ns + 1)
          << "seed " << seed;
    }
    std::map<int64_t, std::map<int64_t, std::pair<double, double>>> parts;  // by sequence and rank
    for (const json& event : events_of(trace, "X")) {
      const json& arguments = event["args"];
      const double begin = event["ts"];
      if (!arguments.value("Is P2P", false)) {
        parts[arguments["Seq"]][arguments["Rank"]] = {begin, begin + event["dur"].get<double>()};
      }
    }
    for (const auto& [sequence, by_rank] : parts) {
      for (const auto& [cause, first] : by_rank) {
        for (const auto& [effect, second] : by_rank) {
          if (rooted.contains(sequence)) {
            const auto& [kind, root] = rooted[sequence];
            if (kind == "broadcast" ? cause != root : effect != root) continue;
          }
          EXPECT_LE(first.first, second.second + kRounding) << "seed " << seed;
        }
      }
    }
    for (const auto& [way, of_way] : messages_of(trace)) {
      ASSERT_EQ(of_way[0].size(), of_way[1].size());
      for (size_t i = 0; i < of_way[0].size(); ++i) {
        EXPECT_LE(of_way[0][i].first, of_way[1][i].second + kRounding) << "seed " << seed;
      }
    }
    std::map<int64_t, double> sent;
    for (const json& event : events_of(trace, "s")) sent[event["id"]] = event["ts"];
    for (const json& event : events_of(trace, "f")) EXPECT_LE(sent.at(event["id"]), event["ts"]);
  }
}

using Missed = std::array<int64_t, 2>;

/// A pipeline of two stages, each on a host with a clock of its own, and no collective: stage 0 sends activations, and gets
/// gradients. `missed`: how many steps each host has begun to record later. `tags`: each micro-batch has one of its own.
struct PipelineOfHosts {
  static constexpr int64_t kMicroBatches = 4;
  static constexpr int64_t kMostLatency = 100'000;

  PipelineOfHosts(unsigned seed, int64_t ahead, const Missed& missed, int64_t steps, bool tags) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t most) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    };
    std::array<SyntheticTrace, 2> traces = {SyntheticTrace({.rank = 0, .host = "one"}),
                                            SyntheticTrace({.rank = 1, .host = "two", .ahead_ns = ahead})};
    int64_t at = 10'000 * kMs;
    for (int64_t step = 0; step < steps; ++step) {
      for (int64_t message = 0; message < 2 * kMicroBatches; ++message) {
        const int64_t from = message < kMicroBatches ? 0 : 1, to = 1 - from;
        const int64_t tag = tags ? message : 0;
        at += 2 * kMs + below(kMs);
        const int64_t received = at + kMostLatency / 4 + below(kMostLatency * 3 / 4);
        if (step >= missed.at(from))
          traces.at(from).add_message("send", to, at, received + below(kMostLatency), tag);
        if (step >= missed.at(to))
          traces.at(to).add_message("recv", from, at - below(2 * kMs), received, tag);
      }
      at += below(10 * kMs);  // what the rest of the step takes is never the same
    }
    for (const SyntheticTrace& trace : traces) trace.write(folder);
  }
  TemporaryFolder folder;
};

void expect_on_one_clock(unsigned seed, int64_t ahead, const Missed& missed, int64_t steps, bool tags) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(steps) + " steps, missed " +
               std::to_string(missed[0]) + " and " + std::to_string(missed[1]) + (tags ? ", tags" : ""));
  const PipelineOfHosts job(seed, ahead, missed, steps, tags);
  MergeReport report;
  const json trace = merged(job.folder, report);
  const int64_t common = steps - std::max(missed[0], missed[1]);
  EXPECT_EQ(report.messages, common * 2 * PipelineOfHosts::kMicroBatches);
  EXPECT_EQ(report.arrows, report.messages);
  EXPECT_EQ(report.backward, 0);
  ASSERT_EQ(report.hosts.size(), 2);
  const MergeReport::Host& second = report.hosts[1];
  EXPECT_TRUE(second.known);
  EXPECT_LE(std::abs(second.clock_ahead_ns - ahead), second.clock_error_ns + 1);
  EXPECT_LE(second.clock_error_ns, PipelineOfHosts::kMostLatency);
  if (tags) return;
  for (const auto& [way, of_way] : messages_of(trace)) {
    const size_t later = of_way[0].size() - std::min(of_way[0].size(), of_way[1].size());
    const size_t earlier = of_way[1].size() - std::min(of_way[0].size(), of_way[1].size());
    for (size_t i = 0; i + std::max(later, earlier) < std::max(of_way[0].size(), of_way[1].size()); ++i)
      EXPECT_LE(of_way[0][i + later].first, of_way[1][i + earlier].second + kRounding);
  }
}

TEST(MergeTraces, HostsThatOnlySendAndReceiveAreOnOneClock) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    for (const int64_t ahead : {int64_t{0}, 3 * kMs, -40 * kMs, 1'500 * kMs}) {
      for (const Missed& missed : {Missed{0, 0}, Missed{2, 0}, Missed{0, 1}}) {
        for (const bool tags : {false, true}) expect_on_one_clock(seed, ahead, missed, 12, tags);
      }
      for (const Missed& missed : {Missed{0, 0}, Missed{1, 0}, Missed{0, 1}})
        expect_on_one_clock(seed, ahead, missed, 3, true);
    }
  }
}

/// Too few to tell which of them belong together: the clocks stay unknown.
TEST(MergeTraces, AFewMessagesDoNotTellOfClocks) {
  const PipelineOfHosts job(1, 3 * kMs, {0, 0}, 1, true);
  MergeReport report;
  merged(job.folder, report);
  EXPECT_EQ(report.messages, 2 * PipelineOfHosts::kMicroBatches);
  EXPECT_FALSE(report.hosts.at(1).known);
}

/// An operation of both bounds the clocks within 13 ms, in which six messages more or less would fit better than those that
/// belong together.
TEST(MergeTraces, MessagesNarrowWhatCollectivesTellOfClocks) {
  const TemporaryFolder folder;
  SyntheticTrace one({.rank = 0, .host = "one"}), two({.rank = 1, .host = "two"});
  one.add_collective("all_reduce", 1, 0, 25'100'000);
  two.add_collective("all_reduce", 1, 25'000'000, 25'100'000);
  for (int64_t i = 0; i < 8; ++i) {
    const int64_t at = 30 * kMs + 2 * i * kMs;
    one.add_message("send", 1, at, at + 100'000);
    two.add_message("recv", 0, at, at + 100'000);
    two.add_message("send", 0, at + kMs, at + kMs + 100'000);
    one.add_message("recv", 1, at + kMs, at + kMs + 100'000);
  }
  one.write(folder);
  two.write(folder);
  MergeReport report;
  merged(folder, report);
  const MergeReport::Host& host = report.hosts.at(1);
  EXPECT_TRUE(host.known);
  EXPECT_LE(std::abs(host.clock_ahead_ns), host.clock_error_ns + 1);
}

/// Nothing bounds how far the receiver's clock is ahead.
TEST(MergeTraces, MessagesOneWayDoNotTellOfClocks) {
  const TemporaryFolder folder;
  SyntheticTrace sender({.rank = 0, .host = "one"}), receiver({.rank = 1, .host = "two"});
  for (int64_t i = 1; i <= 20; ++i) {
    sender.add_message("send", 1, i * kMs, i * kMs + 1000);
    receiver.add_message("recv", 0, i * kMs, i * kMs + 1000);
  }
  sender.write(folder);
  receiver.write(folder);
  MergeReport report;
  merged(folder, report);
  EXPECT_EQ(report.messages, 20);
  EXPECT_FALSE(report.hosts.at(1).known);
}

TEST(MergeTraces, HostsThatHaveNothingInCommonAreTold) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 2; ++rank) {
    SyntheticTrace trace({.rank = rank, .host = rank == 0 ? "one" : "other"});
    trace.add_operator("aten::mm", 0, kMs);
    trace.write(folder);
  }
  MergeReport report;
  merged(folder, report);
  EXPECT_THAT(describe(report), HasSubstr("host other: nothing tells how its clock stands"));
}

TEST(MergeTraces, NumbersOfArrowsStayApart) {
  const TemporaryFolder folder;
  for (int64_t rank = 0; rank < 2; ++rank) {
    json trace = json::parse(SyntheticTrace({.rank = rank}).text());
    for (const char* phase : {"s", "f"}) {
      trace["traceEvents"].push_back({{"ph", phase},
                                      {"id", 3},
                                      {"pid", 1000 + rank},
                                      {"tid", 1},
                                      {"ts", 1.0},
                                      {"cat", "fwdbwd"},
                                      {"name", "fwdbwd"}});
    }
    folder.write("r" + std::to_string(rank) + ".pt.trace.json", trace.dump());
  }
  MergeReport report;
  const json trace = merged(folder, report);
  const auto begins = events_of(trace, "s");
  ASSERT_EQ(begins.size(), 2);
  EXPECT_NE(begins[0]["id"], begins[1]["id"]);
}

/// Kineto gives a GPU its number as a process, so those of all ranks are alike, and bars of its own a name in place of one. An
/// arrow leads from the call that launches a kernel to it.
TEST(MergeTraces, DevicesAreProcessesOfTheirRank) {
  const TemporaryFolder folder;
  const json more = json::parse(R"([
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "train"}},
    {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "args": {"labels": "GPU 1"}},
    {"ph": "X", "cat": "Trace", "name": "Profiler", "pid": "Spans", "tid": "Profiler", "ts": 0, "dur": 5},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": -1, "tid": 77, "ts": 0},
    {"ph": "f", "cat": "ac2g", "name": "ac2g", "id": 5, "pid": 0, "tid": 7, "ts": 2, "bp": "e"}])");
  for (int64_t rank = 0; rank < 2; ++rank) {
    SyntheticTrace of_rank({.rank = rank});
    of_rank.add("cuda_runtime", "cudaLaunchKernel", 0, 1000);
    of_rank.add_kernel("kernel", "gemm", 2000, 3000, /*device=*/0);
    of_rank.add_kernel("gpu_memcpy", "Memcpy HtoD", 3000, 4000, /*device=*/1);
    json trace = json::parse(of_rank.text());
    for (json event : more) {
      if (event["pid"] == -1) event["pid"] = of_rank.pid();
      trace["traceEvents"].push_back(event);
    }
    folder.write("rank" + std::to_string(rank) + ".pt.trace.json", trace.dump());
  }
  MergeReport report;
  const json trace = merged(folder, report);
  std::map<std::string, std::vector<std::string>> processes;  // by what is there
  for (const json& event : events_of(trace, "X")) processes[event["name"]].push_back(event["pid"].dump());
  EXPECT_THAT(processes["cudaLaunchKernel"], ElementsAre("0", "1"));
  EXPECT_THAT(processes["gemm"], ElementsAre("1000000", "2000000"));
  EXPECT_THAT(processes["Memcpy HtoD"], ElementsAre("1000001", "2000001"));
  EXPECT_THAT(processes["Profiler"], ElementsAre("\"rank 0 Spans\"", "\"rank 1 Spans\""));
  std::map<std::string, std::string> about;  // by the event's name and the process
  for (const json& event : events_of(trace, "M")) {
    const json& arguments = event["args"];
    about[event["name"].get<std::string>() + " " + event["pid"].dump()] =
        arguments.value("name", arguments.value("labels", ""));
  }
  EXPECT_EQ(about["process_name 0"], "rank 0 (one)");
  EXPECT_EQ(about["process_name 1000001"], "rank 0: train");
  EXPECT_EQ(about["process_name 2000001"], "rank 1: train");
  EXPECT_EQ(about["process_labels 2000001"], "GPU 1");
  std::map<int64_t, std::vector<std::string>> arrows;  // from and to, by id
  for (const char* phase : {"s", "f"}) {
    for (const json& event : events_of(trace, phase)) arrows[event["id"]].push_back(event["pid"].dump());
  }
  ASSERT_EQ(arrows.size(), 2) << "of each rank";
  EXPECT_THAT(arrows.begin()->second, ElementsAre("0", "1000000"));
  EXPECT_THAT(arrows.rbegin()->second, ElementsAre("1", "2000000"));
}

TEST(MergeTraces, SeveralRunsAreNotMerged) {
  const TemporaryFolder folder;
  for (const int run : {1, 2}) SyntheticTrace({.pid = 1000 * run}).write(folder, "", run);
  EXPECT_THAT(
      message_of<c10::ValueError>([&] { merge_traces(folder.path().string(), folder.path("all.json")); }),
      HasSubstr("rank 0 has traces of 2 processes"));
  EXPECT_THAT(folder.entries(), Not(::testing::Contains("all.json")));
}

TEST(MergeTraces, TheOutputTakesThePlaceOfFilesAlone) {
  const TemporaryFolder folder;
  SyntheticTrace({.rank = 0}).write(folder);
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(message_of<c10::Error>([&] { merge_traces(folder.path().string(), pipe); }),
              HasSubstr("pipe can't be written"));
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { merge_traces(folder.path().string(), folder.path("all.pt.trace.json.gz")); }),
              HasSubstr("called like a rank's trace"));
  std::filesystem::create_directory(folder.path("merged"));
  merge_traces(folder.path().string(), folder.path("merged/all.pt.trace.json"));
  EXPECT_TRUE(std::filesystem::is_regular_file(folder.path("merged/all.pt.trace.json")));
}

TEST(MergeTraces, FilesThatAreNoTracesAreNamed) {
  const TemporaryFolder folder;
  const auto message = [&] {
    return message_of<c10::ValueError>(
        [&] { merge_traces(folder.path().string(), folder.path("all.json")); });
  };
  EXPECT_THAT(message(), HasSubstr("has no traces"));
  for (const char* text : {"", "[]", "{}", "{\"traceEvents\": {}}", "{\"traceEvents\": [1]}",
                           "{\"traceEvents\": [{", "{\"traceEvents\": [{\"a\": nul}]}", "{1: 2}"}) {
    folder.write("bad.pt.trace.json", text);
    EXPECT_THAT(message(), HasSubstr("bad.pt.trace.json is no trace")) << text;
  }
  EXPECT_THAT(folder.entries(), Not(::testing::Contains("all.json")));
}

}  // namespace
}  // namespace lockstep::profiler::merge_traces_test
