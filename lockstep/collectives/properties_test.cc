#include <algorithm>
#include <gmock/gmock.h>
#include <numeric>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/algorithms/staging.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/testing/operation_stream.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/thread_ranks.h>

// Random calls of every operation against what a single process computes. The table of operations and what is
// drawn at random: testing/random_cases.h.
namespace lockstep::properties_test {
namespace {

namespace algorithms = collectives::internal::algorithms;
using namespace std::chrono_literals;
using testing::Case;
using testing::Operation;
using testing::operation_named;
using testing::operations;
using testing::OperationStream;
using testing::Place;
using testing::Random;
using testing::run_ranks;
using testing::test_seed;

constexpr size_t kChunkBytes = 4096;  // several chunks from few bytes

std::string titled(uint64_t seed, const std::string& what) {
  return "LOCKSTEP_TEST_SEED=" + std::to_string(seed) + ", " + what;
}

/// All ranks of the job in random order, cut into groups at random. Alike on all ranks.
std::vector<std::vector<int>> random_groups(Random& random, int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), random);
  std::vector<std::vector<int>> groups;
  for (auto first = ranks.begin(); first != ranks.end();) {
    const auto size = testing::draw(random, 1, ranks.end() - first);
    groups.emplace_back(first, first + size);
    first += size;
  }
  return groups;
}

TEST(Properties, EveryOperationOfProcessesEqualsOneProcess) {
  const uint64_t seed = test_seed();
  const int rounds = testing::long_run() ? 60 : 6;
  run_ranks(8,
            [&](int) {
              auto world = init_process_group();
              algorithms::set_chunk_bytes_for_testing(kChunkBytes);
              Random common(seed);
              for (int round = 0; round < rounds; ++round) {
                ProcessGroup mine;
                std::vector<int> members;
                // The first round has one group of all.
                auto groups = round == 0 ? std::vector<std::vector<int>>{{4, 2, 7, 0, 1, 6, 3, 5}}
                                         : random_groups(common, world.size());
                for (const auto& ranks : groups) {
                  auto group = new_group(ranks, {}, {.sort_ranks = false});
                  if (!is_member(group)) continue;
                  mine = group;
                  members = ranks;
                }
                const auto stream_seed = seed * 1000 + static_cast<uint64_t>(round * 10 + members[0]);
                OperationStream stream({get_rank(mine), mine, members, {}}, stream_seed,
                                       titled(seed, "round " + std::to_string(round)));
                // The others have other operations and are ready at another time.
                for (size_t i = 0; i < 2 * operations().size(); ++i) stream.step();
                stream.finish();
                destroy_process_group(mine);
              }
            },
            {.deadline = testing::long_run() ? 500s : 120s, .environment = testing::seed_environment(seed)});
}

class PropertiesOfThreads : public ::testing::TestWithParam<int> {};

TEST_P(PropertiesOfThreads, EveryOperationEqualsOneProcess) {
  const uint64_t seed = test_seed();
  const size_t decks = testing::long_run() ? 20 : 2;
  const size_t chunk_bytes = algorithms::chunk_bytes();
  algorithms::set_chunk_bytes_for_testing(kChunkBytes);
  at::ones({1}).add(1);  // libtorch's first-use initialisation happens here, in one thread
  testing::run_rank_threads(GetParam(), [&](const std::shared_ptr<transport::GroupChannel>& channel) {
    auto backend = c10::make_intrusive<LockstepBackend>(channel, LockstepBackend::Settings{"test", 60s});
    OperationStream stream({backend->getRank(), {}, {}, backend}, seed + static_cast<uint64_t>(GetParam()),
                           titled(seed, std::to_string(GetParam()) + " threads"));
    try {
      for (size_t i = 0; i < decks * operations().size(); ++i) stream.step();
      stream.finish();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << backend->getRank() << ": " << error.what();
      backend->abort();  // the others need not wait for this rank
    }
  });
  algorithms::set_chunk_bytes_for_testing(chunk_bytes);
}

INSTANTIATE_TEST_SUITE_P(Ranks, PropertiesOfThreads, ::testing::Values(1, 2, 3, 5, 8));

// ---- What is not taken is refused, before any rank is waited for: one rank suffices to see it.

class Refusals : public ::testing::Test {
 protected:
  Refusals() : world_(init_process_group({.rank = 0, .world_size = 1})) {}

  /// A case of float matrices, to be spoiled.
  static Case plain_case(const Operation& operation) {
    Case c;
    c.operation = &operation;
    c.parts.assign(operation.traits.coalesced ? 2 : 1, {4, 6});
    c.rows = {{4}};
    return c;
  }

  Place place() const { return {0, default_group(), {0}, {}}; }

  /// Calls with `tensors` instead of the right ones, which stay as they are.
  void expect_refused(const Case& c, std::vector<at::Tensor> tensors, const std::string& why) {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& each : tensors) copies.push_back(each.clone());
    const Place here = place();
    testing::Call call{c, here, tensors};
    EXPECT_THROW(c.operation->call(call), c10::ValueError) << c.describe() << ": " << why;
    for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(at::equal(tensors[i], copies[i])) << c.describe();
  }

  static std::vector<at::Tensor> tensors_of(const Case& c) {
    std::vector<at::Tensor> tensors;
    for (const auto& slot : c.operation->slots(c, 0)) {
      tensors.push_back((slot.initial.defined() ? slot.initial : slot.expected).clone());
    }
    return tensors;
  }

 private:
  DefaultGroup world_;
};

TEST_F(Refusals, ReduceOperationsOfOtherTypes) {
  for (const Operation& operation : operations()) {
    if (!operation.traits.reduces) continue;
    for (auto [dtype, reduction] : {std::pair{at::kFloat, ReduceOp::BAND},
                                    {at::kBFloat16, ReduceOp::BXOR},
                                    {at::kDouble, ReduceOp::BOR},
                                    {at::kBool, ReduceOp::AVG},
                                    {at::kComplexFloat, ReduceOp::MAX},
                                    {at::kComplexDouble, ReduceOp::PRODUCT},
                                    {at::kComplexFloat, ReduceOp::BXOR}}) {
      Case c = plain_case(operation);
      auto tensors = tensors_of(c);
      for (at::Tensor& each : tensors) each = each.to(dtype);
      c.dtype = dtype;
      c.reduction = reduction;
      expect_refused(c, tensors, "reduce operation");
    }
  }
}

TEST_F(Refusals, OutputsOfAnotherTypeOrSize) {
  for (const Operation& operation : operations()) {
    const Case c = plain_case(operation);
    const auto tensors = tensors_of(c);
    if (tensors.size() < 2 || operation.traits.point_to_point) continue;
    // An all_reduce of several tensors, whatever their sizes.
    const bool sizes_are_free = std::string(operation.name) == "all_reduce_coalesced";
    auto spoiled = tensors;
    spoiled.back() = spoiled.back().to(at::kDouble);
    expect_refused(c, spoiled, "dtype");
    if (sizes_are_free) continue;
    spoiled.back() = at::zeros({5, 6});
    expect_refused(c, spoiled, "sizes");
  }
}

TEST_F(Refusals, GapsWhereTorchWantsContiguousTensors) {
  const Case c = plain_case(operation_named("all_to_all_single"));
  for (size_t which : {0, 1}) {
    auto tensors = tensors_of(c);
    tensors[which] = at::zeros({7, 4}).t();
    expect_refused(c, tensors, "transposed");
    tensors[which] = at::zeros({4, 14}).slice(1, 0, 14, 2);
    expect_refused(c, tensors, "with gaps");
  }
}

TEST_F(Refusals, OutputsWhoseElementsShareMemory) {
  for (const char* name : {"all_reduce", "reduce", "all_gather", "scatter"}) {
    const Case c = plain_case(operation_named(name));
    auto tensors = tensors_of(c);
    at::Tensor& written = std::string(name) == "all_gather" ? tensors.back() : tensors.front();
    written = at::zeros({1, 6}).expand({4, 6});
    expect_refused(c, tensors, "one row for four");
  }
}

TEST_F(Refusals, SparseTensorsBeyondSums) {
  const at::Tensor sparse = at::eye(4).to_sparse();
  EXPECT_THROW(all_reduce(sparse, ReduceOp::MAX), c10::ValueError);
  EXPECT_THROW(all_reduce(sparse, ReduceOp::AVG), c10::ValueError);
  EXPECT_THROW(all_reduce(sparse.to(at::kHalf)), c10::ValueError) << "torch can't add them";
  EXPECT_THROW(broadcast(sparse, 0), c10::ValueError);
  EXPECT_THROW(all_gather({sparse}, sparse), c10::ValueError);
  EXPECT_THROW(all_reduce_coalesced({sparse, sparse}), c10::ValueError);
}

TEST_F(Refusals, UndefinedTensorsAndListsOfTheWrongLength) {
  const at::Tensor one = at::ones({3});
  EXPECT_THROW(all_reduce(at::Tensor()), c10::ValueError);
  EXPECT_THROW(all_reduce_coalesced({}), c10::ValueError);
  EXPECT_THROW(all_reduce_coalesced({one, at::Tensor()}), c10::ValueError);
  EXPECT_THROW(reduce(one, 1), c10::ValueError);
  EXPECT_THROW(broadcast(one, -1), c10::ValueError);
  EXPECT_THROW(all_gather({}, one), c10::ValueError);
  EXPECT_THROW(all_gather({one, one}, one), c10::ValueError);
  EXPECT_THROW(all_gather_coalesced({{one}}, {one, one}), c10::ValueError);
  EXPECT_THROW(all_gather_into_tensor_coalesced({one}, {one, one}), c10::ValueError);
  EXPECT_THROW(gather(one, {}), c10::ValueError) << "the destination's list is missing";
  EXPECT_THROW(gather(one, {one, one}), c10::ValueError);
  EXPECT_THROW(gather(one, {one}, 3), c10::ValueError);
  EXPECT_THROW(scatter(one, {}), c10::ValueError) << "the source's list is missing";
  EXPECT_THROW(scatter(one, {one, one}), c10::ValueError);
  EXPECT_THROW(reduce_scatter(one, {}), c10::ValueError);
  EXPECT_THROW(reduce_scatter_tensor_coalesced({one}, {}), c10::ValueError);
  EXPECT_THROW(all_to_all({one}, {}), c10::ValueError);
  EXPECT_THROW(all_to_all_single(one, one, {2}, {3}), c10::ValueError) << "splits don't add up";
  EXPECT_THROW(all_to_all_single(one, one, {3}, {4}), c10::ValueError);
  EXPECT_THROW(all_to_all_single(one, one, {-3}, {3}), c10::ValueError);
  EXPECT_THROW(all_to_all_single(one, one, {1, 2}, {1, 2}), c10::ValueError) << "one rank, two splits";
  EXPECT_THROW(premul_sum(at::ones({2})), c10::ValueError);
}

TEST(Properties, PremulSumOfComplexNumbersScalesTheirPartsAlone) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  // Multiplied as complex numbers, with 2 + 0i, these would be NaN.
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor pairs = at::tensor({infinity, 1.0, 3.0, -infinity}, at::kDouble).view({2, 2});
  at::Tensor alone = at::view_as_complex(pairs.clone());
  all_reduce(alone, premul_sum(2.0));
  EXPECT_TRUE(at::equal(at::view_as_real(alone), 2 * pairs)) << alone;
  at::Tensor among_others = at::view_as_complex(pairs.clone());
  all_reduce_coalesced({among_others}, premul_sum(2.0));
  EXPECT_TRUE(at::equal(at::view_as_real(among_others), 2 * pairs)) << among_others;
}

TEST(Properties, ListsOnRanksThatHaveNoneAreRefusedAndTheGroupGoesOn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = at::full({2}, rank, at::kFloat);
    const std::vector<at::Tensor> list{at::ones({2}), at::ones({2})};
    if (rank == 1) {
      EXPECT_THROW(gather(tensor, list, 0), c10::ValueError);
      EXPECT_THROW(scatter(tensor, list, 0), c10::ValueError);
    }
    scatter(tensor, rank == 0 ? list : std::vector<at::Tensor>{}, 0);
    EXPECT_TRUE(at::equal(tensor, at::ones({2})));
  });
}

}  // namespace
}  // namespace lockstep::properties_test
