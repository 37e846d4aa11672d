#include <map>
#include <tuple>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/device_loader.h>

namespace lockstep::data::device_loader_test {
namespace {

/// Sample i is the number i.
struct Numbers {
  int64_t size() const { return count; }
  at::Tensor get(int64_t index) const { return at::full({}, index, at::kLong); }
  int64_t count = 10;
};

template <class Loader>
std::vector<int64_t> first_numbers(Loader& loader) {
  std::vector<int64_t> numbers;
  for (auto& batch : loader) numbers.push_back(batch[0].template item<int64_t>());
  return numbers;
}

TEST(DeviceLoader, OnTheCpuBatchesPassThrough) {
  DataLoader host(Numbers{}, {.batch_size = 4});
  DeviceLoader loader(host, at::kCPU);
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(first_numbers(loader), (std::vector<int64_t>{0, 4, 8}));
  EXPECT_EQ(first_numbers(loader), (std::vector<int64_t>{0, 4, 8})) << "the next epoch";
  auto iterator = loader.begin();
  EXPECT_EQ(loader.state_dict().at("batches"), 1) << "nothing is fetched ahead";
  EXPECT_EQ(loader.state_dict(1).at("batches"), 0);
}

TEST(DeviceLoader, ItsStateIsTheOtherLoaders) {
  DataLoader host(Numbers{}, {.batch_size = 4, .shuffle = true, .seed = 3});
  DeviceLoader loader(host, at::kCPU);
  const auto all = [&] {
    DataLoader other(Numbers{}, {.batch_size = 4, .shuffle = true, .seed = 3});
    return first_numbers(other);
  }();
  auto iterator = loader.begin();
  ++iterator;
  DataLoader other_host(Numbers{}, {.batch_size = 4, .shuffle = true, .seed = 3});
  DeviceLoader other(other_host, at::kCPU);
  other.load_state_dict(loader.state_dict());
  EXPECT_EQ(first_numbers(other), (std::vector<int64_t>{all[2]}));
}

TEST(DeviceLoader, ANegativePrefetchIsRefused) {
  DataLoader host(Numbers{});
  EXPECT_THROW(DeviceLoader(host, at::kCPU, {.prefetch = -1}), c10::ValueError);
}

TEST(DataLoaderState, AnEndThatWasNotSeenComesAgain) {
  DataLoader loader(Numbers{}, {.batch_size = 4});
  first_numbers(loader);
  DataLoader over(Numbers{}, {.batch_size = 4}), at_the_end(Numbers{}, {.batch_size = 4});
  over.load_state_dict(loader.state_dict());
  EXPECT_EQ(first_numbers(over).size(), 3U) << "a new epoch";
  at_the_end.load_state_dict(loader.state_dict(0, /*end_unseen=*/true));
  EXPECT_EQ(first_numbers(at_the_end).size(), 0U) << "the end of the old one";
  EXPECT_EQ(first_numbers(at_the_end).size(), 3U);
}

struct Documents {
  std::vector<std::string> names;
  std::map<std::string, at::Tensor> tensors;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(tensors);
  }
};

TEST(ToDevice, FindsTheTensorsOfABatch) {
  // The device meta needs no hardware, and has no elements to copy.
  const auto here = at::arange(3);
  const auto moved =
      to_device(std::tuple(here, std::vector{here, here}, std::optional<at::Tensor>{}, std::optional{here},
                           std::array{std::pair{1, here}}, Example{here, {}}, std::string("text"), 5),
                at::kMeta);
  EXPECT_TRUE(std::get<0>(moved).is_meta());
  for (const auto& each : std::get<1>(moved)) EXPECT_TRUE(each.is_meta());
  EXPECT_FALSE(std::get<2>(moved));
  EXPECT_TRUE(std::get<3>(moved)->is_meta());
  EXPECT_TRUE(std::get<4>(moved)[0].second.is_meta());
  EXPECT_TRUE(std::get<5>(moved).data.is_meta());
  EXPECT_FALSE(std::get<5>(moved).target.defined());
  const auto documents = to_device(Documents{{"a"}, {{"b", here}}}, at::kMeta);
  EXPECT_TRUE(documents.tensors.at("b").is_meta());
  EXPECT_FALSE(here.is_meta());
}

}  // namespace
}  // namespace lockstep::data::device_loader_test
