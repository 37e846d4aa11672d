// Data sets made of others, the default collate function, and a rank's share. That splits are Python's is
// tested by distributed_sampler_test.py.
#include <map>
#include <numeric>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/datasets/concat_dataset.h>
#include <lockstep/data/datasets/subset.h>
#include <lockstep/data/datasets/tensor_dataset.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/data/samplers/rank_share.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::datasets_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

using Indices = std::vector<int64_t>;

/// Sample i is first + i.
struct Numbers {
  int64_t size() const { return count; }
  int64_t get(int64_t i) const { return first + i; }
  int64_t first = 0;
  int64_t count = 0;
};

at::Tensor grid(int64_t rows) {
  return torch::arange(rows * 6, torch::kFloat).reshape({rows, 2, 3});
}

TEST(TensorDataset, GathersRows) {
  const auto data = grid(10);
  const auto target = torch::arange(10);
  const TensorDataset set(data, target);
  static_assert(std::is_same_v<decltype(set)::Sample, Example>);
  EXPECT_EQ(set.size(), 10);
  EXPECT_TRUE(at::equal(set.get(3).data, data[3]));
  EXPECT_EQ(set.get(9).target.item<int64_t>(), 9);
  for (const Indices& indices :
       {Indices{}, Indices{4}, Indices{0, 1, 2, 3}, Indices{9, 9, 0, 1, 5, 6, 7, 2}}) {
    const auto batch = set.get_batch(indices);
    EXPECT_TRUE(at::equal(batch.data, at::index_select(data, 0, torch::tensor(indices, torch::kLong))));
    EXPECT_TRUE(at::equal(batch.target, torch::tensor(indices, torch::kLong)));
    EXPECT_FALSE(batch.data.is_alias_of(data));
  }
}

TEST(TensorDataset, TakesAnyTensors) {
  const Indices indices = {2, 0};
  const auto check = [&](const at::Tensor& tensor) {
    const TensorDataset set(tensor);
    static_assert(std::is_same_v<decltype(set)::Sample, at::Tensor>);
    const auto batch = set.get_batch(indices);
    EXPECT_TRUE(at::equal(batch, at::stack({tensor[2], tensor[0]})));
    EXPECT_EQ(batch.dtype(), tensor.dtype());
  };
  check(torch::arange(3));
  check(torch::arange(12).reshape({4, 3}).t());
  check(torch::rand({5, 0}));
  check(torch::rand({3, 2}, torch::kDouble).to(torch::kBFloat16));
  check(torch::tensor({true, false, true}));
  auto with_grad = torch::rand({3, 2}).requires_grad_();
  TensorDataset(with_grad).get_batch(indices).sum().backward();
  EXPECT_TRUE(at::equal(with_grad.grad(), torch::tensor({{1.F, 1.F}, {0.F, 0.F}, {1.F, 1.F}})));
  const TensorDataset three(torch::arange(3), torch::zeros({3}), torch::ones({3}));
  const auto [a, b, c] = three.get_batch(indices);
  EXPECT_TRUE(at::equal(a, torch::tensor({2, 0}, torch::kLong)));
  EXPECT_EQ((b + c).sum().item<float>(), 2);
}

TEST(TensorDataset, RefusesWhatMakesNoSamples) {
  EXPECT_THAT(message_of<c10::ValueError>([] { TensorDataset(torch::zeros({3}), torch::zeros({4})); }),
              HasSubstr("Size mismatch between tensors: 3 and 4 samples"));
  EXPECT_THAT(message_of<c10::ValueError>([] { TensorDataset(torch::tensor(1)); }),
              HasSubstr("without dimensions"));
  const TensorDataset set(torch::zeros({3}));
  for (const int64_t index : {-1, 3}) {
    EXPECT_THAT(message_of<c10::IndexError>([&] {
                  set.get_batch(Indices{0, index});
                }),
                HasSubstr("out of range for a TensorDataset with 3 samples"));
    EXPECT_THROW(set.get(index), c10::IndexError);
  }
}

TEST(TensorDataset, ServesALoader) {
  const auto data = grid(10);
  const TensorDataset set(data);
  DataLoader loader(set, {.batch_size = 4, .num_workers = 2});
  std::vector<at::Tensor> batches;
  for (auto& batch : loader) batches.push_back(batch);
  EXPECT_TRUE(at::equal(at::cat(batches), data));
}

TEST(Subset, IsThatPartOfTheDataSet) {
  const auto data = grid(10);
  const TensorDataset set(data);
  const Subset part(set, {7, 2, 2});
  EXPECT_EQ(part.size(), 3);
  EXPECT_TRUE(at::equal(part.get(0), data[7]));
  EXPECT_TRUE(at::equal(part.get_batch(Indices{1, 0}), at::stack({data[2], data[7]})));
  const Subset inner(part, {2});
  EXPECT_TRUE(at::equal(inner.get(0), data[2]));
  EXPECT_THAT(message_of<c10::IndexError>([&] { part.get(3); }),
              HasSubstr("out of range for a Subset with 3"));
  EXPECT_THROW(part.get_batch(Indices{-1}), c10::IndexError);
  const Subset wrong(set, {10});
  EXPECT_THROW(wrong.get(0), c10::IndexError);
  const Subset owning(Numbers{5, 4}, {3, 0});
  EXPECT_EQ(owning.get(0), 8);
  DataLoader loader(owning, {.batch_size = 2});
  EXPECT_TRUE(at::equal(*loader.begin(), torch::tensor({8, 5}, torch::kLong)));
}

TEST(ConcatDataset, PutsDataSetsAfterOneAnother) {
  const Numbers tens{10, 3};
  const ConcatDataset both(tens, Numbers{20, 0}, Subset(Numbers{30, 5}, {4, 1}));
  ASSERT_EQ(both.size(), 5);
  EXPECT_THAT(both.cumulative_sizes(), ElementsAre(3, 3, 5));
  Indices seen;
  for (int64_t i = 0; i < both.size(); ++i) seen.push_back(both.get(i));
  EXPECT_THAT(seen, ElementsAre(10, 11, 12, 34, 31));
  const ConcatDataset many(std::vector<Numbers>{{0, 2}, {100, 1}});
  EXPECT_EQ(many.get(2), 100);
  for (const int64_t index : {-1, 5}) EXPECT_THROW(both.get(index), c10::IndexError);
  EXPECT_THAT(message_of<c10::ValueError>([] { ConcatDataset(std::vector<Numbers>{}); }),
              HasSubstr("should not be an empty"));
  DataLoader loader(both, {.batch_size = 5, .num_workers = 1});
  EXPECT_TRUE(at::equal(*loader.begin(), torch::tensor({10, 11, 12, 34, 31}, torch::kLong)));
}

TEST(RandomSplit, CoversTheDataSetAndSharesATemporary) {
  const auto parts = random_split(Numbers{0, 10}, {0.5, 0.25, 0.25});
  ASSERT_EQ(parts.size(), 3U);
  Indices seen;
  for (const auto& part : parts) {
    for (int64_t i = 0; i < part.size(); ++i) seen.push_back(part.get(i));
  }
  std::sort(seen.begin(), seen.end());
  Indices all(10);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
  const Numbers numbers{0, 7};
  EXPECT_EQ(random_split(numbers, {4, 3})[1].size(), 3);
  EXPECT_EQ(random_split(numbers, std::vector<int64_t>{7, 0})[1].size(), 0);
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                random_split(numbers, {4, 2});
              }),
              HasSubstr("Sum of input lengths does not equal the length of the input dataset!"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                random_split(numbers, {8, -1});
              }),
              HasSubstr("a length is -1"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                random_split(numbers, {1.5, -0.5});
              }),
              HasSubstr("Fraction at index 0 is not between 0 and 1"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                random_split(numbers, {0.5, 0.4});
              }),
              HasSubstr("add up to 0.9"));
}

TEST(DefaultCollate, FollowsTheStructureOfASample) {
  const DefaultCollate collate;
  const auto numbers = collate(std::vector<int>{3, 4});
  EXPECT_TRUE(at::equal(numbers, torch::tensor({3, 4}, torch::kLong)));
  EXPECT_EQ(numbers.scalar_type(), at::kLong);
  EXPECT_EQ(collate(std::vector<double>{0.5}).scalar_type(), at::kDouble) << "as Python's float";
  EXPECT_EQ(collate(std::vector<float>{0.5F}).scalar_type(), at::kFloat);
  EXPECT_EQ(collate(std::vector<bool>{true, false}).scalar_type(), at::kBool);
  EXPECT_THAT(collate(std::vector<std::string>{"a", "b"}), ElementsAre("a", "b"));

  using Sample = std::map<std::string, std::tuple<at::Tensor, std::pair<int64_t, std::string>>>;
  const auto batch = collate(
      std::vector<Sample>{{{"x", {torch::zeros({2}), {1, "one"}}}}, {{"x", {torch::ones({2}), {2, "two"}}}}});
  const auto& [tensor, pair] = batch.at("x");
  EXPECT_TRUE(at::equal(tensor, torch::tensor({{0.F, 0.F}, {1.F, 1.F}})));
  EXPECT_TRUE(at::equal(pair.first, torch::tensor({1, 2}, torch::kLong)));
  EXPECT_THAT(pair.second, ElementsAre("one", "two"));

  const auto lists = collate(std::vector<std::vector<int64_t>>{{1, 2, 3}, {4, 5, 6}});
  ASSERT_EQ(lists.size(), 3U);
  EXPECT_TRUE(at::equal(lists[2], torch::tensor({3, 6}, torch::kLong)));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                collate(std::vector<std::vector<int64_t>>{{1}, {}});
              }),
              HasSubstr("each element in list of batch should be of equal size"));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                collate(std::vector<Sample>{{{"x", {}}}, {{"y", {}}}});
              }),
              HasSubstr("keys"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { collate(std::vector<int>{}); }), HasSubstr("no samples"));
}

TEST(DistributedEvalSampler, NeitherRepeatsNorDrops) {
  for (const int64_t size : {0, 1, 4, 5, 11}) {
    std::vector<int> seen(static_cast<size_t>(size));
    for (int64_t rank = 0; rank < 4; ++rank) {
      DistributedEvalSampler sampler(size, {.num_replicas = 4, .rank = rank});
      const auto indices = sampler.indices();
      EXPECT_EQ(static_cast<int64_t>(indices.size()), sampler.size());
      for (const int64_t index : indices) ++seen.at(static_cast<size_t>(index));
    }
    EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(size), 1));
  }
  EXPECT_THAT(DistributedEvalSampler(5, {.num_replicas = 4, .rank = 0}).indices(), ElementsAre(0, 4));
  EXPECT_THAT(DistributedEvalSampler(3, {.num_replicas = 4, .rank = 3}).indices(), IsEmpty());
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedEvalSampler(3, {.num_replicas = 4, .rank = 4}); }),
              HasSubstr("Invalid rank 4, rank should be in the interval [0, 3]"));
  EXPECT_THAT(message_of<c10::ValueError>([] { DistributedEvalSampler(-3, {.num_replicas = 4, .rank = 0}); }),
              HasSubstr("-3"));
}

TEST(RankShare, DividesOrRefuses) {
  const auto share =
      rank_share({.global_batch_size = 256, .global_num_workers = 8, .num_replicas = 4, .rank = 3});
  EXPECT_EQ(share.batch_size, 64);
  EXPECT_EQ(share.num_workers, 2);
  EXPECT_THAT(message_of<c10::ValueError>(
                  [] { rank_share({.global_batch_size = 10, .num_replicas = 4, .rank = 0}); }),
              HasSubstr("global_batch_size=10 can't be shared evenly by 4 ranks; take 8 or 12, or say with "
                        ".batch_rounding how to round"));
  EXPECT_THAT(message_of<c10::ValueError>([] {
                rank_share({.global_batch_size = 8, .global_num_workers = 3, .num_replicas = 4, .rank = 0});
              }),
              HasSubstr("global_num_workers=3 can't be shared evenly by 4 ranks; take 4, or say"));
}

TEST(RankShare, RoundsAsTold) {
  const auto shares = [](Rounding rounding, int64_t batch_size, int64_t workers) {
    std::vector<std::pair<int64_t, int>> answer;
    for (int64_t rank = 0; rank < 4; ++rank) {
      const auto share = rank_share({batch_size, workers, rounding, rounding, 4, rank});
      answer.emplace_back(share.batch_size, share.num_workers);
    }
    return answer;
  };
  using Pair = std::pair<int64_t, int>;
  EXPECT_THAT(shares(Rounding::kUneven, 10, 3), ElementsAre(Pair(3, 1), Pair(3, 1), Pair(2, 1), Pair(2, 0)));
  EXPECT_THAT(shares(Rounding::kDown, 10, 3), ElementsAre(Pair(2, 1), Pair(2, 1), Pair(2, 1), Pair(2, 1)));
  EXPECT_THAT(shares(Rounding::kUp, 10, 5), ElementsAre(Pair(3, 2), Pair(3, 2), Pair(3, 2), Pair(3, 2)));
  EXPECT_THAT(shares(Rounding::kUp, 8, 0), ElementsAre(Pair(2, 0), Pair(2, 0), Pair(2, 0), Pair(2, 0)));
  EXPECT_THAT(message_of<c10::ValueError>([&] { shares(Rounding::kDown, 3, 0); }),
              HasSubstr("leaves rank 0 of 4 without a sample"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { shares(Rounding::kUneven, 3, 0); }),
              HasSubstr("leaves rank 3 of 4"));
}

TEST(RankShare, RefusesWhatMakesNoSense) {
  clear_world_defaults();
  EXPECT_THAT(message_of<c10::ValueError>([] { rank_share({}); }), HasSubstr("init_process_group"));
  EXPECT_THAT(
      message_of<c10::ValueError>([] { rank_share({.global_batch_size = 0, .num_replicas = 1, .rank = 0}); }),
      HasSubstr("global_batch_size=0"));
  EXPECT_THAT(message_of<c10::ValueError>(
                  [] { rank_share({.global_num_workers = -1, .num_replicas = 1, .rank = 0}); }),
              HasSubstr("global_num_workers=-1"));
  set_world_defaults({.rank = 1, .world_size = 2});
  EXPECT_EQ(rank_share({.global_batch_size = 6}).batch_size, 3);
  clear_world_defaults();
}

}  // namespace
}  // namespace lockstep::data::datasets_test
