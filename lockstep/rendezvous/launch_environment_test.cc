#include <gmock/gmock.h>
#include <map>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep::launch_environment_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Lookup lookup_in(const Variables& variables) {
  return [&](const char* name) -> std::optional<std::string> {
    auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

LaunchEnvironment read(const Variables& variables) {
  return read_launch_environment(lookup_in(variables));
}

/// "launcher rank/size local_rank/local_size where", to compare in one line.
std::string summary(const LaunchEnvironment& e) {
  std::string text = e.launcher + " " + std::to_string(e.rank) + "/" + std::to_string(e.world_size) + " " +
                     std::to_string(e.local_rank) + "/" + std::to_string(e.local_world_size) + " ";
  if (auto* tcp = std::get_if<TcpMeeting>(&e.meeting)) {
    text += tcp->host + ":" + std::to_string(tcp->port);
    if (tcp->agent_hosts) text += " agent";
    if (tcp->port_derived) text += " derived";
    if (tcp->run_id != "none" || tcp->attempt != 0)
      text += " " + tcp->run_id + "#" + std::to_string(tcp->attempt);
  } else if (auto* job = std::get_if<JobMeeting>(&e.meeting)) {
    text += "job " + job->job;
  } else if (auto* none = std::get_if<NoMeeting>(&e.meeting)) {
    text += "nowhere: " + none->reason;
  }
  return text;
}

std::string summary(const Variables& variables) {
  return summary(read(variables));
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Variables kHand = {
    {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "29500"}};
const Variables kTorchrun = with(kHand, {{"LOCAL_RANK", "1"},
                                         {"LOCAL_WORLD_SIZE", "2"},
                                         {"GROUP_RANK", "0"},
                                         {"TORCHELASTIC_RUN_ID", "abc"},
                                         {"TORCHELASTIC_RESTART_COUNT", "3"},
                                         {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "77"}};
const Variables kMpich = {
    {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kSlurm = {{"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_STEP_NODELIST", "node[01-02]"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                          {"SLURM_JOB_ID", "12"},
                          {"SLURM_STEP_ID", "5"}};

TEST(LaunchEnvironment, NothingSet) {
  auto e = read({});
  EXPECT_EQ(e.launcher, "none");
  EXPECT_EQ(e.rank, -1);
  EXPECT_EQ(e.world_size, -1);
  EXPECT_TRUE(std::holds_alternative<NoMeeting>(e.meeting));
  EXPECT_EQ(read({{"RANK", ""}, {"WORLD_SIZE", ""}}).launcher, "none") << "empty counts as unset";
}

TEST(LaunchEnvironment, EachLauncher) {
  EXPECT_EQ(summary(kHand), "environment 1/4 -1/-1 10.0.0.1:29500");
  EXPECT_EQ(summary(kTorchrun), "torchrun 1/4 1/2 10.0.0.1:29500 agent abc#3");
  EXPECT_EQ(summary(with(kTorchrun, {{"LOCKSTEP_RUN", "1"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}})),
            "lockstep run 1/4 1/2 10.0.0.1:29500 abc#3");
  EXPECT_EQ(summary(kOpenMpi), "mpirun 1/2 1/2 job PMIX_NAMESPACE=77;");
  EXPECT_EQ(summary(kMpich), "mpich 0/2 0/2 job ");
  EXPECT_EQ(summary(kSlurm), "srun 3/4 1/2 node01:15377 derived slurm-12.5#0");
}

TEST(LaunchEnvironment, AnAddressIsHeededUnderEveryLauncher) {
  Variables address = {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1234"}};
  EXPECT_EQ(summary(with(kOpenMpi, address)), "mpirun 1/2 1/2 h:1234");
  EXPECT_EQ(summary(with(kMpich, address)), "mpich 0/2 0/2 h:1234");
  EXPECT_EQ(summary(with(kSlurm, address)), "srun 3/4 1/2 h:1234");
  EXPECT_EQ(summary(with(kSlurm, {{"MASTER_PORT", "1234"}})), "srun 3/4 1/2 node01:1234");
  EXPECT_THAT(summary(with(kSlurm, {{"MASTER_ADDR", "h"}})), HasSubstr(" h:15377 derived"));
}

TEST(LaunchEnvironment, WhereTheProgramSetsTheAddressRankZeroHosts) {
  const auto launched =
      with(kTorchrun, {{"MASTER_ADDR", "127.0.0.1"}, {"LOCKSTEP_AGENT_STORE", "127.0.0.1:29500/abc"}});
  EXPECT_EQ(summary(launched), "torchrun 1/4 1/2 127.0.0.1:29500 agent abc#3");
  for (const char* same : {"localhost", "0.0.0.0", "::1"}) {
    EXPECT_THAT(summary(with(launched, {{"MASTER_ADDR", same}})), HasSubstr(" 127.0.0.1:29500 agent"));
  }
  for (const Variables& own :
       std::vector<Variables>{{{"MASTER_PORT", "12355"}},
                              {{"MASTER_ADDR", "127.0.0.2"}},
                              {{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "12355"}}}) {
    EXPECT_THAT(summary(with(launched, own)), ::testing::Not(HasSubstr("agent")));
  }
  EXPECT_THAT(summary(with(launched, {{"MASTER_PORT", "12355"}, {"TORCHELASTIC_RUN_ID", "inner"}})),
              HasSubstr("127.0.0.1:12355 agent inner"))
      << "torchrun inside of lockstep run";
}

TEST(LaunchEnvironment, AProgramMaySetThePortAtWhichAgentsMeet) {
  const auto launched = with(kTorchrun, {{"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", "40001"},
                                         {"LOCKSTEP_AGENT_STORE", "127.0.0.1:40001/abc"},
                                         {"LOCKSTEP_AGENT_PORT", "29500"}});
  EXPECT_THAT(summary(launched), HasSubstr(" 127.0.0.1:40001 agent abc#3"));
  const Variables agents = {{"MASTER_ADDR", "host-a"}, {"MASTER_PORT", "29500"}};
  EXPECT_THAT(summary(with(launched, agents)), HasSubstr(" 127.0.0.1:40001 agent abc#3"));
  EXPECT_THAT(summary(with(launched, {{"MASTER_ADDR", "host-a"}, {"MASTER_PORT", "29501"}})),
              HasSubstr(" host-a:29501 abc#3"));
}

TEST(LaunchEnvironment, UnderTorchrunTheVariablesAtTheStartTellItsStore) {
  const auto after = [](const Variables& set) {
    const Variables now = with(kTorchrun, set);
    return summary(read_launch_environment(lookup_in(now), lookup_in(kTorchrun)));
  };
  EXPECT_THAT(after({}), HasSubstr(" 10.0.0.1:29500 agent"));
  EXPECT_THAT(after({{"MASTER_ADDR", "localhost"}}), HasSubstr(" 10.0.0.1:29500 agent"));
  EXPECT_THAT(after({{"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "12355"}}),
              HasSubstr(" localhost:12355 abc#3"));
}

TEST(LaunchEnvironment, OneLauncherInsideOfAnother) {
  EXPECT_EQ(read(with(kTorchrun, kOpenMpi)).rank, 1);
  EXPECT_EQ(read(with(kSlurm, kTorchrun)).launcher, "torchrun");
  EXPECT_EQ(read(with(kSlurm, kOpenMpi)).launcher, "mpirun");
  EXPECT_EQ(read(with(kSlurm, kMpich)).launcher, "mpich") << "hydra starts its proxies with srun";
  auto pmi2 = with(kSlurm, {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"PMI_JOBID", "12.5"}});
  EXPECT_EQ(read(pmi2).launcher, "srun") << "srun --mpi=pmi2";
  EXPECT_EQ(read({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}}).launcher, "none")
      << "a batch script is not a step";
}

TEST(LaunchEnvironment, SlurmDetails) {
  EXPECT_THAT(summary(with(kSlurm, {{"SLURM_STEP_NODELIST", "only"},
                                    {"SLURM_STEP_TASKS_PER_NODE", "4"},
                                    {"SLURM_NODEID", "0"}})),
              HasSubstr(" 127.0.0.1:15377 "));
  EXPECT_EQ(read(with(kSlurm, {{"SLURM_NTASKS", "9"}, {"SLURM_STEP_NUM_TASKS", "4"}})).world_size, 4);
  auto port = [](const char* job, const char* step) {
    auto e = read(with(kSlurm, {{"SLURM_JOB_ID", job}, {"SLURM_STEP_ID", step}}));
    return std::get<TcpMeeting>(e.meeting).port;
  };
  EXPECT_NE(port("12", "5"), port("12", "6"));
  EXPECT_NE(port("12", "5"), port("13", "5"));
  for (const char* job : {"1", "999999999", "4294967295"}) {
    EXPECT_GE(port(job, "4294967290"), 15000);
    EXPECT_LT(port(job, "4294967290"), 30000);
  }
  auto no_job = kSlurm;
  no_job.erase("SLURM_JOB_ID");
  EXPECT_THAT(summary(no_job), HasSubstr("set MASTER_PORT"));
}

TEST(LaunchEnvironment, SaysWhatIsMissing) {
  auto without = [](Variables variables, const char* name) {
    variables.erase(name);
    return summary(variables);
  };
  EXPECT_THAT(without(kHand, "MASTER_ADDR"),
              HasSubstr("nowhere: environment variable MASTER_ADDR is not set"));
  EXPECT_THAT(without(kHand, "MASTER_PORT"),
              HasSubstr("nowhere: environment variable MASTER_PORT is not set"));
  EXPECT_THAT(without(kHand, "RANK"), HasSubstr("environment -1/4 "));
  EXPECT_THAT(summary(with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}})),
              AllOf(HasSubstr("started 4 processes and put only 2 of them on this host"),
                    HasSubstr("set MASTER_ADDR to the host of rank 0 and MASTER_PORT")));
  EXPECT_THAT(summary({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}),
              HasSubstr("does not tell whether they are on one"));
  EXPECT_THAT(summary(with(kOpenMpi, {{"MASTER_ADDR", "h"}})), HasSubstr("MASTER_PORT is not set"));
}

TEST(LaunchEnvironment, RefusesWhatIsMalformedOrContradictory) {
  struct Case {
    Variables variables;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases = {
      {with(kHand, {{"RANK", "one"}}), {"RANK is 'one'", "not a whole number"}},
      {with(kHand, {{"RANK", "-1"}}), {"RANK is -1"}},
      {with(kHand, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE is 0"}},
      {with(kHand, {{"WORLD_SIZE", "4x"}}), {"WORLD_SIZE is '4x'"}},
      {with(kHand, {{"RANK", "4"}}), {"RANK is 4, which is not below WORLD_SIZE=4"}},
      {with(kHand, {{"MASTER_PORT", "65536"}}), {"MASTER_PORT is 65536", "0 to 65535"}},
      {with(kHand, {{"MASTER_PORT", "http"}}), {"MASTER_PORT is 'http'"}},
      {with(kTorchrun, {{"LOCAL_RANK", "2"}}), {"LOCAL_RANK is 2, which is not below LOCAL_WORLD_SIZE=2"}},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", "5"}}),
       {"LOCAL_WORLD_SIZE is 5, which is more than WORLD_SIZE=4"}},
      {with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "x"}}), {"TORCHELASTIC_RESTART_COUNT is 'x'"}},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "2"}}),
       {"OMPI_COMM_WORLD_RANK is 2", "OMPI_COMM_WORLD_SIZE=2"}},
      {{{"OMPI_COMM_WORLD_RANK", "0"}}, {"OMPI_COMM_WORLD_SIZE is not"}},
      {with(kOpenMpi, {{"RANK", "0"}}), {"RANK is 0, but mpirun says OMPI_COMM_WORLD_RANK=1"}},
      {with(kOpenMpi, {{"WORLD_SIZE", "9"}}), {"WORLD_SIZE is 9, but mpirun says OMPI_COMM_WORLD_SIZE=2"}},
      {with(kMpich, {{"MPI_LOCALRANKID", "2"}}), {"MPI_LOCALRANKID is 2"}},
      {with(kSlurm, {{"SLURM_PROCID", "4"}}), {"SLURM_PROCID is 4", "SLURM_NTASKS=4"}},
      {with(kSlurm, {{"SLURM_NODEID", "2"}}), {"SLURM_NODEID is 2", "has 2 nodes"}},
      {with(kSlurm, {{"SLURM_STEP_NODELIST", "n[1"}}), {"'n[1' is not a list of hosts"}},
  };
  for (const auto& [variables, says] : cases) {
    try {
      ADD_FAILURE() << "accepted as " << summary(variables) << ", expected: " << says.front();
    } catch (const c10::ValueError& error) {
      for (const auto& text : says) EXPECT_THAT(error.what(), HasSubstr(text));
    }
  }
}

}  // namespace
}  // namespace lockstep::launch_environment_test
