#include <gmock/gmock.h>
#include <numeric>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/data/samplers/torch_sampler.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::torch_sampler_test {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

/// Sample i is the number i.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(size_t count) : count(count) {}
  torch::data::Example<> get(size_t index) override {
    return {torch::full({1}, static_cast<int64_t>(index)), torch::zeros({1})};
  }
  std::optional<size_t> size() const override { return count; }
  size_t count;
};

/// The samples of one epoch of a loader.
template <class Loader>
std::vector<int64_t> epoch_of(Loader& loader) {
  std::vector<int64_t> seen;
  for (auto& batch : loader) {
    for (const auto& example : batch) seen.push_back(example.data.template item<int64_t>());
  }
  return seen;
}

class TorchSamplerWorkers : public ::testing::TestWithParam<int> {};

TEST_P(TorchSamplerWorkers, ALoaderOfTwoRanksSeesEachSampleOncePerEpoch) {
  constexpr int64_t kSize = 22;
  std::vector<std::vector<int64_t>> orders;
  std::vector<DistributedSampler> samplers;
  for (int rank = 0; rank < 2; ++rank) samplers.emplace_back(kSize, 2, rank, /*shuffle=*/true, /*seed=*/3);
  const auto loader_over = [&](Sampler& sampler) {
    return torch::data::make_data_loader(Numbers(kSize), TorchSampler(sampler),
                                         torch::data::DataLoaderOptions().batch_size(4).workers(GetParam()));
  };
  auto first = loader_over(samplers[0]);
  auto second = loader_over(samplers[1]);
  for (int epoch = 0; epoch < 3; ++epoch) {
    samplers[0].set_epoch(epoch), samplers[1].set_epoch(epoch);
    auto seen = epoch_of(*first);
    EXPECT_EQ(seen, samplers[0].indices()) << "epoch " << epoch;
    const auto others = epoch_of(*second);
    EXPECT_EQ(others, samplers[1].indices());
    orders.push_back(seen);
    seen.insert(seen.end(), others.begin(), others.end());
    std::sort(seen.begin(), seen.end());
    std::vector<int64_t> all(kSize);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
  EXPECT_NE(orders[0], orders[1]);
}
INSTANTIATE_TEST_SUITE_P(, TorchSamplerWorkers, ::testing::Values(0, 2));

TEST(TorchSampler, HandsOutBatchesWithoutAReset) {
  TorchSampler sampler(std::make_shared<SequentialSampler>(5));
  EXPECT_THAT(*sampler.next(3), ::testing::ElementsAre(0, 1, 2));
  EXPECT_EQ(sampler.index(), 3U);
  EXPECT_THAT(*sampler.next(3), ::testing::ElementsAre(3, 4));
  EXPECT_EQ(sampler.next(3), std::nullopt);
  sampler.reset();
  EXPECT_THAT(*sampler.next(10), SizeIs(5));
  DistributedSampler none(0, 2, 0);
  EXPECT_EQ(TorchSampler(none).next(1), std::nullopt);
}

TEST(TorchSampler, ASavedEpochGoesOnInALoader) {
  DistributedSampler sampler(20, 2, 1);
  sampler.set_epoch(4);
  TorchSampler running(sampler);
  running.next(3);
  std::stringstream file;
  torch::serialize::OutputArchive out;
  running.save(out);
  out.save_to(file);

  DistributedSampler later(20, 2, 1);
  TorchSampler loaded(later);
  torch::serialize::InputArchive in;
  in.load_from(file);
  loaded.load(in);
  EXPECT_EQ(loaded.index(), 3U);
  later.set_epoch(5);
  auto loader = torch::data::make_data_loader(Numbers(20), loaded, 4);
  const auto order = sampler.indices();
  EXPECT_EQ(epoch_of(*loader), std::vector<int64_t>(order.begin() + 3, order.end()));
  EXPECT_EQ(epoch_of(*loader), later.indices());
  EXPECT_THAT(*running.next(1), ::testing::ElementsAre(order[3])) << "saving changes nothing";
}

TEST(TorchSampler, SavedBeforeItsFirstEpochItBeginsOne) {
  DistributedSampler sampler(6, 2, 0);
  std::stringstream file;
  torch::save(TorchSampler(sampler), file);
  TorchSampler loaded(sampler);
  torch::load(loaded, file);
  EXPECT_THAT(*loaded.next(5), SizeIs(3));
}

TEST(TorchSampler, RefusesWhatItCannotDo) {
  DistributedSampler sampler(20, 2, 1);
  TorchSampler adapted(sampler);
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { adapted.reset(7); }), HasSubstr("size 7"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([&] { adapted.next(0); }), HasSubstr("batch_size is 0"));
  EXPECT_THAT(testing::message_of<c10::ValueError>([] { TorchSampler(std::shared_ptr<Sampler>()); }),
              HasSubstr("null"));
}

}  // namespace
}  // namespace lockstep::data::torch_sampler_test
