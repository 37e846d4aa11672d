#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/pipeline/internal/tensor_messages.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Lists of tensors through the host's memory and between hosts; those on devices are in pipeline_device_test.cc.
namespace lockstep::tensor_messages_test {
namespace {

using pipeline::internal::TensorMessages;
using testing::run_ranks;
using Tensors = std::vector<at::Tensor>;

constexpr int kLists = 24, kTagOfTwo = kLists;
constexpr int64_t kLargeElements = 1 << 20;  // 8 MiB

/// What a rank sends by a tag: with gaps, in another order in memory, undefined, empty; some large, some of many tensors.
Tensors list_of(int from, int tag) {
  const auto seed = static_cast<uint64_t>(1000 * from + 10 * tag);
  Tensors list{testing::random({3, 5}, seed),
               testing::random({7, 9}, seed + 1).t(),
               testing::random({4, 9}, seed + 2).slice(1, 0, 9, 2),
               at::Tensor(),
               at::empty({0, 3}),
               testing::random({}, seed + 3, at::kFloat)};
  if (tag % 3 == 0) list.push_back(at::arange(kLargeElements, at::kDouble) + static_cast<double>(seed));
  // More than the message in front can describe.
  for (int i = 0; i < (tag % 4 == 1 ? 60 : 0); ++i) list.push_back(at::full({1, i}, i + tag, at::kLong));
  return list;
}

void expect_list(const Tensors& taken, int from, int tag) {
  const Tensors wanted = list_of(from, tag);
  ASSERT_EQ(taken.size(), wanted.size());
  EXPECT_TRUE(testing::equal(taken, wanted)) << "tag " << tag;
  EXPECT_TRUE(taken[0].requires_grad());
  EXPECT_FALSE(taken[1].requires_grad());
  EXPECT_EQ(taken[1].strides(), wanted[1].strides());
}

/// Both ranks send all before one of them receives, and take the lists in orders of their own. `threads`: the system gives
/// threads for messages in the background.
void expect_lists_in_any_order(int hosts, bool threads = true) {
  run_ranks(2,
            [hosts, threads](int rank) {
              auto world = init_process_group({.timeout = std::chrono::seconds(50)});
              if (!threads) {
                while (background_thread_count() > 0) std::this_thread::yield();  // an idle one would serve
                failpoint::configure("start_thread=errno(11)");
              }
              const int peer = 1 - rank;
              TensorMessages messages(default_group());
              EXPECT_EQ(messages.is_far(peer), hosts == 2);
              const auto send = [&](int number, int tag) {
                Tensors list = list_of(rank, number);
                list[0].requires_grad_();
                messages.send(list, peer, tag);
              };
              for (int tag = 0; tag < kLists; ++tag) send(tag, tag);
              for (const int number : {1, 2}) send(number, kTagOfTwo);
              EXPECT_GE(messages.bytes_in_flight(), kLists / 3 * kLargeElements * 8);
              barrier();

              std::vector<int> order(kLists);
              std::iota(order.begin(), order.end(), 0);
              std::shuffle(order.begin(), order.end(), std::mt19937_64(static_cast<uint64_t>(rank)));
              std::vector<std::shared_ptr<TensorMessages::Receipt>> receipts;
              for (const int tag : order) receipts.push_back(messages.receive(peer, tag));
              receipts.back()->advance();
              for (size_t i = 0; i < order.size(); ++i) {
                expect_list(receipts[i]->take(at::kCPU), peer, order[i]);
              }
              // Lists of one tag come in their order.
              for (const int number : {1, 2}) {
                expect_list(messages.receive(peer, kTagOfTwo)->take(at::kCPU), peer, number);
              }
              messages.finish_sends();
              EXPECT_EQ(messages.bytes_in_flight(), 0);
            },
            {.hosts = hosts});
}

TEST(TensorMessages, RanksMaySendAllBeforeOneReceives) {
  expect_lists_in_any_order(1);
}

TEST(TensorMessages, RanksOfTwoHostsMaySendAllBeforeOneReceives) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_lists_in_any_order(2);
}

TEST(TensorMessages, WithoutThreadsInTheBackgroundListsCrossWhereTheyAreWaitedFor) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_lists_in_any_order(2, /*threads=*/false);
}

TEST(TensorMessages, WhatComesFromAnotherHostComesWhileItsReceiverDoesSomethingElse) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  constexpr int kTag = 9;  // large, and of many tensors
  run_ranks(2,
            [](int rank) {
              auto world = init_process_group({.timeout = std::chrono::seconds(50)});
              TensorMessages messages(default_group());
              if (rank == 0) {
                Tensors list = list_of(rank, kTag);
                list[0].requires_grad_();
                messages.send(list, 1, kTag);
                messages.finish_sends();
                barrier();
              } else {
                const auto receipt = messages.receive(0, kTag);
                barrier();  // which rank 0 calls when all has arrived
                expect_list(receipt->take(at::kCPU), 0, kTag);
              }
            },
            {.hosts = 2});
}

TEST(TensorMessages, AListThatIsNotTakenKeepsNoRankFromEnding) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  run_ranks(2,
            [](int rank) {
              auto world = init_process_group({.timeout = std::chrono::seconds(50)});
              TensorMessages messages(default_group());
              const auto receipt = rank == 1 ? messages.receive(0, /*tag=*/0) : nullptr;
              if (rank == 0) messages.send(list_of(rank, 0), 1, 0);
              barrier();
              destroy_process_group();  // while the list's tensors may be asked for
            },
            {.hosts = 2});
}

}  // namespace
}  // namespace lockstep::tensor_messages_test
