#include <chrono>
#include <filesystem>
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/cuda.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/flight/records.h>
#include <lockstep/flight/testing/record_folder.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// The backend "nccl". Without a card only what it says of that is tested.
namespace lockstep::nccl_device_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;

#define LOCKSTEP_NEEDS_CARDS(n)                                                                           \
  if (const int cards = cuda_device_count(); cards < (n))                                                 \
  GTEST_SKIP() << "needs " << (n) << ((n) == 1 ? " GPU" : " GPUs") << ", and there are " << cards << ": " \
               << why_no_cuda()

at::Tensor on_card(at::Tensor tensor) {
  return tensor.to(*chosen_device());
}

// ---- without a card

TEST(Nccl, WithoutACardIsRefusedOnEveryRank) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  for (const char* backend : {"nccl", "cpu:lockstep,cuda:nccl"}) {
    run_ranks(3, [&](int) {
      EXPECT_THAT(message_of<c10::ValueError>([&] { auto world = init_process_group({.backend = backend}); }),
                  AllOf(HasSubstr(std::string("init_process_group: backend '") + backend +
                                  "' can't be used: ranks 0-2: "),
                        AnyOf(HasSubstr("no NVIDIA driver"), HasSubstr("no card")),
                        HasSubstr("use \"lockstep\", or no backend at all")));
      EXPECT_FALSE(is_initialized());
      // And nothing is broken.
      auto world = init_process_group();
      EXPECT_EQ(get_backend(), "lockstep");
      barrier();
    });
  }
}

TEST(Nccl, FurtherGroupsOfItAreRefusedAndHarmNoOther) {
  if (cuda_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto refused = AllOf(HasSubstr("backend 'nccl' can't be used: "), HasSubstr("use \"lockstep\""));
    EXPECT_THAT(message_of<c10::ValueError>([] {
                  new_group({0, 2}, {}, {.backend = "nccl"});
                }),
                AllOf(refused, HasSubstr("ranks 0 and 2: ")))
        << "on rank " << rank;
    EXPECT_THAT(message_of<c10::ValueError>([] { split_group({}, {{0, 1}, {2}}, {}, {}, "nccl"); }), refused);
    EXPECT_THAT(message_of<c10::Error>(
                    [] { new_group({}, {}, {.backend = "nccl", .use_local_synchronization = true}); }),
                HasSubstr("CUDA was asked for, but"));
    at::Tensor tensor = at::ones({2});
    all_reduce(tensor, ReduceOp::SUM, new_group());
    EXPECT_EQ(tensor[1].item<float>(), 3);
  });
}

TEST(Nccl, RanksThatAskForDifferentBackendsAreTold) {
  run_ranks(3, [](int rank) {
    EXPECT_THAT(
        message_of<c10::DistBackendError>(
            [&] { auto world = init_process_group({.backend = rank == 1 ? "cpu:lockstep" : "lockstep"}); }),
        HasSubstr(
            "the ranks asked for different backends: ranks 0 and 2: 'lockstep'; rank 1: 'cpu:lockstep'"));
  });
}

TEST(Nccl, ADeviceThatIsNotThereIsRefusedBeforeAnybodyIsWaitedFor) {
  EXPECT_THAT(message_of<c10::ValueError>([] {
                auto world =
                    init_process_group({.rank = 0, .world_size = 2, .device_id = at::Device("cuda:99")});
              }),
              HasSubstr("cuda:99"));
}

// ---- with one card

/// A world of one rank on the first card.
void on_one_card(const std::function<void()>& body, InitOptions options = {.backend = "nccl"},
                 std::vector<std::pair<std::string, std::optional<std::string>>> environment = {}) {
  run_ranks(1,
            [&](int) {
              flight::RecordFolder folder;
              set_device(at::Device("cuda:0"));
              auto world = init_process_group(options);
              body();
            },
            {.environment = std::move(environment)});
}

/// NCCL's works end behind the host's back.
void wait_for_the_card() {
  torch::cuda::synchronize();
}

TEST(NcclOnCuda, RunsEveryCollectiveOnOneRank) {
  LOCKSTEP_NEEDS_CARDS(1);
  on_one_card([] {
    EXPECT_EQ(get_backend(), "nccl");
    EXPECT_EQ(get_backend_config(), "cuda:nccl");
    EXPECT_EQ(default_group()->getBackend(at::kCUDA)->getBackendName(), "nccl");
    const auto x = on_card(torch::arange(4).to(torch::kFloat));
    const auto same = [&](const at::Tensor& y) { return at::equal(y.cpu().flatten(), x.cpu()); };
    const auto fresh = [&] { return at::zeros_like(x); };
    auto a = x.clone();
    all_reduce(a);
    EXPECT_TRUE(same(a));
    all_reduce(a, ReduceOp::AVG);
    all_reduce(a, premul_sum(2.0));
    EXPECT_TRUE(at::equal(a.cpu(), 2 * x.cpu()));
    a = x.clone();
    auto b = x.clone();
    all_reduce_coalesced({a, b});
    EXPECT_TRUE(same(a) && same(b));
    reduce(a, 0);
    broadcast(a, 0);
    EXPECT_TRUE(same(a));
    a = fresh();
    all_gather({a}, x);
    EXPECT_TRUE(same(a));
    a = fresh();
    all_gather_into_tensor(a, x);
    EXPECT_TRUE(same(a));
    a = fresh();
    all_gather_into_tensor_coalesced({a}, {x});
    EXPECT_TRUE(same(a));
    a = fresh();
    gather(x, {a}, 0);
    EXPECT_TRUE(same(a));
    a = fresh();
    scatter(a, {x}, 0);
    EXPECT_TRUE(same(a));
    a = fresh();
    reduce_scatter(a, {x});
    EXPECT_TRUE(same(a));
    a = fresh();
    reduce_scatter_tensor(a, x);
    EXPECT_TRUE(same(a));
    a = fresh();
    reduce_scatter_tensor_coalesced({a}, {x});
    EXPECT_TRUE(same(a));
    a = fresh();
    all_to_all({a}, {x});
    EXPECT_TRUE(same(a));
    a = fresh();
    all_to_all_single(a, x);
    EXPECT_TRUE(same(a));
    a = x.clone();
    all_reduce(a, ReduceOp::SUM, {}, /*async_op=*/true)->wait();
    EXPECT_TRUE(same(a));
    a = fresh();
    for (const auto& work : batch_isend_irecv({{P2POp::Kind::kSend, x, 0}, {P2POp::Kind::kReceive, a, 0}}))
      work->wait();
    EXPECT_TRUE(same(a));
  });
}

TEST(NcclOnCuda, WhatItLacksGoesOverLockstepOrSaysWhatToDo) {
  LOCKSTEP_NEEDS_CARDS(1);
  on_one_card([] {
    at::Tensor on_cpu = at::ones({3});
    all_reduce(on_cpu);
    barrier();
    monitored_barrier();
    EXPECT_THAT(message_of<c10::ValueError>([] { recv(on_card(at::ones({1}))); }),
                HasSubstr("name the source"));
    EXPECT_THAT(message_of<c10::ValueError>([] { all_reduce(at::ones({1}, at::kMeta)); }),
                HasSubstr("no backend for meta tensors"));
  });
}

TEST(NcclOnCuda, IsChosenForARankWithACardOfItsOwn) {
  LOCKSTEP_NEEDS_CARDS(1);
  on_one_card([] { EXPECT_EQ(get_backend(), "cpu:lockstep,cuda:nccl"); }, {});
}

TEST(NcclOnCuda, TakesOptions) {
  LOCKSTEP_NEEDS_CARDS(1);
  on_one_card(
      [] {
        auto x = on_card(at::ones({1}));
        all_reduce(x);
        auto group = new_group({}, 7s, {.group_desc = "quick", .nccl = {.max_ctas = 4}});
        const auto backend = group->getBackend(at::kCUDA);
        EXPECT_EQ(backend->getBackendOptions()->timeout, 7s);
        EXPECT_EQ(backend->getBackendOptions()->group_desc, "quick");
        set_group_timeout(9s, group);
        EXPECT_EQ(backend->getBackendOptions()->timeout, 9s);
        all_reduce(x, ReduceOp::SUM, group);
        destroy_process_group(group);
      },
      {.backend = "nccl", .device_id = at::Device("cuda:0"), .nccl = {.is_high_priority_stream = true}});
}

TEST(NcclOnCuda, ItsOperationsAreInTheFlightRecord) {
  LOCKSTEP_NEEDS_CARDS(1);
  on_one_card([] {
    auto x = on_card(at::ones({5}));
    all_reduce(x);
    wait_for_the_card();
    abort();
    const std::string path = flight::dump("test");
    const auto record = flight::read_file(path);
    const auto& entry = record.entries.back();
    EXPECT_EQ(entry.operation, "all_reduce");
    EXPECT_EQ(entry.sequence, 1U);
    EXPECT_THAT(entry.file, HasSubstr("nccl_device_test.cc"));
    EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(path).parent_path() / "nccl_trace_rank_0"));
  });
}

TEST(NcclOnCuda, AnAbortedGroupRefusesFurtherOperations) {
  LOCKSTEP_NEEDS_CARDS(1);
  for (const char* blocking : {"0", "1"}) {
    on_one_card(
        [] {
          auto x = on_card(at::ones({5}));
          all_reduce(x);
          abort();
          EXPECT_THROW(all_reduce(x), c10::Error);
        },
        {.backend = "nccl"}, {{"TORCH_NCCL_BLOCKING_WAIT", blocking}});
  }
}

TEST(NcclOnCuda, RanksThatShareACardAreStagedOrRefused) {
  LOCKSTEP_NEEDS_CARDS(1);
  const auto outcomes = run_ranks_collect(2, [](int rank) {
    set_device(at::Device("cuda:0"));
    EXPECT_THAT(
        message_of<c10::ValueError>([] { auto world = init_process_group({.backend = "nccl"}); }),
        AllOf(HasSubstr("ranks 0 and 1 share the card GPU-"), HasSubstr("NCCL wants a card for each rank")));
    auto world = init_process_group();
    EXPECT_EQ(get_backend(), "lockstep");
    auto x = on_card(at::ones({1}) * (rank + 1));
    all_reduce(x);
    EXPECT_EQ(x.item<float>(), 3);
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_status, 0) << outcome.output;
  EXPECT_THAT(outcomes[0].output, HasSubstr("ranks 0 and 1 share the card GPU-"));
}

// ---- with two cards

TEST(NcclOnCuda, TwoRanksReduceAndSend) {
  LOCKSTEP_NEEDS_CARDS(2);
  run_ranks(2, [](int rank) {
    set_device();
    auto world = init_process_group();
    EXPECT_EQ(get_backend(), "cpu:lockstep,cuda:nccl");
    auto x = on_card(at::ones({4}) * (rank + 1));
    all_reduce(x);
    EXPECT_EQ(x[3].item<float>(), 3);
    auto mine = on_card(at::ones({2}) * rank);
    auto theirs = at::zeros_like(mine);
    for (const auto& work : batch_isend_irecv(
             {{P2POp::Kind::kSend, mine, 1 - rank}, {P2POp::Kind::kReceive, theirs, 1 - rank}})) {
      work->wait();
    }
    EXPECT_EQ(theirs[1].item<float>(), 1 - rank);
    at::Tensor on_cpu = at::ones({1});
    all_reduce(on_cpu);
    EXPECT_EQ(on_cpu.item<float>(), 2);
    auto half = split_group({}, {{0}, {1}});
    all_reduce(x, ReduceOp::SUM, half);
    EXPECT_EQ(x[0].item<float>(), 3);
    destroy_process_group(half);
  });
}

TEST(NcclOnCuda, ADeadPeerKeepsNoRankFromEnding) {
  LOCKSTEP_NEEDS_CARDS(2);
  const auto outcomes = run_ranks_collect(2,
                                          [](int rank) {
                                            set_device();
                                            auto world = init_process_group({.backend = "nccl"});
                                            auto x = on_card(at::ones({4}));
                                            all_reduce(x);
                                            wait_for_the_card();
                                            barrier();
                                            if (rank == 1) std::_Exit(0);
                                            EXPECT_THROW(barrier(), c10::DistBackendError);
                                            destroy_process_group();
                                          },
                                          {.expected_failures = {1}});
  EXPECT_EQ(outcomes[0].exit_status, 0) << outcomes[0].output;
}

TEST(NcclOnCuda, ALatePeerIsATimeoutThatNamesTheOperation) {
  LOCKSTEP_NEEDS_CARDS(2);
  const auto outcomes = run_ranks_collect(
      2,
      [](int rank) {
        flight::RecordFolder folder;
        set_device();
        auto world = init_process_group({.backend = "nccl", .timeout = 5s});
        auto x = on_card(at::ones({4}));
        all_reduce(x);
        wait_for_the_card();
        if (rank == 0) {
          const std::string error = message_of<c10::DistBackendError>([&] { all_reduce(x); });
          EXPECT_THAT(error, AllOf(HasSubstr("ALLREDUCE"), HasSubstr("SeqNum=2")));
          abort();
        } else {
          EXPECT_THROW(barrier(), c10::Error);  // until rank 0 aborts
        }
      },
      {.environment = {{"TORCH_NCCL_BLOCKING_WAIT", "1"}}});
  for (const auto& outcome : outcomes) EXPECT_EQ(outcome.exit_status, 0) << outcome.output;
}

}  // namespace
}  // namespace lockstep::nccl_device_test
