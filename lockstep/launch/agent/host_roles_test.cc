#include <gmock/gmock.h>
#include <map>
#include <string>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/launch/agent/host_roles.h>

namespace lockstep::launch::host_roles_test {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

const Variables kSlurm = {{"SLURM_JOB_ID", "12"},
                          {"SLURM_STEP_ID", "5"},
                          {"SLURM_PROCID", "1"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_NNODES", "2"},
                          {"SLURM_NTASKS", "2"},
                          {"SLURM_STEP_NUM_NODES", "2"},
                          {"SLURM_STEP_NUM_TASKS", "2"},
                          {"SLURM_STEP_NODELIST", "gpu[07-08]"},
                          {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}};
const Variables kBatchScript = {{"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"},
                                {"SLURM_NODEID", "0"},  {"SLURM_NNODES", "2"},
                                {"SLURM_NTASKS", "2"},  {"SLURM_JOB_NODELIST", "gpu[07-08]"}};
const Variables kMpi = {{"OMPI_COMM_WORLD_SIZE", "3"},
                        {"OMPI_COMM_WORLD_RANK", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}};
const Variables kPod = {{"JOB_COMPLETION_INDEX", "1"}};
const Variables kSageMaker = {{"SM_HOSTS", R"(["algo-1","algo-2"])"}, {"SM_CURRENT_HOST", "algo-2"}};
const Variables kAzureMpi = {
    {"AZUREML_RUN_ID", "train_1"}, {"AZUREML_NODE_COUNT", "3"}, {"AZ_BATCH_MASTER_NODE", "10.0.0.4:6000"}};
const Variables kAzure = {{"AZUREML_NODE_COUNT", "2"}, {"NODE_RANK", "1"},  {"RANK", "1"},
                          {"LOCAL_RANK", "0"},         {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "10.0.0.4"},
                          {"MASTER_PORT", "6105"}};

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

std::optional<HostRoles> read(const Variables& variables, const GivenRoles& given) {
  return read_host_roles(
      [&](const char* name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        return found == variables.end() ? std::nullopt : std::optional(found->second);
      },
      given);
}

/// "host RANK of NUMBER at ADDRESS:PORT JOB", or "none", or the error.
std::string summary(const Variables& variables, const GivenRoles& given) {
  try {
    const auto roles = read(variables, given);
    if (!roles) return "none";
    EXPECT_NE(roles->source, "");
    return "host " + std::to_string(roles->node_rank) + " of " + std::to_string(roles->nnodes) + " at " +
           roles->master_addr + ":" + std::to_string(roles->master_port) + " " + roles->job_id;
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
}

TEST(HostRoles, NamesTheVariablesThatWereTaken) {
  EXPECT_EQ(read(kAzure, {})->source, "Azure ML (AZUREML_NODE_COUNT, NODE_RANK, MASTER_ADDR, MASTER_PORT)");
  EXPECT_EQ(read(kAzure, {.nnodes = 2, .master_addr = "head"})->source,
            "Azure ML (AZUREML_NODE_COUNT, NODE_RANK, MASTER_PORT)");
  EXPECT_EQ(read(with(kMpi, {{"MASTER_ADDR", "head"}}), {})->source,
            "Open MPI (OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK, MASTER_ADDR)");
  EXPECT_EQ(read(kSlurm, {})->source, "Slurm (SLURM_STEP_NUM_NODES, SLURM_NODEID, SLURM_STEP_NODELIST)");
}

struct Case {
  std::string name;
  Variables variables;
  GivenRoles given;
  std::string expected;  // a part of the summary
};

void PrintTo(const Case& shown, std::ostream* stream) {
  *stream << shown.name;
}

class HostRolesTable : public ::testing::TestWithParam<Case> {};

TEST_P(HostRolesTable, IsRead) {
  EXPECT_THAT(summary(GetParam().variables, GetParam().given), HasSubstr(GetParam().expected));
}

const GivenRoles kTwoAtHead = {.nnodes = 2, .master_addr = "head"};

INSTANTIATE_TEST_SUITE_P(
    HostRoles, HostRolesTable,
    ::testing::Values(
        Case{"Nothing", {}, {}, "none"},
        // The port is the one that a program under srun meets at (launch_environment_test.cc).
        Case{"Slurm", kSlurm, {}, "host 1 of 2 at gpu07:15377 slurm-12.5"},
        Case{"SlurmListOfNames", with(kSlurm, {{"SLURM_STEP_NODELIST", "head,gpu[1-2]"}}), {}, "at head:"},
        Case{"SlurmAddress", with(kSlurm, {{"MASTER_ADDR", "10.0.0.1"}}), {}, "at 10.0.0.1:15377"},
        Case{"SlurmAddressAndPort",
             with(kSlurm, {{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "4000"}}),
             {},
             "at 10.0.0.1:4000"},
        Case{"SlurmFlagBeforeMasterAddr",
             with(kSlurm, {{"MASTER_ADDR", "10.0.0.1"}}),
             {.master_addr = "head"},
             "at head:15377"},
        Case{"SlurmStepOnOneOfTheNodes",
             with(kSlurm, {{"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
             {},
             "none"},
        Case{"SlurmSeveralTasksOnANode", with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "3"}}), {}, "none"},
        Case{"SlurmBatchScript", kBatchScript, {}, "none"},
        Case{"SlurmComponents", with(kSlurm, {{"SLURM_HET_SIZE", "2"}}), {}, "none"},
        Case{"SlurmOneHostWanted", kSlurm, {.nnodes = 1}, "none"},
        Case{"SlurmOtherHostsMeant", kSlurm, {.nnodes = 3}, "none"},
        Case{"HydraInSlurm",
             with(kSlurm, {{"MPI_LOCALNRANKS", "1"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}),
             {},
             "none"},
        Case{"WorkerInSlurm", with(kSlurm, {{"RANK", "0"}, {"WORLD_SIZE", "4"}}), {}, "none"},
        Case{"Mpi", kMpi, {.master_addr = "head"}, "host 2 of 3 at head:0 "},
        Case{"MpiAddress",
             with(kMpi, {{"MASTER_ADDR", "head"}, {"MASTER_PORT", "4000"}}),
             {},
             "host 2 of 3 at head:4000 "},
        Case{"MpiTellsNoAddress", kMpi, {}, "give --master-addr HOST, or --standalone"},
        Case{"MpiOneHost", with(kMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "3"}}), {}, "none"},
        Case{"MpiOneProcess",
             with(kMpi, {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}),
             {.master_addr = "head"},
             "none"},
        Case{"MpiSeveralHere", with(kMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), {}, "none"},
        Case{"MpiSeveralHereWhereHostsAreMeant",
             with(kMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
             {.master_addr = "head"},
             "2 of 3 processes on this host, and over hosts lockstep run takes one on each: mpirun --map-by "
             "ppr:1:node"},
        Case{"MpiInSlurm", with(kSlurm, kMpi), {.master_addr = "head"}, "host 2 of 3 at head:0 "},
        Case{"IndexedJob", kPod, kTwoAtHead, "host 1 of 2 at head:0 "},
        Case{"IndexedJobAddress",
             with(kPod, {{"MASTER_ADDR", "train-0.train"}}),
             {.nnodes = 2},
             "at train-0.train:0 "},
        Case{"IndexedJobOfLonePods", kPod, {}, "none"},
        Case{"IndexedJobWithoutAddress", kPod, {.nnodes = 2}, "give --master-addr JOB-0.SERVICE"},
        Case{"SageMaker", kSageMaker, {}, "host 1 of 2 at algo-1:0 "},
        Case{"SageMakerOneHost", {{"SM_HOSTS", R"(["algo-1"])"}, {"SM_CURRENT_HOST", "algo-1"}}, {}, "none"},
        Case{"SageMakerOtherHost",
             with(kSageMaker, {{"SM_CURRENT_HOST", "algo-3"}}),
             {},
             "has no SM_CURRENT_HOST=algo-3"},
        Case{"SageMakerNoList",
             with(kSageMaker, {{"SM_HOSTS", "algo-1,algo-2"}}),
             {},
             "give --nnodes, --node-rank"},
        Case{"AzureMpi", with(kAzureMpi, kMpi), {}, "host 2 of 3 at 10.0.0.4:0 "},
        Case{"AzureMpiAddressAlone",
             with(kMpi, {{"AZ_BATCHAI_MPI_MASTER_NODE", "10.0.0.5"}}),
             {},
             "host 2 of 3 at 10.0.0.5:0 "},
        Case{"AzureMpiFlag", with(kAzureMpi, kMpi), {.master_addr = "head"}, "host 2 of 3 at head:0 "},
        Case{"Azure", kAzure, {}, "host 1 of 2 at 10.0.0.4:6105 "},
        Case{"AzureFlags", kAzure, {.nnodes = 2, .master_addr = "head"}, "host 1 of 2 at head:6105 "},
        Case{"AzureOneInstance", with(kAzure, {{"AZUREML_NODE_COUNT", "1"}}), {}, "none"},
        Case{"AzureSeveralProcesses", with(kAzure, {{"WORLD_SIZE", "4"}}), {}, "none"},
        Case{"AzureSeveralProcessesWhereHostsAreMeant",
             with(kAzure, {{"WORLD_SIZE", "4"}}),
             {.nnodes = 2},
             "4 processes on 2 instances, and over hosts lockstep run takes one on each"},
        Case{"AzureWorker", with(kAzure, {{"TORCHELASTIC_RUN_ID", "none"}}), {}, "none"},
        Case{"AzureNoAddress", with(kAzure, {{"MASTER_ADDR", ""}}), {}, "give --master-addr HOST"},
        Case{"SageMakerWithMpi", with(kSageMaker, kMpi), {.master_addr = "head"}, "host 2 of 3"}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::launch::host_roles_test
