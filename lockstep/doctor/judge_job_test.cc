#include <algorithm>
#include <functional>
#include <gmock/gmock.h>

#include <gtest/gtest.h>

#include <lockstep/doctor/judge_job.h>

// Each finding is provoked by changing one thing of a healthy job.
namespace lockstep::doctor::judge_job_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

RankFacts healthy_rank(int rank) {
  RankFacts facts;
  facts.rank = rank;
  facts.pid = 1000 + rank;
  facts.hostname = "box";
  facts.host = "boot 1 box";
  facts.local_rank = rank;
  facts.cores = {0, 1, 2, 3};
  facts.host_cores = {0, 1, 2, 3};
  facts.cpu = "EPYC";
  facts.executable = "/usr/bin/lockstep";
  facts.executable_fingerprint = "10-aa";
  facts.lockstep_version = "0.1.0";
  facts.lockstep_fingerprint = "20-bb";
  facts.torch_version = "2.13.0";
  facts.torch_fingerprint = "30-cc";
  facts.environment = {{"OMP_NUM_THREADS", "1"}};
  return facts;
}

/// Four ranks on four cores, all pairs tested.
JobObservations healthy() {
  JobObservations job;
  for (int rank = 0; rank < 4; ++rank) {
    job.ranks.push_back(healthy_rank(rank));
    job.clock_offsets[rank] = 1e-5 * rank;
  }
  for (const auto& round : tournament(4)) {
    for (const Pair& pair : round) {
      job.pairs.push_back({pair, {}, {2e-6, 3e-6, 9e-3}, {150e-6, 160e-6, 140e-6}});
    }
  }
  return job;
}

PairResult& pair_of(JobObservations& job, int low, int high) {
  for (PairResult& pair : job.pairs) {
    if (pair.ranks == Pair(low, high)) return pair;
  }
  throw std::logic_error("no such pair");
}

TEST(JudgeJob, AHealthyJobHasNothingButOks) {
  const Findings findings = judge_job(healthy());
  for (const Finding& finding : findings) {
    EXPECT_EQ(finding.severity, Severity::kOk) << finding.check << ": " << finding.message;
  }
  EXPECT_THAT(findings.back().message,
              HasSubstr("6 of 6 pairs work: all_reduce of 4 B in 3 µs, of 1 MiB in 150 µs"));
}

TEST(JudgeJob, PairsBetweenHostsAreComparedWithEachOther) {
  JobObservations job = healthy();
  for (const int rank : {2, 3}) {
    job.ranks[rank]->host = "boot 2 other";
    job.ranks[rank]->hostname = "other";
  }
  for (PairResult& pair : job.pairs) {
    if ((pair.ranks.first < 2) != (pair.ranks.second < 2))
      pair.latencies = pair.transfers = {9e-3, 10e-3, 11e-3};
  }
  std::string text;
  for (const Finding& finding : judge_job(job)) {
    EXPECT_LE(finding.severity, Severity::kNote) << finding.message;
    text += finding.message + '\n';
  }
  EXPECT_THAT(text, AllOf(HasSubstr("2 of 2 pairs work: all_reduce of 4 B in 3 µs"),
                          HasSubstr("4 of 4 pairs between hosts work: all_reduce of 4 B in 10 ms")));
  pair_of(job, 0, 3).latencies = {1, 1, 1};
  const Findings findings = judge_job(job);
  EXPECT_TRUE(std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.severity == Severity::kWarning &&
           finding.message.find("ranks 0 and 3") != std::string::npos;
  }));
}

TEST(JudgeJob, ASingleRankHasNoPairs) {
  JobObservations job;
  job.ranks = {healthy_rank(0)};
  job.clock_offsets[0] = 0;
  for (const Finding& finding : judge_job(job)) EXPECT_EQ(finding.severity, Severity::kOk) << finding.message;
}

struct Case {
  const char* name;
  std::function<void(JobObservations&)> change;
  Severity severity;
  const char* check;
  const char* message;  // part of it
  int count = 1;        // of findings that are not ok
};

void PrintTo(const Case& each, std::ostream* out) {
  *out << each.name;
}

/// The first of them is the case's, and there are as many as it says.
void expect_findings(const Findings& findings, const Case& each, const std::string& other_check = "") {
  std::string all;
  int found = 0;
  for (const Finding& finding : findings) {
    if (finding.severity == Severity::kOk || finding.check == other_check) continue;
    all += finding.check + ": " + finding.message + '\n';
    if (found++ > 0) continue;
    EXPECT_STREQ(severity_name(finding.severity), severity_name(each.severity)) << finding.message;
    EXPECT_EQ(finding.check, each.check);
    EXPECT_THAT(finding.message, HasSubstr(each.message));
    EXPECT_NE(finding.remedy, "");
  }
  EXPECT_EQ(found, each.count) << all;
}

class JudgeJobTable : public ::testing::TestWithParam<Case> {};

TEST_P(JudgeJobTable, FindsItAndNothingElse) {
  const Case& each = GetParam();
  JobObservations job = healthy();
  each.change(job);
  expect_findings(judge_job(job), each);
}

const Severity kNote = Severity::kNote;
const Severity kWarning = Severity::kWarning;
const Severity kProblem = Severity::kProblem;

INSTANTIATE_TEST_SUITE_P(
    Ranks, JudgeJobTable,
    ::testing::Values(
        Case{"hosts",
             [](auto& job) {
               job.ranks[3]->host = "boot 2 other";
               job.ranks[3]->hostname = "other";
             },
             kNote, "hosts", "box (ranks 0-2), other (rank 3)"},
        Case{"users by host",
             [](auto& job) {
               job.ranks[3]->host = "boot 2 other";
               job.ranks[3]->hostname = "other";
               job.ranks[3]->user = 7;
             },
             kNote, "hosts", "other (rank 3)"},
        Case{"users", [](auto& job) { job.ranks[1]->user = 7; }, kProblem, "users", "rank 1: 7"},
        Case{"cpu", [](auto& job) { job.ranks[2]->cpu = "Xeon"; }, kNote, "cpu",
             "ranks 0, 1 and 3: EPYC, rank 2: Xeon"},
        Case{"lockstep version", [](auto& job) { job.ranks[2]->lockstep_version = "0.2.0"; }, kProblem,
             "versions", "Lockstep differs: ranks 0, 1 and 3: 0.1.0 (20-bb), rank 2: 0.2.0 (20-bb)"},
        Case{"lockstep build", [](auto& job) { job.ranks[0]->lockstep_fingerprint = "20-dd"; }, kProblem,
             "versions", "rank 0: 0.1.0 (20-dd)"},
        Case{"torch", [](auto& job) { job.ranks[3]->torch_fingerprint = "31-cc"; }, kProblem, "versions",
             "torch differs: ranks 0-2: 2.13.0 (30-cc), rank 3: 2.13.0 (31-cc)"},
        Case{"executable", [](auto& job) { job.ranks[3]->executable_fingerprint = "1-1"; }, kProblem,
             "versions", "the lockstep program differs"},
        Case{"program",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->program = "./train", rank->program_fingerprint = "5-5";
               job.ranks[1]->program_fingerprint = "";
             },
             kProblem, "versions",
             "the program differs: ranks 0, 2 and 3: ./train (5-5), rank 1: ./train (unreadable)"},
        Case{"no program",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->program = "./train";
             },
             kProblem, "versions", "no rank can read ./train"},
        Case{"unreadable facts", [](auto& job) { job.ranks[2].reset(); }, kProblem, "versions", "rank 2"},
        Case{"one core for two", [](auto& job) { job.ranks[0]->cores = job.ranks[1]->cores = {2}; }, kProblem,
             "cores", "ranks 0 and 1 on box share core 2, though the host has 4"},
        Case{"two cores for three",
             [](auto& job) {
               job.ranks[1]->cores = {0, 1};
               job.ranks[2]->cores = {0};
               job.ranks[3]->cores = {1};
             },
             kProblem, "cores", "ranks 1-3 on box share cores 0-1, though the host has 4"},
        Case{"more ranks than cores",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->cores = rank->host_cores = {0, 1};
             },
             kWarning, "cores", "4 ranks on the 2 cores of box"},
        Case{"quota", [](auto& job) { job.ranks[0]->core_quota = 2.0; }, kWarning, "cores", "quota"},
        Case{"threads",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->environment["OMP_NUM_THREADS"] = "2";
             },
             kWarning, "cores", "4 ranks with 8 threads in all on the 4 cores of box"},
        Case{"unset threads",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->environment.clear();
             },
             kWarning, "cores", "16 threads"},
        Case{"unknown cores",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->cores.clear();
             },
             kWarning, "cores", "unknown"},
        Case{"one device",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->gpus = 4;
               job.ranks[3]->local_rank = 1;
             },
             kWarning, "devices", "ranks 1 and 3 would share GPU 1 of box: NCCL refuses that"},
        Case{"one visible device",
             [](auto& job) {
               for (auto& rank : job.ranks) {
                 rank->gpus = 4;
                 rank->environment["CUDA_VISIBLE_DEVICES"] = std::to_string(rank->rank / 2);
               }
             },
             kWarning, "devices", "ranks 0 and 1 would share GPU 0", 2},
        Case{"too few devices",
             [](auto& job) {
               for (auto& rank : job.ranks) rank->gpus = 3;
             },
             kProblem, "devices", "rank 3 would take a GPU"},
        Case{"too few visible",
             [](auto& job) {
               for (auto& rank : job.ranks) {
                 rank->gpus = 4;
                 rank->environment["CUDA_VISIBLE_DEVICES"] = "2,1,0";
               }
             },
             kProblem, "devices", "rank 3 would take a GPU"},
        Case{"variable", [](auto& job) { job.ranks[2]->environment["NCCL_ALGO"] = "Ring"; }, kWarning,
             "variables", "NCCL_ALGO differs: ranks 0, 1 and 3: unset, rank 2: 'Ring'"},
        Case{"debug", [](auto& job) { job.ranks[2]->environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"; },
             kWarning, "variables", "TORCH_DISTRIBUTED_DEBUG"},
        Case{"clock", [](auto& job) { job.clock_offsets[2] = -1.5; }, kWarning, "clocks",
             "rank 3's clock is 1500.0 ms ahead of rank 2's"}));

const std::string kBroken = "broken";

INSTANTIATE_TEST_SUITE_P(
    Communication, JudgeJobTable,
    ::testing::Values(
        Case{"gone", [](auto& job) { job.gone[2] = "ended during the test of the pairs 0-2, 1-3"; }, kProblem,
             "ranks", "rank 2 (pid 1002 on box) ended during the test of the pairs 0-2"},
        Case{"join",
             [](auto& job) {
               job.pairs.clear();
               job.join_errors = {{0, kBroken}, {1, kBroken}, {2, kBroken}, {3, kBroken}};
             },
             kProblem, "join", "init_process_group fails; rank 0 says: broken (ranks 1-3 failed too)"},
        Case{"all",
             [](auto& job) {
               job.all_errors = {{1, "wrong values"}, {3, "other"}};
             },
             kProblem, "all ranks", "rank 1 says: wrong values; rank 3 says: other"},
        Case{"pair", [](auto& job) { pair_of(job, 1, 2).errors[2] = kBroken; }, kProblem, "pairs",
             "ranks 1 and 2: rank 2 says: broken"},
        Case{"two pairs",
             [](auto& job) {
               pair_of(job, 1, 2).errors[2] = kBroken;
               pair_of(job, 0, 3).errors[0] = kBroken;
             },
             kProblem, "pairs", "ranks 0 and 3: rank 0 says: broken", 2},
        Case{"a rank's pairs",
             [](auto& job) {
               for (int other : {0, 1, 2}) pair_of(job, other, 3).errors[other] = kBroken;
             },
             kProblem, "pairs", "rank 3 with each of ranks 0-2, say ranks 0 and 3: rank 0 says: broken"},
        Case{"slow transfer",
             [](auto& job) {
               pair_of(job, 0, 2).transfers = {1e-3, 30e-3, 29e-3};
             },
             kWarning, "pairs",
             "ranks 0 and 2: all_reduce of 1 MiB takes 29 ms, 193 times the median of all pairs, 150 µs"},
        Case{"slow answer",
             [](auto& job) {
               pair_of(job, 0, 2).latencies = {300e-6, 310e-6, 9e-3};
             },
             kWarning, "pairs",
             "ranks 0 and 2: all_reduce of 4 B takes 310 µs, 103 times the median of all pairs, 3 µs"},
        Case{"a slow rank",
             [](auto& job) {
               for (int other : {0, 2, 3}) {
                 pair_of(job, std::min(1, other), std::max(1, other)).transfers = {40e-3, 40e-3, 40e-3};
               }
               // Half of the pairs are slow now; the median must still be a good one.
               for (auto& pair : job.pairs) {
                 if (pair.ranks.first != 1 && pair.ranks.second != 1) continue;
                 pair.latencies = {2e-6, 3e-6, 4e-6};
               }
             },
             kWarning, "pairs", "rank 1 with each of ranks 0, 2 and 3, say "}));

/// Four ranks, each on a host of its own; the wires carry 800 Mbit/s.
JobObservations over_hosts() {
  JobObservations job = healthy();
  for (int rank = 0; rank < 4; ++rank) {
    RankFacts& facts = *job.ranks[rank];
    facts.hostname = std::string("node-") + static_cast<char>('a' + rank);
    facts.host = facts.hostname;
    facts.cores = facts.host_cores = {0};
    facts.kernel = "6.1.0";
    facts.interface = "eth0";
    facts.address = "10.0.0." + std::to_string(rank + 1);
    facts.mtu = 1500;
    facts.memory = int64_t{8} << 30;
    facts.open_files = 1024;
    job.wires_used[rank] = "UCX 1.13.1 (tcp/eth0)";
  }
  for (const PairResult& pair : job.pairs) {
    WireResult wire;
    wire.ranks = pair.ranks;
    wire.latencies = {30e-6, 20e-6, 1e-3};
    for (auto& rates : wire.rates) rates = {100e6, 99e6, 1e6};
    for (auto& segments : wire.segments) segments = 2000;
    wire.clock_offsets = {1e-5, 2e-5, 3e-5};
    job.wires.push_back(wire);
  }
  return job;
}

WireResult& wire_of(JobObservations& job, int low, int high) {
  for (WireResult& wire : job.wires) {
    if (wire.ranks == Pair(low, high)) return wire;
  }
  throw std::logic_error("no such wire");
}

const std::vector<double> kSlowRate = {2.5e6, 2.5e6, 2.5e6};

class JudgeHostsTable : public ::testing::TestWithParam<Case> {};

TEST_P(JudgeHostsTable, FindsItAndNothingElse) {
  const Case& each = GetParam();
  JobObservations job = over_hosts();
  each.change(job);
  expect_findings(judge_job(job), each, "hosts");
}

INSTANTIATE_TEST_SUITE_P(
    Wires, JudgeHostsTable,
    ::testing::Values(
        Case{"one way is slow", [](auto& job) { wire_of(job, 0, 2).rates[0] = kSlowRate; }, kWarning, "wires",
             "node-a and node-c (ranks 0 and 2): 20 Mbit/s from node-a to node-c, 39.6 times less than the "
             "median of all "
             "wires, 792 Mbit/s (792 Mbit/s the other way)"},
        Case{"both ways are slow, and the pair on them",
             [](auto& job) {
               wire_of(job, 1, 3).rates[0] = wire_of(job, 1, 3).rates[1] = kSlowRate;
               pair_of(job, 1, 3).transfers = {0.5, 0.5, 0.5};
             },
             kWarning, "wires", "20 Mbit/s from node-d to node-b, 39.6 times less than the median"},
        Case{"a slow host",
             [](auto& job) {
               for (int other : {0, 1, 2}) {
                 wire_of(job, other, 3).rates[0] = wire_of(job, other, 3).rates[1] = kSlowRate;
               }
             },
             kWarning, "wires", "node-d with each other host, say node-"},
        Case{"messages are late",
             [](auto& job) {
               wire_of(job, 0, 1).latencies = {5e-3, 5e-3, 6e-3};
             },
             kWarning, "wires",
             "node-a and node-b (ranks 0 and 1): a message takes 5 ms, 167 times the median of all wires, 30 "
             "µs"},
        Case{"loses one way", [](auto& job) { wire_of(job, 0, 2).resent_segments[1] = 50; }, kWarning,
             "wires",
             "2.5 % of what was sent from node-c to node-a was lost and sent again (50 TCP segments)"},
        Case{"does not answer",
             [](auto& job) {
               wire_of(job, 2, 3) = {.ranks = {2, 3},
                                     .errors = {{2, "timed out after 10 s waiting for rank 3"}}};
             },
             kProblem, "wires",
             "node-c and node-d (ranks 2 and 3): rank 2 says: timed out after 10 s waiting for rank 3"},
        Case{"two hosts",
             [](auto& job) {
               wire_of(job, 0, 1).rates[1] = kSlowRate;
               job.wires = {wire_of(job, 0, 1)};
             },
             kWarning, "wires",
             "20 Mbit/s from node-b to node-a, 39.6 times less than the other way, 792 Mbit/s"}));

INSTANTIATE_TEST_SUITE_P(
    Hosts, JudgeHostsTable,
    ::testing::Values(Case{"clock",
                           [](auto& job) {
                             wire_of(job, 0, 2).clock_offsets = {-0.25, -0.25, -0.25};
                           },
                           kWarning, "clocks", "'s clock is 250.0 ms ahead of node-c's"},
                      Case{"mtu", [](auto& job) { job.ranks[2]->mtu = 9000; }, kWarning, "mtu",
                           "node-c: eth0 (10.0.0.3, MTU 9000)"},
                      Case{"ucx", [](auto& job) { job.wires_used[3] = "UCX 1.22.0 (tcp/eth0)"; }, kWarning,
                           "versions", "node-a, node-b, node-c: UCX 1.13.1; node-d: UCX 1.22.0"},
                      Case{"kernel", [](auto& job) { job.ranks[1]->kernel = "5.10.0"; }, kNote, "kernel",
                           "node-b: 5.10.0"},
                      Case{"lockstep", [](auto& job) { job.ranks[2]->lockstep_version = "0.2.0"; }, kProblem,
                           "versions", "rank 2 on node-c: 0.2.0 (20-bb)"},
                      Case{"ports on some", [](auto& job) { job.ranks[1]->ports = 100; }, kWarning, "ports",
                           "node-b: LOCKSTEP_PORT_RANGE is set"},
                      Case{"few ports",
                           [](auto& job) {
                             for (auto& rank : job.ranks) rank->ports = 2;
                             job.ranks[3]->ports = 1;
                           },
                           kWarning, "ports", "1 ports for the 1 rank(s) of node-d"},
                      Case{"memory", [](auto& job) { job.ranks[0]->memory = int64_t{1} << 30; }, kWarning,
                           "memory", "node-a has 1024 MiB"},
                      Case{"no memory", [](auto& job) { job.ranks[0]->memory = int64_t{100} << 20; },
                           kProblem, "memory", "node-a has 100 MiB"},
                      Case{"nofile", [](auto& job) { job.ranks[1]->open_files = 64; }, kWarning, "nofile",
                           "rank 1 on node-b may have 64 files open"}));

TEST(JudgeWires, ThoseThatAreWholeAreCounted) {
  std::string text;
  for (const Finding& finding : judge_job(over_hosts()))
    text += finding.check + ": " + finding.message + '\n';
  EXPECT_THAT(text, AllOf(HasSubstr("wires: 6 of 6 wires between hosts work: a message in 30 µs, 792 Mbit/s"),
                          HasSubstr("interfaces: node-a: eth0 (10.0.0.1, MTU 1500); node-b: ")));
}

TEST(JudgeWires, FewLostSegmentsAndSmallDifferencesAreNone) {
  JobObservations job = over_hosts();
  wire_of(job, 0, 1).resent_segments[0] = 9;
  wire_of(job, 0, 1).segments[0] = 10;
  wire_of(job, 0, 2).resent_segments[0] = 19;  // of 2000
  wire_of(job, 0, 3).rates[0] = {40e6, 40e6, 40e6};
  wire_of(job, 1, 2).latencies = {200e-6, 200e-6, 200e-6};
  EXPECT_EQ(exit_status(judge_job(job), /*strict=*/true), 0);
}

TEST(JudgeJobSlow, SmallDifferencesAndSmallJobsAreNotCompared) {
  JobObservations job = healthy();
  pair_of(job, 0, 1).latencies = {100e-6, 100e-6, 100e-6};  // 30 times, but microseconds
  pair_of(job, 0, 2).transfers = {400e-6, 400e-6, 400e-6};  // less than three times
  EXPECT_EQ(exit_status(judge_job(job), /*strict=*/true), 0);
  job = healthy();
  job.ranks.resize(2);
  job.clock_offsets = {{0, 0}, {1, 0}};
  job.pairs = {{{0, 1}, {}, {1, 1, 1}, {1, 1, 1}}};
  EXPECT_EQ(exit_status(judge_job(job), true), 0);
}

TEST(JudgeJob, ManyBrokenPairsAreCounted) {
  JobObservations job;
  for (int rank = 0; rank < 8; ++rank) job.ranks.push_back(healthy_rank(rank));
  for (auto& rank : job.ranks) rank->cores = rank->host_cores = {0, 1, 2, 3, 4, 5, 6, 7};
  for (const auto& round : tournament(8)) {
    for (const Pair& pair : round) job.pairs.push_back({pair, {{pair.first, "broken"}}, {}, {}});
  }
  const Findings findings = judge_communication(job);
  EXPECT_EQ(count(findings, Severity::kProblem), 13);
  EXPECT_EQ(findings.back().message, "16 more pairs");
}

TEST(JudgeJob, PinningByRankIsNoDifferenceOfVariables) {
  JobObservations job = healthy();
  for (auto& rank : job.ranks) {
    rank->environment["GOMP_CPU_AFFINITY"] = std::to_string(rank->rank);
    rank->environment["RANK"] = std::to_string(rank->rank);
    rank->environment["CUDA_VISIBLE_DEVICES"] = std::to_string(rank->rank);
    rank->environment["UCX_NET_DEVICES"] = "mlx" + std::to_string(rank->rank);
  }
  EXPECT_EQ(exit_status(judge_job(job), true), 0);
}

}  // namespace
}  // namespace lockstep::doctor::judge_job_test
