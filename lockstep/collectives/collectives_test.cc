#include <cmath>
#include <gmock/gmock.h>
#include <thread>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/collectives/algorithms/algorithms.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/long_run.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::collectives_test {
namespace {

namespace algorithms = collectives::internal::algorithms;
using testing::run_ranks;

/// What a rank contributes: small whole numbers, exact in every type, different on each rank.
at::Tensor contribution(int rank, at::IntArrayRef sizes, at::ScalarType type, int64_t salt) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 * salt + rank));
  const int64_t low = c10::isFloatingType(type) || c10::isSignedType(type) ? -4 : 0;
  return type == at::kBool ? at::randint(2, sizes, generator, at::kBool)
                           : at::randint(low, 5, sizes, generator, at::kLong).to(type);
}

/// The same reduction by torch's own operations, rank after rank.
at::Tensor expected_reduction(const std::vector<at::Tensor>& inputs, const ReduceOp& op) {
  at::Tensor result = inputs[0].clone();
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const at::Tensor& next = inputs[rank];
    switch (static_cast<ReduceOp::RedOpType>(op)) {
      case ReduceOp::SUM:
      case ReduceOp::AVG:
        result = result.scalar_type() == at::kBool ? result.logical_or(next)
                                                   : (result + next).to(next.scalar_type());
        break;
      case ReduceOp::PRODUCT:
        result = result.scalar_type() == at::kBool ? result.logical_and(next)
                                                   : (result * next).to(next.scalar_type());
        break;
      case ReduceOp::MIN:
        result = at::minimum(result, next);
        break;
      case ReduceOp::MAX:
        result = at::maximum(result, next);
        break;
      case ReduceOp::BAND:
        result = result.bitwise_and(next);
        break;
      case ReduceOp::BOR:
        result = result.bitwise_or(next);
        break;
      default:
        result = result.bitwise_xor(next);
    }
  }
  if (op != ReduceOp::AVG) return result;
  const auto ranks = static_cast<int64_t>(inputs.size());
  return at::isFloatingType(result.scalar_type()) ? result / static_cast<double>(ranks)
                                                  : at::div(result, ranks, "trunc");
}

/// A copy in memory that the peers see.
at::Tensor shared_copy(const at::Tensor& tensor) {
  return empty_shared(tensor.sizes(), tensor.options()).copy_(tensor);
}

void check_all_reduce(at::ScalarType type, const ReduceOp& op, at::IntArrayRef sizes, bool shared,
                      int64_t salt) {
  const int ranks = get_world_size();
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < ranks; ++rank) inputs.push_back(contribution(rank, sizes, type, salt));
  at::Tensor tensor = inputs[get_rank()].clone();
  if (shared) tensor = shared_copy(tensor);
  all_reduce(tensor, op);
  ASSERT_TRUE(at::equal(tensor, expected_reduction(inputs, op)))
      << type << ' ' << sizes << (shared ? " shared" : " staged") << " operation "
      << static_cast<int>(op.op_);
}

class CollectivesOverRanks : public ::testing::TestWithParam<int> {};

TEST_P(CollectivesOverRanks, AllReduceEqualsTorchForEveryTypeOperationAndPath) {
  run_ranks(GetParam(),
            [](int) {
              auto world = init_process_group();
              algorithms::set_chunk_bytes_for_testing(size_t{16} << 10);  // several chunks from few bytes
              int64_t salt = 0;
              for (auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar, at::kByte,
                                at::kShort, at::kInt, at::kLong, at::kBool}) {
                for (auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::MAX,
                                ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR}) {
                  const bool floating = c10::isFloatingType(type);
                  const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
                  if (floating ? bitwise : type == at::kBool && op == ReduceOp::AVG) {
                    EXPECT_THROW(all_reduce(at::ones({2}, type), op), c10::ValueError);
                    continue;
                  }
                  // PRODUCT over 16 ranks leaves the range where small floats are exact.
                  if (op == ReduceOp::PRODUCT && world.size() > 4 && floating) continue;
                  if (floating && op == ReduceOp::AVG && (world.size() & (world.size() - 1)) != 0)
                    continue;  // division rounds
                  check_all_reduce(type, op, {}, false, ++salt);
                  check_all_reduce(type, op, {0}, false, ++salt);
                  check_all_reduce(type, op, {3, 7}, true, ++salt);
                  check_all_reduce(type, op, {20001}, false, ++salt);
                  check_all_reduce(type, op, {20001}, true, ++salt);
                }
              }
              for (int64_t numel : {2047, 2048, 2049, 4096, 4097, 16384, 50000, 300001}) {
                check_all_reduce(at::kFloat, ReduceOp::SUM, {numel}, false, ++salt);
                check_all_reduce(at::kFloat, ReduceOp::SUM, {numel}, true, ++salt);
              }
            },
            {.deadline = std::chrono::seconds(200)});
}

TEST_P(CollectivesOverRanks, RoundingIsTheSameOnAllRanksAndInTwoRuns) {
  run_ranks(GetParam(), [](int rank) {
    auto world = init_process_group();
    for (int64_t numel : {100, 30000}) {
      for (auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
        auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(rank));
        const at::Tensor input = at::randn({numel}, generator, at::kFloat).to(type);
        at::Tensor first = input.clone();
        all_reduce(first);
        at::Tensor second = shared_copy(input);
        all_reduce(second);
        ASSERT_TRUE(at::equal(first, second));
        std::vector<at::Tensor> all;
        for (int peer = 0; peer < world.size(); ++peer) all.push_back(at::empty_like(first));
        all_gather(all, first);
        for (const at::Tensor& other : all) ASSERT_TRUE(at::equal(other, first));
      }
    }
  });
}

TEST_P(CollectivesOverRanks, AveragesOfLargeNumbersAreFinite) {
  run_ranks(GetParam(), [](int) {
    auto world = init_process_group();
    const std::vector<std::pair<at::ScalarType, double>> numbers = {{at::kHalf, 60000},
                                                                    {at::kBFloat16, std::ldexp(1, 127)},
                                                                    {at::kFloat, std::ldexp(1, 127)},
                                                                    {at::kDouble, std::ldexp(1, 1023)}};
    for (const auto& [type, number] : numbers) {
      for (const int64_t numel : {10, 30000}) {
        const at::Tensor input = at::full({numel}, number, type);
        at::Tensor staged = input.clone();
        all_reduce(staged, ReduceOp::AVG);
        EXPECT_TRUE(at::equal(staged, input)) << type << ' ' << numel;
        at::Tensor shared = shared_copy(input);
        all_reduce(shared, ReduceOp::AVG);
        EXPECT_TRUE(at::equal(shared, input)) << type << ' ' << numel;
        at::Tensor piece = at::zeros_like(input);
        reduce_scatter_tensor(piece, input.repeat({world.size()}), ReduceOp::AVG);
        EXPECT_TRUE(at::equal(piece, input)) << type << ' ' << numel;
      }
    }
  });
}

TEST_P(CollectivesOverRanks, BroadcastAllGatherAndBarrier) {
  run_ranks(GetParam(), [](int rank) {
    auto world = init_process_group();
    algorithms::set_chunk_bytes_for_testing(size_t{16} << 10);
    int64_t salt = 0;
    for (int64_t numel : {0, 1, 2048, 2049, 30011}) {
      for (bool shared : {false, true}) {
        const int root = static_cast<int>(++salt) % world.size();
        at::Tensor tensor = contribution(rank, {numel}, at::kFloat, salt);
        if (shared) tensor = shared_copy(tensor);
        broadcast(tensor, root);
        ASSERT_TRUE(at::equal(tensor, contribution(root, {numel}, at::kFloat, salt))) << numel;

        at::Tensor input = contribution(rank, {numel}, at::kInt, salt);
        if (shared) input = shared_copy(input);
        std::vector<at::Tensor> outputs;
        for (int peer = 0; peer < world.size(); ++peer) outputs.push_back(at::full({numel}, -9, at::kInt));
        all_gather(outputs, input);
        for (int peer = 0; peer < world.size(); ++peer) {
          ASSERT_TRUE(at::equal(outputs[peer], contribution(peer, {numel}, at::kInt, salt))) << numel;
        }
        barrier();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CollectivesOverRanks, ::testing::Values(1, 2, 3, 4, 16));

TEST(Collectives, TensorsMayLieInMemoryInAnyWay) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor channels_last = at::full({2, 3, 4, 5}, rank + 1.0).contiguous(at::MemoryFormat::ChannelsLast);
    channels_last.select(1, 2).fill_(10 * rank);
    all_reduce(channels_last);
    EXPECT_TRUE(at::equal(channels_last.select(1, 0), at::full({2, 4, 5}, 3.0)));
    EXPECT_TRUE(at::equal(channels_last.select(1, 2), at::full({2, 4, 5}, 10.0)));

    at::Tensor whole = at::zeros({4, 4});
    all_reduce(whole.select(1, 1).fill_(1));  // with gaps, which stay as they are
    EXPECT_EQ(whole.sum().item<float>(), 8);
    EXPECT_EQ(whole.select(1, 1).sum().item<float>(), 8);

    // Of one shape, but another order in memory on each rank: element is added to element all the same.
    const at::Tensor values = at::arange(6, at::kFloat).view({3, 2});
    at::Tensor matrix = rank == 0 ? values.clone() : values.t().contiguous().t();
    all_reduce(matrix);
    EXPECT_TRUE(at::equal(matrix, 2 * values));

    try {
      all_reduce(at::zeros({1}).expand({4}));
      ADD_FAILURE() << "its elements share memory";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("contiguous()"));
    }
  });
}

TEST(Collectives, ResultsMayOverlapInputs) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    algorithms::set_chunk_bytes_for_testing(4096);
    constexpr int64_t kNumel = 10'000;  // many chunks
    constexpr int64_t kShift = 3'000;   // some chunks
    const auto values = [](int of_rank, int to) {
      return at::arange(kNumel, at::kLong) + 1'000'000 * (1 + of_rank) + 100'000 * to;
    };
    for (const bool shared : {false, true}) {
      // `input` and `output` have most of their memory in common.
      const auto memory = [&] {
        return shared ? empty_shared({kNumel + kShift}, at::kLong).fill_(-1)
                      : at::full({kNumel + kShift}, -1, at::kLong);
      };
      const auto input_in = [](const at::Tensor& whole) { return whole.narrow(0, 0, kNumel); };
      const auto output_in = [](const at::Tensor& whole) { return whole.narrow(0, kShift, kNumel); };
      for (int root = 0; root < 2; ++root) {
        at::Tensor whole = memory();
        at::Tensor input = input_in(whole).copy_(values(rank, 0));
        std::vector<at::Tensor> outputs;
        if (rank == root) {
          outputs = {at::zeros_like(input), at::zeros_like(input)};
          outputs[root] = output_in(whole);
        }
        gather(input, outputs, root);
        for (size_t from = 0; from < outputs.size(); ++from)
          EXPECT_TRUE(at::equal(outputs[from], values(static_cast<int>(from), 0)))
              << "gather " << root << shared;

        // The result of another rank takes the place of this one's input.
        input.copy_(values(rank, 0));
        if (rank == root) {
          outputs = {at::zeros_like(input), at::zeros_like(input)};
          outputs[1 - root] = input;
        }
        gather(input, outputs, root);
        for (size_t from = 0; from < outputs.size(); ++from)
          EXPECT_TRUE(at::equal(outputs[from], values(static_cast<int>(from), 0)))
              << "in place " << root << shared;

        at::Tensor output = output_in(whole);
        std::vector<at::Tensor> inputs;
        if (rank == root) {
          inputs = {values(root, 0), values(root, 1)};
          inputs[root] = input_in(whole).copy_(values(root, root));
        }
        scatter(output, inputs, root);
        EXPECT_TRUE(at::equal(output, values(root, rank))) << "scatter " << root << shared;
      }

      at::Tensor whole = memory();
      at::Tensor input = input_in(whole).copy_(values(rank, 0));
      std::vector<at::Tensor> outputs{at::zeros_like(input), at::zeros_like(input)};
      outputs[rank] = output_in(whole);
      all_gather(outputs, input);
      for (int from = 0; from < 2; ++from)
        EXPECT_TRUE(at::equal(outputs[from], values(from, 0))) << "all_gather " << shared;

      std::vector<at::Tensor> inputs{values(rank, 0), values(rank, 1)};
      inputs[rank] = input_in(whole).copy_(values(rank, rank));
      at::Tensor output = output_in(whole);
      reduce_scatter(output, inputs);
      EXPECT_TRUE(at::equal(output, values(0, rank) + values(1, rank))) << "reduce_scatter " << shared;
    }
  });
}

TEST(Collectives, AsynchronousOperationsRunInOrderAndWithoutWaiting) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 200; ++i) {
      tensors.push_back(at::full({i % 3 == 0 ? 5000 : 10}, i + rank, at::kLong));
      works.push_back(all_reduce(tensors.back(), ReduceOp::SUM, {}, true));
    }
    auto last = broadcast(tensors[0], 1, {}, true);
    // The first ones are not waited for: the communication thread finishes them, in order.
    last->getFuture()->wait();
    for (auto& work : works) EXPECT_TRUE(work->isCompleted() && work->isSuccess());
    for (int i = 1; i < 200; ++i) ASSERT_EQ(tensors[i][0].item<int64_t>(), 2 * i + 1);
    auto work = all_reduce(tensors[1], ReduceOp::SUM, {}, true);
    work->wait();
    EXPECT_EQ(work->result().size(), 1u);
    EXPECT_THAT(tensors[1].sum().item<int64_t>(), 10 * 6);
  });
}

TEST(Collectives, GroupsLiveBesideEachOtherInSeveralThreads) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    auto all = new_group();
    auto even = new_group({0, 2});
    auto odd = new_group({3, 1});  // groups are in the order of ranks, whatever was given
    const ProcessGroup mine = rank % 2 == 0 ? even : odd;
    const ProcessGroup other = rank % 2 == 0 ? odd : even;
    EXPECT_TRUE(is_member(mine));
    EXPECT_FALSE(is_member(other));
    EXPECT_EQ(get_rank(other), -1);
    EXPECT_THROW(barrier(other), c10::ValueError);
    EXPECT_EQ(get_rank(mine), rank < 2 ? 0 : 1);

    std::thread worker([&] {
      for (int i = 0; i < 300; ++i) {
        at::Tensor tensor = at::full({i % 2 == 0 ? 4 : 4000}, rank, at::kInt);
        all_reduce(tensor, ReduceOp::SUM, mine);
        ASSERT_EQ(tensor[0].item<int>(), rank % 2 == 0 ? 2 : 4);
      }
    });
    for (int i = 0; i < 300; ++i) {
      at::Tensor tensor = at::full({i % 2 == 0 ? 3000 : 3}, rank, at::kInt);
      all_reduce(tensor, ReduceOp::SUM, all);
      ASSERT_EQ(tensor[0].item<int>(), 6);
    }
    worker.join();
    at::Tensor tensor = at::full({1}, rank);
    broadcast(tensor, rank % 2 == 0 ? 2 : 3, mine);  // a global rank
    EXPECT_EQ(tensor.item<double>(), rank % 2 == 0 ? 2 : 3);
    EXPECT_THROW(broadcast(tensor, rank % 2 == 0 ? 1 : 0, mine), c10::ValueError);
    destroy_process_group(mine);
    EXPECT_THROW(get_rank(mine), c10::Error);
    all_reduce(tensor);  // the default group goes on
  });
}

TEST(Collectives, WorldOfOneNeedsNoEnvironment) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  at::Tensor tensor = at::full({5}, 7.0);
  all_reduce(tensor, ReduceOp::AVG);
  broadcast(tensor, 0);
  std::vector<at::Tensor> outputs{at::zeros({5})};
  all_gather(outputs, tensor);
  barrier();
  EXPECT_TRUE(at::equal(outputs[0], at::full({5}, 7.0)));
  EXPECT_THROW((void)init_process_group({.rank = 0, .world_size = 1}), c10::Error) << "twice";
}

TEST(Collectives, InitialiseDestroyAndInitialiseAgain) {
  run_ranks(3, [](int rank) {
    at::Tensor survivor;
    for (int round = 0; round < 5; ++round) {
      auto world = init_process_group();
      at::Tensor tensor = empty_shared({5000}).fill_(rank + round);
      all_reduce(tensor);
      ASSERT_EQ(tensor[4999].item<float>(), 3 + 3 * round);
      survivor = tensor;
    }
    EXPECT_FALSE(is_initialized());
    EXPECT_EQ(survivor[0].item<float>(), 15) << "shared memory outlives its group";
    EXPECT_THROW(all_reduce(survivor), c10::Error);
  });
}

TEST(Collectives, BadArgumentsAreRefusedWithTheRemedy) {
  EXPECT_THROW((void)init_process_group({.backend = "nccl", .rank = 0, .world_size = 1}), c10::ValueError);
  EXPECT_THROW((void)init_process_group({.backend = "cpu:lockstep,cuda:nccl", .rank = 0, .world_size = 1}),
               c10::ValueError);
  EXPECT_THROW((void)init_process_group({.backend = "smoke", .rank = 0, .world_size = 1}), c10::ValueError);
  EXPECT_THROW(
      (void)init_process_group({.timeout = std::chrono::milliseconds(0), .rank = 0, .world_size = 1}),
      c10::ValueError);
  auto world = init_process_group({.rank = 0, .world_size = 1});
  EXPECT_THROW(all_reduce(at::Tensor()), c10::ValueError);
  EXPECT_THROW(all_reduce(at::ones({2}).to_sparse(), ReduceOp::MAX), c10::ValueError);
  EXPECT_THROW(broadcast(at::ones({2}).to_sparse(), 0), c10::ValueError);
  EXPECT_THROW(broadcast(at::ones({2}), 1), c10::ValueError);
  std::vector<at::Tensor> wrong{at::ones({3})};
  EXPECT_THROW(all_gather(wrong, at::ones({2})), c10::ValueError);
  std::vector<at::Tensor> none;
  EXPECT_THROW(all_gather(none, at::ones({2})), c10::ValueError);
  EXPECT_THROW(new_group({0, 0}), c10::ValueError);
  EXPECT_THROW(new_group({1}), c10::ValueError);
}

TEST(Collectives, MoreThanTwoGibibytes) {
  if (!testing::long_run()) GTEST_SKIP() << "long; runs with scripts/test --all";
  constexpr int64_t kNumel = (int64_t{1} << 31) + 12345;
  if (read_memory_limits().available < 4 * kNumel) GTEST_SKIP() << "needs 9 GB of free memory";
  run_ranks(2,
            [](int rank) {
              auto world = init_process_group();
              at::Tensor tensor = at::full({kNumel}, rank + 1, at::kChar);
              all_reduce(tensor);
              EXPECT_EQ(tensor.min().item<int>(), 3);
              EXPECT_EQ(tensor.max().item<int>(), 3);
            },
            {.deadline = std::chrono::seconds(200)});
}

}  // namespace
}  // namespace lockstep::collectives_test
