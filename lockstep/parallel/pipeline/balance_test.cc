// balance_cost against all cuts there are, and the costs that layers are given.
#include <algorithm>
#include <chrono>
#include <gmock/gmock.h>
#include <limits>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/balance.h>
#include <lockstep/parallel/pipeline/testing/pipe_fixtures.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::balance_test {
namespace {

namespace nn = torch::nn;
using Balance = std::vector<int64_t>;
using testing::Calls;
using ::testing::HasSubstr;
using testing::message_of;

/// The largest block's cost, and the sum of squares of all.
std::pair<double, double> price(const std::vector<double>& costs, const Balance& balance) {
  std::pair<double, double> answer;
  auto next = costs.begin();
  for (const int64_t count : balance) {
    const double cost = std::accumulate(next, next + count, 0.0);
    next += count;
    answer.first = std::max(answer.first, cost);
    answer.second += cost * cost;
  }
  return answer;
}

/// The price of the best of all cuts into `blocks`.
std::pair<double, double> best_price(const std::vector<double>& costs, size_t blocks) {
  std::pair<double, double> best{std::numeric_limits<double>::infinity(), 0};
  for (unsigned cuts = 0; cuts < 1U << (costs.size() - 1); ++cuts) {  // bit i: a cut after layer i
    Balance balance{1};
    for (size_t i = 1; i < costs.size(); ++i) {
      if ((cuts >> (i - 1) & 1) != 0) balance.push_back(0);
      ++balance.back();
    }
    if (balance.size() == blocks) best = std::min(best, price(costs, balance));
  }
  return best;
}

TEST(BalanceCost, IsTheBestOfAllCuts) {
  std::mt19937 random_number(1);
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<double> costs(1 + random_number() % 9);
    for (auto& cost : costs) cost = static_cast<double>(random_number() % 12);  // whole, so sums are exact
    const auto blocks = 1 + random_number() % costs.size();
    const auto balance = balance_cost(costs, static_cast<int64_t>(blocks));
    SCOPED_TRACE(::testing::Message() << "trial " << trial << ": " << ::testing::PrintToString(costs)
                                      << " gives " << at::IntArrayRef(balance));
    ASSERT_EQ(balance.size(), blocks);
    ASSERT_EQ(std::accumulate(balance.begin(), balance.end(), int64_t{0}), costs.size());
    ASSERT_GE(*std::min_element(balance.begin(), balance.end()), 1);
    ASSERT_EQ(price(costs, balance), best_price(costs, blocks));
  }
}

TEST(BalanceCost, SplitsEqualLayersEvenly) {
  EXPECT_EQ(balance_cost(std::vector<double>(7, 1), 3), (Balance{3, 2, 2}));
  EXPECT_EQ(balance_cost({1, 2, 3, 4, 5, 6}, 2), (Balance{4, 2}));
}

TEST(BalanceCost, RefusesWhatCannotBeCut) {
  const auto text = [](const std::vector<double>& costs, int64_t partitions) {
    return message_of<c10::ValueError>([&] { balance_cost(costs, partitions); });
  };
  EXPECT_THAT(text({1, 2}, 3), HasSubstr("3 partitions of 2 layers"));
  EXPECT_THAT(text({1, 2}, 0), HasSubstr("0 partitions"));
  EXPECT_THAT(text({1, -2}, 1), HasSubstr("layer 1 costs -2"));
  EXPECT_THAT(text({std::numeric_limits<double>::infinity()}, 1), HasSubstr("layer 0 costs inf"));
}

TEST(BalanceByTime, PutsASlowLayerApartAndLeavesTheModuleAsItWas) {
  const Calls slow([](int) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
  nn::Sequential net{
      nn::Linear(3, 3), nn::ReLU(nn::ReLUOptions(true)), nn::BatchNorm1d(3), nn::Dropout(0.5), slow,
      nn::Tanh()};
  const auto buffers = testing::copies(net->buffers());
  torch::manual_seed(1);
  const auto expected = torch::rand({3});
  torch::manual_seed(1);
  const auto sample = torch::randn({4, 3}, at::make_generator<at::CPUGeneratorImpl>(1));
  EXPECT_EQ(balance_by_time(3, net, sample, {.timeout = {}}), (Balance{4, 1, 1}));
  EXPECT_EQ(slow->calls, 2);
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
  EXPECT_TRUE(testing::equal(net->buffers(), buffers));
  EXPECT_FALSE(net->parameters()[0].grad().defined());
  EXPECT_THAT(message_of<c10::ValueError>([&] { balance_by_time(7, net, sample); }),
              HasSubstr("7 partitions of 6 layers"));
}

TEST(BalanceBySize, LeavesTheSampleAsItWas) {
  nn::Sequential net{nn::ReLU(nn::ReLUOptions(true)), nn::BatchNorm1d(3)};
  const auto buffers = testing::copies(net->buffers());
  const auto sample = -torch::ones({4, 3});
  EXPECT_EQ(balance_by_size(2, net, sample), (Balance{1, 1}));
  EXPECT_TRUE(torch::equal(sample, -torch::ones({4, 3})));
  EXPECT_TRUE(testing::equal(net->buffers(), buffers));
}

TEST(BalanceBySize, CountsParametersAndOutputs) {
  // Bytes: 4 * (100 * 10 + 10) and an output of 4 * 10 a row, 4 * (10 * 100 + 100) and 4 * 100, 4 * 100 and 4
  // * 100.
  nn::Sequential net{nn::Linear(100, 10), nn::Linear(10, 100), nn::Tanh(), nn::Tanh()};
  const auto sample = torch::zeros({32, 100});
  EXPECT_EQ(balance_by_size(2, net, sample, {.chunks = 32, .param_scale = 1}), (Balance{1, 3}));
  // With 32 rows the outputs outweigh the parameters.
  EXPECT_EQ(balance_by_size(2, net, sample, {.chunks = 1, .param_scale = 1}), (Balance{2, 2}));
  EXPECT_THAT(message_of<c10::ValueError>([&] { balance_by_size(2, net, torch::tensor(1.0)); }),
              HasSubstr("no first dimension"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { balance_by_size(2, net, sample, {.chunks = 0}); }),
              HasSubstr("chunks is 0"));
}

}  // namespace
}  // namespace lockstep::balance_test
