#include <cstdlib>
#include <gmock/gmock.h>
#include <sstream>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/doctor/cuda_probe.h>
#include <lockstep/doctor/judge.h>

// The doctor's look at CUDA and NCCL. That it survives a library that does not is in tests/doctor_test.py.
namespace lockstep::doctor::cuda_probe_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

TEST(CudaProbe, IsReadBackFromAmongOtherOutput) {
  std::ostringstream out;
  print_cuda_probe(out);
  const CudaPart part = parse_cuda_probe("a library says hello\n" + out.str() + "bye\n");
  EXPECT_TRUE(part.asked);
  EXPECT_NE(part.loads, part.nccl.empty()) << "with NCCL's version";
  EXPECT_NE(part.loads, !part.error.empty()) << "or with an error";

  const CudaPart told = parse_cuda_probe(
      "lockstep-cuda-probe {\"nccl\":\"2.29.7\",\"problem\":\"\",\"unknown_variables\":[\"NCCL_X\"],"
      "\"devices\":[\"NVIDIA H100 (GPU-1)\"]}\n");
  EXPECT_TRUE(told.loads);
  EXPECT_THAT(told.unknown_variables, ElementsAre("NCCL_X"));
  EXPECT_THAT(told.devices, ElementsAre("NVIDIA H100 (GPU-1)"));
  for (const char* odd : {"", "Segmentation fault", "lockstep-cuda-probe", "lockstep-cuda-probe 7",
                          "lockstep-cuda-probe {\"nccl\":7}"}) {
    const CudaPart broken = parse_cuda_probe(odd);
    EXPECT_FALSE(broken.loads) << odd;
    EXPECT_THAT(broken.error, HasSubstr(odd));
  }
}

TEST(CudaProbe, LooksInNcclForTheNamesOfVariables) {
  // NCCL_IB is the beginning of some of its names; NCCL_VERSION is what images say about themselves.
  const std::vector<const char*> names = {"NCCL_TUNING_PARAMS", "NCCL_IB",     "NCCL_VERSION",
                                          "NCCL_DEBUG",         "NCCL_IB_HCA", "NCCL_BUFFSIZE",
                                          "NCCL_SOCKET_IFNAME", "NCCL_ALGO"};
  for (const char* name : names) ::setenv(name, "x", 1);
  std::ostringstream out;
  print_cuda_probe(out);
  for (const char* name : names) ::unsetenv(name);
  const CudaPart part = parse_cuda_probe(out.str());
  if (!part.loads) GTEST_SKIP() << part.error;
  EXPECT_THAT(part.unknown_variables, UnorderedElementsAre("NCCL_TUNING_PARAMS", "NCCL_IB"));
}

/// The only finding that is about NCCL or its variables.
Findings judged(const CudaPart& part, const std::map<std::string, std::string>& environment, int cards = 0) {
  Facts facts;
  facts.cuda = part;
  facts.environment = environment;
  if (cards > 0) facts.gpu.cuda_devices = cards;
  return judge_cuda(facts);
}

const CudaPart kLoads{.asked = true, .loads = true, .nccl = "2.29.7", .devices = {"NVIDIA H100 (GPU-1)"}};

TEST(JudgeCuda, SaysWhatNcclThereIs) {
  EXPECT_THAT(judged({}, {}), IsEmpty()) << "torch is a CPU build";
  const auto good =
      judged(kLoads, {{"NCCL_IB_HCA", "mlx5"}, {"TORCH_NCCL_BLOCKING_WAIT", "1"}, {"RANK", "0"}}, 1);
  ASSERT_EQ(good.size(), 1U);
  EXPECT_EQ(good[0].severity, Severity::kOk);
  EXPECT_EQ(good[0].message,
            "NCCL 2.29.7, with NCCL_IB_HCA=mlx5, TORCH_NCCL_BLOCKING_WAIT=1; cuda:0 is NVIDIA H100 (GPU-1)");

  auto unknown = kLoads;
  unknown.unknown_variables = {"NCCL_TUNING_PARAMS", "NCCL_BLOCKING_WAIT"};  // the second is torch's
  const auto warned = judged(unknown, {{"NCCL_TUNING_PARAMS", "x"}});
  ASSERT_EQ(warned.size(), 2U);
  EXPECT_EQ(warned[1].severity, Severity::kWarning);
  EXPECT_THAT(warned[1].message,
              AllOf(HasSubstr("NCCL_TUNING_PARAMS"), HasSubstr("NCCL 2.29.7 does not know")));

  auto no_card = kLoads;
  no_card.problem = "there is no driver";
  EXPECT_EQ(judged(no_card, {})[0].severity, Severity::kOk) << "none is needed without a card";
  EXPECT_EQ(judged(no_card, {}, 1)[0].severity, Severity::kWarning);

  const CudaPart broken{.asked = true, .error = "liblockstep_cuda.so: cannot open"};
  EXPECT_EQ(judged(broken, {})[0].severity, Severity::kNote);
  EXPECT_EQ(judged(broken, {}, 1)[0].severity, Severity::kWarning);
  EXPECT_THAT(judged(broken, {}, 1)[0].message, HasSubstr("cannot open"));
}

TEST(JudgeCuda, JudgesVariables) {
  struct Case {
    const char* name;
    const char* value;
    Severity severity;
    const char* message;
    const char* remedy;
  };
  for (const Case& each : {
           Case{"NCCL_BLOCKING_WAIT", "1", Severity::kWarning, "old name", "TORCH_NCCL_BLOCKING_WAIT"},
           Case{"NCCL_ASYNC_ERROR_HANDLING", "1", Severity::kWarning, "old name",
                "TORCH_NCCL_ASYNC_ERROR_HANDLING"},
           Case{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "yes", Severity::kProblem, "'yes'", "0 to 3"},
           Case{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", Severity::kWarning, "hangs for ever",
                "TORCH_NCCL_BLOCKING_WAIT=1"},
           Case{"NCCL_P2P_DISABLE", "1", Severity::kWarning, "slowly", "unset"},
           Case{"NCCL_SHM_DISABLE", "1", Severity::kWarning, "network", "unset"},
           Case{"NCCL_DEBUG", "info", Severity::kNote, "hundreds of lines", "WARN"},
           Case{"NCCL_DEBUG", "loud", Severity::kWarning, "does not know", "INFO"},
           Case{"TORCH_FR_BUFFER_SIZE", "0", Severity::kNote, "recorder is off", "unset"},
       }) {
    const auto findings = judged({}, {{each.name, each.value}});
    ASSERT_EQ(findings.size(), 1U) << each.name;
    EXPECT_EQ(findings[0].severity, each.severity) << each.name;
    EXPECT_THAT(findings[0].message, AllOf(HasSubstr(each.name), HasSubstr(each.message)));
    EXPECT_THAT(findings[0].remedy, HasSubstr(each.remedy));
  }
  for (const auto& [name, value] :
       std::map<std::string, std::string>{{"NCCL_P2P_DISABLE", "0"},
                                          {"NCCL_DEBUG", "WARN"},
                                          {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"},
                                          {"NCCL_DEBUG_FILE", "x"}}) {
    EXPECT_THAT(judged({}, {{name, value}}), IsEmpty()) << name;
  }
}

}  // namespace
}  // namespace lockstep::doctor::cuda_probe_test
