#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/groups/internal/backend_names.h>
#include <lockstep/collectives/groups/internal/device_agreement.h>
#include <lockstep/testing/message_of.h>

// Which backend a group gets, decided from what the ranks say. Needs no device.
namespace lockstep::collectives::internal::device_agreement::device_agreement_test {

using namespace collectives::internal;

namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;
using ::testing::Pair;

RankDevice with_card(int rank, const std::string& card, const std::string& backend = "") {
  return {.rank = rank,
          .host = "deep",
          .backend = backend,
          .device = "cuda:" + std::to_string(rank),
          .card = card,
          .visible = 2};
}

RankDevice without_device(int rank, const std::string& backend = "") {
  return {.rank = rank, .host = "deep", .backend = backend, .device = {}, .card = {}};
}

TEST(DeviceAgreement, WithoutDevicesItIsLockstep) {
  const auto decision = decide({without_device(0), without_device(1)});
  EXPECT_EQ(decision.backend, "lockstep");
  EXPECT_THAT(decision.warnings, IsEmpty());
  EXPECT_EQ(decision.refusal, "");
}

TEST(DeviceAgreement, ACardForEachRankMeansNccl) {
  for (const auto& members :
       {std::vector{with_card(0, "GPU-a"), with_card(1, "GPU-b")}, std::vector{with_card(0, "GPU-a")}}) {
    const auto decision = decide(members);
    EXPECT_EQ(decision.backend, "cpu:lockstep,cuda:nccl");
    EXPECT_THAT(decision.warnings, IsEmpty());
  }
  auto elsewhere = with_card(1, "GPU-a");
  elsewhere.host = "other";
  EXPECT_EQ(decide({with_card(0, "GPU-a"), elsewhere}).backend, "cpu:lockstep,cuda:nccl")
      << "cards are told apart by host too";
}

TEST(DeviceAgreement, RanksThatShareACardAreNamedAndStaged) {
  const auto decision = decide({with_card(0, "GPU-a"), with_card(1, "GPU-b"), with_card(2, "GPU-a")});
  EXPECT_EQ(decision.backend, "lockstep");
  EXPECT_THAT(decision.warnings, ElementsAre(HasSubstr("ranks 0 and 2 share the card GPU-a on host deep")));
  // Also when it was asked for, and for devices that NCCL does not know.
  auto simulated = with_card(0, "card 0", "lockstep");
  simulated.device = "privateuseone:0";
  auto other = simulated;
  other.rank = 1;
  EXPECT_THAT(decide({simulated, other}).warnings,
              ElementsAre(HasSubstr("ranks 0 and 1 share the card card 0")));
}

TEST(DeviceAgreement, NcclForRanksThatShareACardIsRefused) {
  for (const char* backend : {"nccl", "cpu:lockstep,cuda:nccl"}) {
    const auto decision = decide({with_card(0, "GPU-a", backend), with_card(1, "GPU-a", backend)});
    EXPECT_THAT(decision.refusal, AllOf(HasSubstr(backend), HasSubstr("ranks 0 and 1 share the card GPU-a"),
                                        HasSubstr("lockstep::set_device()"), HasSubstr("\"lockstep\"")));
  }
  EXPECT_EQ(decide({with_card(0, "GPU-a", "nccl"), with_card(1, "GPU-b", "nccl")}).refusal, "");
}

TEST(DeviceAgreement, MoreRanksThanCardsAreRefusedBeforeTheyChoose) {
  std::vector<RankDevice> members;
  for (int rank = 0; rank < 3; ++rank) {
    members.push_back(without_device(rank, "nccl"));
    members.back().visible = 2;
  }
  EXPECT_THAT(decide(members).refusal,
              HasSubstr("ranks 0-2 on host deep see 2 cards, and have not chosen one"));
  members.pop_back();
  EXPECT_EQ(decide(members).refusal, "");
}

TEST(DeviceAgreement, RanksWithoutACardOrNcclAreNamed) {
  const auto mixed = decide({with_card(0, "GPU-a"), without_device(1)});
  EXPECT_EQ(mixed.backend, "lockstep");
  EXPECT_THAT(mixed.warnings,
              ElementsAre(AllOf(HasSubstr("rank 0: a card; rank 1: no card"), HasSubstr("set_device()"))));

  auto broken = with_card(1, "GPU-b");
  broken.nccl_problem = "the driver is too old";
  const auto fallback = decide({with_card(0, "GPU-a"), broken});
  EXPECT_EQ(fallback.backend, "lockstep");
  EXPECT_THAT(fallback.warnings, ElementsAre(HasSubstr("NCCL can't be used: rank 1: the driver is too old")));

  broken.backend = "nccl";
  EXPECT_THAT(decide({with_card(0, "GPU-a", "nccl"), broken}).refusal,
              AllOf(HasSubstr("backend 'nccl' can't be used: rank 1: the driver is too old"),
                    HasSubstr("use \"lockstep\"")));
}

TEST(DeviceAgreement, RanksThatAskForDifferentBackendsAreNamed) {
  const auto decision =
      decide({without_device(0, "lockstep"), without_device(1), without_device(2, "lockstep")});
  EXPECT_EQ(decision.mismatch, "ranks 0 and 2: 'lockstep'; rank 1: none");
}

TEST(DeviceAgreement, RecordsHaveOneLengthWhateverTheySay) {
  auto odd = with_card(7, "GPU-\"\\\n\xff");
  odd.nccl_problem = std::string(5000, '"');
  odd.host = std::string(5000, '\x01');
  const std::string record = to_record(odd);
  EXPECT_EQ(record.size(), to_record(without_device(0)).size());
  const auto read = from_record(record);
  EXPECT_EQ(read.rank, 7);
  EXPECT_EQ(read.device, "cuda:7");
  EXPECT_EQ(read.visible, 2);
  EXPECT_THAT(read.nccl_problem, ::testing::EndsWith("..."));
  EXPECT_THROW(from_record("who?"), c10::DistBackendError);
}

TEST(BackendNames, SayWhichBackendServesWhichDevice) {
  using backend_names::by_device;
  using backend_names::config;
  EXPECT_EQ(config("lockstep"), "cpu:lockstep,cuda:lockstep");
  EXPECT_EQ(config("nccl"), "cuda:nccl");
  EXPECT_EQ(config("cuda:nccl,cpu:lockstep"), "cuda:nccl,cpu:lockstep");
  EXPECT_THAT(by_device("nccl"), ElementsAre(Pair(c10::kCUDA, "nccl"), Pair(c10::kCPU, "lockstep")));
  EXPECT_THAT(by_device("lockstep"), ElementsAre(Pair(c10::kCPU, "lockstep"), Pair(c10::kCUDA, "lockstep"),
                                                 Pair(c10::kPrivateUse1, "lockstep")));
  EXPECT_EQ(backend_names::check(""), "");
  EXPECT_EQ(backend_names::check("CPU:Lockstep,cuda:NCCL"), "cpu:lockstep,cuda:nccl");
  EXPECT_EQ(backend_names::check("Gloo"), "lockstep");
  EXPECT_EQ(backend_names::check("cpu:gloo,cuda:nccl"), "cpu:lockstep,cuda:nccl");
  EXPECT_THAT(message_of<c10::ValueError>([] { backend_names::check("cpu:nccl"); }),
              HasSubstr("takes CUDA tensors alone"));
  EXPECT_THAT(message_of<c10::ValueError>([] { backend_names::check("tpu:lockstep"); }),
              HasSubstr("unknown device type 'tpu'"));
  EXPECT_THAT(message_of<c10::ValueError>([] { backend_names::check("mpi"); }),
              HasSubstr("unknown backend 'mpi'"));
}

}  // namespace
}  // namespace lockstep::collectives::internal::device_agreement::device_agreement_test
