#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/torch.h>

#include <lockstep/collectives/groups/open_backend.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::open_backend_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using Backend = c10::intrusive_ptr<LockstepBackend>;

c10::intrusive_ptr<c10d::Store> part_of(const World& world, const std::string& prefix) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, world.store);
}

Backend open(const World& world, const std::string& name, const std::vector<int>& ranks = {}) {
  const auto own = std::find(ranks.begin(), ranks.end(), world.rank);
  if (!ranks.empty() && own == ranks.end()) return {};
  return open_backend(part_of(world, name),
                      ranks.empty() ? world.rank : static_cast<int>(own - ranks.begin()),
                      ranks.empty() ? world.world_size : static_cast<int>(ranks.size()),
                      {.group_name = name, .timeout = std::chrono::seconds(30), .global_ranks = ranks});
}

float sum_over(const Backend& backend, float value) {
  std::vector<at::Tensor> tensors{at::full({5}, value)};
  backend->allreduce(tensors)->wait();
  return tensors[0][4].item<float>();
}

TEST(OpenBackend, GroupsOfAJobStandOnOneMapping) {
  run_ranks(3, [](int rank) {
    const World world = rendezvous();
    const Backend whole = open(world, "whole");
    const Backend odd = open(world, "part", {2, 0});
    EXPECT_EQ(sum_over(whole, rank), 3);
    if (!odd) return;
    EXPECT_EQ(&odd->channel().transport(), &whole->channel().transport());
    EXPECT_EQ(odd->getRank(), rank == 2 ? 0 : 1);
    EXPECT_EQ(sum_over(odd, rank), 2);
  });
}

TEST(OpenBackend, PartsComeFirstIfTheyDo) {
  run_ranks(3, [](int rank) {
    const World world = rendezvous();
    const Backend part = open(world, "part", {1, 2});
    const Backend whole = open(world, "whole");
    EXPECT_EQ(sum_over(whole, rank), 3);
    if (!part) return;
    EXPECT_NE(&part->channel().transport(), &whole->channel().transport());
    EXPECT_EQ(sum_over(part, rank), 3);
    // Both have both mappings: the older one is taken.
    const Backend again = open(world, "again", {2, 1});
    EXPECT_EQ(&again->channel().transport(), &part->channel().transport());
  });
}

TEST(OpenBackend, MessagesNameRanksOfTheJob) {
  const auto outcomes = run_ranks_collect(3,
                                          [](int rank) {
                                            const World world = rendezvous();
                                            const Backend part = open(world, "part", {1, 2});
                                            if (rank == 2) testing::die();
                                            if (rank == 1) sum_over(part, 1);
                                          },
                                          {.expected_failures = {1, 2}});
  EXPECT_THAT(outcomes[1].exception.value_or(""),
              AllOf(HasSubstr("failed on rank 1 of group 'part'"), HasSubstr("rank 2 (pid ")));
}

TEST(OpenBackend, AllMayBeGoneAndComeAgain) {
  run_ranks(2, [](int rank) {
    const World world = rendezvous();
    for (int round = 0; round < 5; ++round) {
      const Backend backend = open(world, "round " + std::to_string(round));
      EXPECT_EQ(sum_over(backend, rank), 1);
    }
  });
}

TEST(OpenBackend, SplitsAndMerges) {
  run_ranks(4, [](int rank) {
    const World world = rendezvous();
    const Backend whole = open(world, "whole");
    const std::vector<int> mine = rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3};
    auto options = whole->getBackendOptions();
    auto half = whole->split(part_of(world, rank < 2 ? "low" : "high"), mine, options);
    EXPECT_EQ(half->getRank(), rank % 2);
    std::vector<at::Tensor> tensors{at::full({1}, rank, at::kFloat)};
    half->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0].item<float>(), rank < 2 ? 1 : 5);
    EXPECT_FALSE(whole->split(part_of(world, "none"), {(rank + 1) % 4}, options));
    auto merged = half->merge(part_of(world, "merged"), options, 3 - rank, 4);
    EXPECT_EQ(merged->getRank(), 3 - rank);
    tensors[0].fill_(1);
    merged->allreduce(tensors)->wait();
    EXPECT_EQ(tensors[0].item<float>(), 4);
  });
}

TEST(OpenBackend, MembersHaveOneCompressionAndPassItOn) {
  run_ranks(3, [](int rank) {
    const World world = rendezvous();
    const auto open_with = [&](const std::string& name, HostCompression between_hosts) {
      return open_backend(
          part_of(world, name), rank, 3,
          {.group_name = name, .timeout = std::chrono::seconds(30), .between_hosts = between_hosts});
    };
    EXPECT_THAT(
        message_of([&] { open_with("mixed", rank == 1 ? HostCompression::kBf16 : HostCompression::kInt8); }),
        HasSubstr("ranks 0 and 2: open_backend(between_hosts int8); "
                  "rank 1: open_backend(between_hosts bf16)"));
    const Backend whole = open_with("whole", HostCompression::kInt8);
    EXPECT_EQ(whole->between_hosts(), HostCompression::kInt8);
    const auto compression_of_part = [&](const std::string& name,
                                         const c10::intrusive_ptr<c10d::Backend::Options>& options) {
      const auto part = whole->split(part_of(world, name), {0, 1, 2}, options);
      return dynamic_cast<LockstepBackend&>(*part).between_hosts();
    };
    const auto of_any_backend =
        c10::make_intrusive<c10d::Backend::Options>("lockstep", std::chrono::seconds(30));
    const auto chosen =
        c10::make_intrusive<LockstepBackend::GroupOptions>("lockstep", std::chrono::seconds(30));
    chosen->between_hosts = HostCompression::kBf16;
    EXPECT_EQ(compression_of_part("like its parent", whole->getBackendOptions()), HostCompression::kInt8);
    EXPECT_EQ(compression_of_part("nothing asked for", of_any_backend), HostCompression::kInt8);
    EXPECT_EQ(compression_of_part("its own", chosen), HostCompression::kBf16);
  });
}

TEST(OpenBackend, RefusesWhatMakesNoSense) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const OpenBackendOptions good{.group_name = "g", .timeout = std::chrono::seconds(1)};
  EXPECT_THAT(message_of<c10::ValueError>([&] { open_backend(store, 2, 2, good); }),
              HasSubstr("rank 2 of 2 ranks"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { open_backend(store, -1, 2, good); }),
              HasSubstr("rank -1 of 2 ranks"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { open_backend(store, 0, 1, {.group_name = "g"}); }),
              HasSubstr("the timeout is 0 ms"));
  EXPECT_THAT(
      message_of<c10::ValueError>([&] {
        open_backend(store, 0, 1, {.group_name = "g", .timeout = good.timeout, .global_ranks = {0, 1}});
      }),
      HasSubstr("2 global ranks for a group of 1"));
  EXPECT_THAT(message_of([&] { open_backend(store, 0, 2, good); }),
              AllOf(HasSubstr("rank 1 of 2 did not join"),
                    HasSubstr("(docs/troubleshooting.md#meeting says what to do)")));
}

TEST(OpenBackend, ClosingAllWaitsForNoMember) {
  run_ranks(2, [](int rank) {
    const World world = rendezvous();
    const Backend backend = open(world, "whole");
    std::vector<at::Tensor> tensors{at::ones({5})};
    backend->barrier()->wait();
    if (rank == 0) {
      auto work = backend->allreduce(tensors);
      close_all_backends();
      EXPECT_THAT(message_of([&] { work->wait(); }), HasSubstr("aborted by rank 0"));
      world.store->set("closed", "");
    } else {
      world.store->wait({"closed"}, std::chrono::seconds(30));
      EXPECT_THROW(backend->allreduce(tensors)->wait(), c10::DistBackendError);
    }
  });
}

}  // namespace
}  // namespace lockstep::open_backend_test
