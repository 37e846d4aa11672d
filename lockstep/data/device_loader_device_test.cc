// That copies run beside the computation, and that memory is not read or used again too early.

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/device_loader.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::data::device_loader_device_test {
namespace {

using testing::current_stream;
using testing::enqueue;
using testing::Gate;
using testing::other_stream;
using testing::synchronize;
using testing::test_device;

constexpr int64_t kSamples = 10;

/// Sample i is a row of 4096 times the number i.
struct Rows {
  int64_t size() const { return kSamples; }
  at::Tensor get(int64_t index) const {
    TORCH_CHECK_VALUE(index != fails_at, "row ", index, " is torn");
    return torch::full({4096}, static_cast<float>(index));
  }
  int64_t fails_at = -1;
};

DataLoaderOptions pinned(int workers = 1) {
  return {.batch_size = 2, .num_workers = workers, .pin_memory = true};
}

float first(const at::Tensor& batch) {
  return batch[0][0].item<float>();
}

TEST(DeviceLoaderOnDevice, GivesWhatTheOtherLoaderHas) {
  for (const int prefetch : {0, 1, 3, 100}) {
    DataLoader host(Rows{}, pinned());
    DeviceLoader loader(host, test_device(), {.prefetch = prefetch});
    for (int epoch = 0; epoch < 2; ++epoch) {
      std::vector<at::Tensor> kept;
      for (const auto& batch : loader) {
        EXPECT_EQ(batch.device(), test_device());
        kept.push_back(batch);
      }
      ASSERT_EQ(kept.size(), 5U);
      for (size_t i = 0; i < kept.size(); ++i) {
        const auto rows = kept[i].cpu();
        EXPECT_TRUE(rows[0].eq(static_cast<float>(2 * i)).all().item<bool>()) << "batch " << i;
        EXPECT_TRUE(rows[1].eq(static_cast<float>(2 * i + 1)).all().item<bool>()) << "batch " << i;
      }
    }
  }
}

TEST(DeviceLoaderOnDevice, BatchesArePinnedForTheDevice) {
  test_device();
  DataLoader host(Rows{}, pinned(/*workers=*/2));
  for (const auto& batch : host) EXPECT_TRUE(batch.is_pinned());
}

TEST(DeviceLoaderOnDevice, CopiesDoNotWaitForTheComputation) {
  DataLoader host(Rows{}, pinned());
  DeviceLoader loader(host, test_device());
  auto batch = loader.begin();
  Gate gate;
  enqueue(current_stream(test_device()), [&] { gate.wait(); });  // the computation on the first batch
  {
    const c10::StreamGuard beside(other_stream(test_device()));
    ++batch;
    EXPECT_EQ(first(*batch), 2) << "it is there, while the computation still runs";
    ++batch;
    EXPECT_EQ(first(*batch), 4);
  }
  gate.open();
  synchronize(test_device());
}

/// Holds the copies of its second and later batches back.
struct HeldBack {
  at::Tensor rows;
  Gate* gate;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    const auto stream = current_stream(test_device());
    if (rows.is_cpu() && rows[0][0].item<float>() >= 2) enqueue(stream, [gate = gate] { gate->wait(); });
    visit(rows);
  }
  HeldBack pin_memory() const { return {rows.pin_memory(), gate}; }
};

TEST(DeviceLoaderOnDevice, TheUsersStreamWaitsForTheCopy) {
  Gate gate;
  const auto collate = [&gate](std::vector<at::Tensor> rows) { return HeldBack{at::stack(rows), &gate}; };
  DataLoader<Rows, decltype(collate)> host(Rows{}, pinned(), collate);
  DeviceLoader loader(host, test_device());
  auto batch = loader.begin();
  EXPECT_EQ(first(batch->rows), 0);
  ++batch;  // returns, though its copy is held back
  auto result = torch::zeros({2, 4096}).pin_memory();
  result.copy_(batch->rows, /*non_blocking=*/true);
  EXPECT_EQ(first(result), 0) << "its copy can't be there";
  gate.open();
  synchronize(test_device());
  EXPECT_EQ(first(result), 2);
}

TEST(DeviceLoaderOnDevice, MemoryIsNotReusedWhileItsUserReads) {
  DataLoader host(Rows{}, pinned());
  DeviceLoader loader(host, test_device());
  auto batch = loader.begin();
  auto result = torch::zeros({2, 4096}).pin_memory();
  Gate gate;
  enqueue(current_stream(test_device()), [&] { gate.wait(); });
  result.copy_(*batch, /*non_blocking=*/true);  // queued behind the gate
  {
    const c10::StreamGuard beside(other_stream(test_device()));
    for (int i = 0; i < 3; ++i) ++batch;  // the first batch's memory is free for others
  }
  gate.open();
  synchronize(test_device());
  EXPECT_TRUE(result[0].eq(0).all().item<bool>());
  EXPECT_TRUE(result[1].eq(1).all().item<bool>());
}

TEST(DeviceLoaderOnDevice, GoesOnWhereItsUserWas) {
  const auto options = [] {
    auto options = pinned();
    options.shuffle = true, options.seed = 3;
    return options;
  };
  std::vector<float> all;
  DataLoader plain(Rows{}, options());
  for (const auto& batch : plain) all.push_back(first(batch));
  for (const int prefetch : {1, 3}) {
    for (size_t seen = 1; seen <= all.size(); ++seen) {
      DataLoader host(Rows{}, options());
      DeviceLoader loader(host, test_device(), {.prefetch = prefetch});
      StateDict state;
      {
        auto batch = loader.begin();
        for (size_t i = 1; i < seen; ++i) ++batch;
      }
      state = loader.state_dict();  // the loop was left
      DataLoader other_host(Rows{}, options());
      DeviceLoader other(other_host, test_device(), {.prefetch = prefetch});
      other.load_state_dict(state);
      std::vector<float> rest;
      for (const auto& batch : other) rest.push_back(first(batch));
      EXPECT_EQ(rest, std::vector<float>(all.begin() + static_cast<int64_t>(seen), all.end()))
          << seen << " of " << all.size() << " seen, " << prefetch << " ahead";
    }
  }
}

TEST(DeviceLoaderOnDevice, AnErrorComesWithItsBatch) {
  DataLoader host(Rows{.fails_at = 5}, pinned());
  DeviceLoader loader(host, test_device());
  auto batch = loader.begin();
  ++batch;
  EXPECT_EQ(first(*batch), 2);
  EXPECT_THROW(++batch, c10::ValueError);
  ++batch;
  EXPECT_EQ(first(*batch), 6) << "the batch after the one that failed";
}

TEST(DeviceLoaderOnDevice, ABatchThatHadNoMemoryIsNotLost) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "the simulation's memory can be limited";
  for (const int prefetch : {0, 1, 3}) {
    DataLoader host(Rows{}, pinned());
    DeviceLoader loader(host, test_device(), {.prefetch = prefetch});
    auto batch = loader.begin();
    std::vector<at::Tensor> kept = {*batch};  // so that there is no memory for one more
    {
      const testing::simulated::MemoryLimit limit(test_device().index(), 0);
      const auto take_all = [&] {
        while (true) {
          ++batch;
          kept.push_back(*batch);
        }
      };
      EXPECT_THROW(take_all(), c10::OutOfMemoryError);
      EXPECT_EQ(kept.size(), 1 + static_cast<size_t>(prefetch)) << "what was fetched ahead is there";
      EXPECT_THROW(++batch, c10::OutOfMemoryError);
    }
    DataLoader other_host(Rows{}, pinned());
    DeviceLoader other(other_host, test_device());
    other.load_state_dict(loader.state_dict());
    EXPECT_EQ(first(*other.begin()), 2 * static_cast<float>(kept.size())) << "it counts as unseen";
    for (++batch; batch != std::default_sentinel; ++batch) kept.push_back(*batch);
    ASSERT_EQ(kept.size(), 5U);
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(first(kept[i]), 2 * static_cast<float>(i));
  }
}

TEST(DeviceLoaderOnDevice, FetchesLaterWhatHadNoMemoryAhead) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "the simulation's memory can be limited";
  DataLoader host(Rows{}, pinned());
  DeviceLoader loader(host, test_device());
  auto batch = loader.begin();
  std::vector<at::Tensor> kept = {*batch};
  {
    const testing::simulated::MemoryLimit limit(test_device().index(), 0);
    ++batch;  // the one after it finds no memory
  }
  EXPECT_EQ(first(*batch), 2);
  ++batch;
  EXPECT_EQ(first(*batch), 4);
}

/// A batch that says what it has, and one that is pinned as a whole.
struct Documents {
  std::vector<std::string> names;
  std::map<std::string, at::Tensor> tensors;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(names), visit(tensors);
  }
};
struct Counted {
  int pinned = 0;
};

}  // namespace
}  // namespace lockstep::data::device_loader_device_test

template <>
struct lockstep::data::PinMemory<lockstep::data::device_loader_device_test::Counted> {
  using Counted = device_loader_device_test::Counted;
  static Counted pin(Counted value) { return {value.pinned + 1}; }
};

namespace lockstep::data::device_loader_device_test {
namespace {

TEST(PinMemoryOnDevice, FindsTheTensorsOfABatch) {
  test_device();
  auto here = torch::ones({3});
  const auto [list, optionals, map, array, text, bits, pointer, documents, counted, two] =
      pin_memory(std::tuple(
          std::vector{here, at::Tensor(), here}, std::pair{std::optional{here}, std::optional<at::Tensor>()},
          std::map<int, Example>{{1, {here, {}}}}, std::array{std::pair{1, here}}, std::string("text"),
          std::vector<bool>{true, false}, &here, Documents{{"a"}, {{"b", here}}}, std::vector<Counted>(2),
          std::array<Counted, 2>()));
  EXPECT_TRUE(list[0].is_pinned() && !list[1].defined() && list[2].is_pinned());
  EXPECT_TRUE(optionals.first->is_pinned() && !optionals.second);
  EXPECT_TRUE(map.at(1).data.is_pinned() && !map.at(1).target.defined());
  EXPECT_TRUE(array[0].second.is_pinned());
  EXPECT_EQ(text, "text");
  EXPECT_EQ(bits, (std::vector<bool>{true, false}));
  EXPECT_TRUE(documents.tensors.at("b").is_pinned());
  EXPECT_EQ(counted[0].pinned + counted[1].pinned, 2);
  EXPECT_EQ(two[0].pinned + two[1].pinned, 2);
  EXPECT_TRUE(pointer == &here && !here.is_pinned());
}

}  // namespace
}  // namespace lockstep::data::device_loader_device_test
