// A loader that is saved in the middle and goes on in another one.
#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <memory>

#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::data_loader_state_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

/// Sample i is (i, a random number for it).
struct Augmented {
  int64_t size() const { return count; }
  std::pair<int64_t, double> get(int64_t i) const {
    return {i, at::rand({}, sample_generator(), at::kDouble).item<double>()};
  }
  int64_t count = 0;
};
using Sample = std::pair<int64_t, double>;

/// Keeps samples as they are.
struct Keep {
  std::vector<Sample> operator()(std::vector<Sample> samples) const { return samples; }
};
using Loader = DataLoader<Augmented, Keep>;

/// Samples of at most `most` batches of an epoch.
std::vector<Sample> samples(Loader& loader, int64_t most = 1 << 20) {
  std::vector<Sample> seen;
  for (const auto& batch : loader) {
    seen.insert(seen.end(), batch.begin(), batch.end());
    if (--most == 0) break;
  }
  return seen;
}

/// As a checkpoint does: through bytes.
StateDict through_file(const StateDict& state) {
  const auto bytes = torch::pickle_save(to_object(state));
  return from_object<StateDict>(torch::pickle_load(bytes));
}

/// A loader's order, in different ways; each is made in the same way again.
struct Order {
  const char* name;
  std::function<std::shared_ptr<Sampler>()> make;  // none: the loader's own
  bool shuffle = false;
  std::optional<int64_t> seed = std::nullopt;
};

std::vector<Order> orders() {
  const auto generator = [] { return internal::make_generator(11); };
  return {
      {"sequential", nullptr},
      {"shuffled with a seed", nullptr, true, 5},
      {"shuffled by the default generator", nullptr, true},
      {"random", [=] { return std::make_shared<RandomSampler>(50, generator()); }},
      {"random with replacement",
       [=] {
         return std::make_shared<RandomSampler>(
             50, RandomSamplerOptions{.replacement = true, .num_samples = 70, .generator = generator()});
       }},
      {"random subset of the default generator",
       [] {
         return std::make_shared<SubsetRandomSampler>(std::vector<int64_t>{1, 3, 5, 7, 9, 11, 13, 15, 17});
       }},
      {"weighted",
       [=] {
         return std::make_shared<WeightedRandomSampler>(std::vector<double>(50, 0.5), 30, false, generator());
       }},
      {"distributed", [] { return std::make_shared<DistributedSampler>(50, 3, 1); }},
  };
}

TEST(DataLoaderState, TheRestOfAnEpochIsSeenOnceInTheSameOrderWithAnyNumberOfWorkers) {
  for (const auto& order : orders()) {
    for (const auto& [workers, later_workers, later_batch_size] :
         {std::tuple(0, 0, 4), std::tuple(0, 3, 4), std::tuple(2, 0, 4), std::tuple(3, 2, 5)}) {
      for (const int64_t stop : {1, 2, 1000}) {
        SCOPED_TRACE(std::string(order.name) + ", stopped after " + std::to_string(stop) + " batches");
        const auto options = [&](const std::shared_ptr<Sampler>& sampler, int threads, int64_t batch_size) {
          return DataLoaderOptions{.batch_size = batch_size,
                                   .sampler = sampler.get(),
                                   .shuffle = order.shuffle,
                                   .num_workers = threads,
                                   .seed = order.seed};
        };
        at::manual_seed(23);
        const auto sampler = order.make ? order.make() : nullptr;
        Loader loader(Augmented{50}, options(sampler, workers, 4));
        samples(loader, 1000);  // an epoch before
        // The same twice: once to the end, once with a stop.
        const auto at_start = at::detail::getDefaultCPUGenerator().get_state();
        const auto epoch_state = loader.state_dict();
        const auto whole = samples(loader);
        const auto next_epoch = samples(loader);

        auto generator = at::detail::getDefaultCPUGenerator();
        generator.set_state(at_start);
        const auto again_sampler = order.make ? order.make() : nullptr;
        Loader again(Augmented{50}, options(again_sampler, workers, 4));
        again.load_state_dict(epoch_state);
        auto seen = samples(again, stop);
        const auto state = through_file(again.state_dict());
        const auto random_state = generator.get_state();

        at::rand({1000});
        const auto later_sampler = order.make ? order.make() : nullptr;
        Loader later(Augmented{50}, options(later_sampler, later_workers, later_batch_size));
        later.load_state_dict(state);
        generator.set_state(random_state);  // as the program's checkpoint does
        // Saved and loaded once more before it goes on.
        later.load_state_dict(through_file(later.state_dict()));
        if (stop < 1000) {
          const auto rest = samples(later);
          EXPECT_EQ(rest.size() + seen.size(), whole.size());
          seen.insert(seen.end(), rest.begin(), rest.end());
        }
        EXPECT_EQ(seen, whole);
        EXPECT_EQ(samples(later), next_epoch);
      }
    }
  }
}

TEST(DataLoaderState, WhatWorkersHaveReadyDoesNotCount) {
  Loader loader(Augmented{100}, {.batch_size = 2, .num_workers = 3, .prefetch_factor = 4});
  auto iterator = loader.begin();
  ++iterator;
  const auto state = loader.state_dict();
  EXPECT_EQ(state.at("samples").toInt(), 4);
  EXPECT_EQ(state.at("batches").toInt(), 2);
  Loader later(Augmented{100}, {.batch_size = 2});
  later.load_state_dict(state);
  EXPECT_EQ(samples(later).front().first, 4);
}

TEST(DataLoaderState, SavedInTheLastBatchTheEpochGoesOnWithNone) {
  Loader loader(Augmented{6}, {.batch_size = 2});
  auto iterator = loader.begin();
  ++iterator, ++iterator;
  Loader later(Augmented{6}, {.batch_size = 2});
  later.load_state_dict(loader.state_dict());
  EXPECT_THAT(samples(later), IsEmpty());
  EXPECT_EQ(samples(later).size(), 6U);
}

TEST(DataLoaderState, ABatchSamplersEpochGoesOn) {
  for (const int workers : {0, 2}) {
    SequentialSampler order(7);
    BatchSampler sampler(order, 3, false);
    Loader loader(Augmented{7}, {.batch_sampler = &sampler});
    auto iterator = loader.begin();
    Loader later(Augmented{7}, {.batch_sampler = &sampler, .num_workers = workers});
    later.load_state_dict(loader.state_dict());
    const auto rest = samples(later);
    ASSERT_EQ(rest.size(), 4U);
    EXPECT_EQ(rest[0].first, 3);
    EXPECT_EQ(rest[3].first, 6);
  }
}

TEST(DataLoaderState, AnotherOrderIsRefused) {
  DistributedSampler sampler(50, 2, 0);
  Loader loader(Augmented{50}, {.batch_size = 4, .sampler = &sampler});
  sampler.set_epoch(3);
  auto iterator = loader.begin();
  const auto state = loader.state_dict();
  const auto resume_with = [&](DistributedSampler other) {
    Loader later(Augmented{50}, {.batch_size = 4, .sampler = &other});
    later.load_state_dict(state);
    EXPECT_EQ(other.epoch(), 3) << "the sampler's state comes along";
    samples(later);
  };
  resume_with(DistributedSampler(50, 2, 0));
  for (const auto& other :
       {DistributedSampler(50, 2, 1), DistributedSampler(50, 3, 0), DistributedSampler(50, 2, 0, true, 9)}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { resume_with(other); }),
                AllOf(HasSubstr("another order than that of the epoch which was saved"),
                      HasSubstr("number of ranks")));
  }
  Loader moved_on(Augmented{50}, {.batch_size = 4, .sampler = &sampler});
  moved_on.load_state_dict(state);
  sampler.set_epoch(4);
  EXPECT_THAT(message_of<c10::ValueError>([&] { samples(moved_on); }), HasSubstr("set_epoch"));
}

TEST(DataLoaderState, BatchesThatWereNotUsedComeAgain) {
  for (const int workers : {0, 2}) {
    for (const int64_t taken : {1, 3, 5}) {  // 5: all of them, and then the end
      DistributedSampler sampler(18, 1, 0);
      Loader loader(Augmented{18}, {.batch_size = 4, .sampler = &sampler, .num_workers = workers, .seed = 5});
      std::vector<Sample> all;
      int64_t batches = 0;
      StateDict state;
      for (const auto& batch : loader) {
        all.insert(all.end(), batch.begin(), batch.end());
        if (++batches != taken) continue;
        state = through_file(loader.state_dict(/*unseen_batches=*/1));
      }
      if (taken == 5) state = through_file(loader.state_dict(1));
      Loader other(Augmented{18}, {.batch_size = 4, .sampler = &sampler, .num_workers = workers, .seed = 5});
      other.load_state_dict(state);
      const auto rest = samples(other);
      const auto first = static_cast<size_t>(4 * (taken - 1));
      EXPECT_EQ(rest, std::vector<Sample>(all.begin() + static_cast<int64_t>(first), all.end()))
          << taken << " batches taken, " << workers << " workers";
    }
  }
  Loader loader(Augmented{8}, {.batch_size = 4});
  samples(loader);
  EXPECT_THAT(message_of<c10::ValueError>([&] { loader.state_dict(3); }),
              HasSubstr("3 batches are to come again, but 2 have been given"));
}

TEST(DataLoaderState, AnotherNumberOfRanksGoesOnWithWhatNoRankHasSeen) {
  for (const int64_t after : {2, 3, 4}) {
    std::vector<int64_t> seen;
    for (int64_t rank = 0; rank < 3; ++rank) {  // three ranks see two batches of 4 each
      DistributedSampler sampler(59, 3, rank);
      Loader loader(Augmented{59}, {.batch_size = 4, .sampler = &sampler});
      loader.set_epoch(7);
      for (const auto& [index, unused] : samples(loader, 2)) seen.push_back(index);
    }
    for (int64_t rank = 0; rank < after; ++rank) {
      DistributedSampler sampler(59, {.num_replicas = after, .rank = rank, .drop_last = true});
      Loader loader(Augmented{59}, {.batch_size = 4, .sampler = &sampler});
      loader.set_epoch(7);
      ASSERT_TRUE(loader.start_at(24));
      EXPECT_EQ(sampler.size(), (59 - 24) / after);
      // Saved in the rest, it goes on in the rest.
      const auto some = samples(loader, 1);
      DistributedSampler same(59, {.num_replicas = after, .rank = rank, .drop_last = true});
      Loader other(Augmented{59}, {.batch_size = 4, .sampler = &same});
      other.load_state_dict(through_file(loader.state_dict()));
      for (const auto& part : {some, samples(other)}) {
        for (const auto& [index, unused] : part) seen.push_back(index);
      }
      other.set_epoch(8);
      EXPECT_EQ(samples(other).size(), static_cast<size_t>(59 / after)) << "the next epoch is whole";
    }
    const auto all = seen.size();
    std::sort(seen.begin(), seen.end());
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    EXPECT_EQ(seen.size(), all) << "no sample comes twice";
    EXPECT_EQ(all, static_cast<size_t>(24 + 35 / after * after));
  }
}

TEST(DataLoaderState, WithTheSameRanksTheRestIsWhatTheWholeEpochEndsWith) {
  for (int64_t rank = 0; rank < 3; ++rank) {  // with padding
    DistributedSampler whole(20, 3, rank), rest(20, 3, rank);
    const auto all = whole.indices();
    rest.start_at(6);
    EXPECT_EQ(rest.indices(), std::vector<int64_t>(all.begin() + 2, all.end()));
    rest.start_at(20);
    EXPECT_THAT(rest.indices(), IsEmpty());
    EXPECT_EQ(rest.indices(), all);
  }
  Loader sequential(Augmented{5});
  EXPECT_FALSE(sequential.start_at(2));
  DistributedSampler sampler(5, 1, 0);
  EXPECT_THAT(message_of<c10::ValueError>([&] { sampler.start_at(-1); }), HasSubstr("the position is -1"));
}

TEST(DataLoaderState, RefusesWhatNoLoaderHasSaved) {
  Loader loader(Augmented{50});
  EXPECT_THAT(message_of<c10::ValueError>([&] { loader.load_state_dict({}); }),
              HasSubstr("DataLoader::load_state_dict: the state has no 'epoch_under_way'"));
  auto iterator = loader.begin();
  auto state = loader.state_dict();
  state["samples"] = -1;
  EXPECT_THAT(message_of<c10::ValueError>([&] { loader.load_state_dict(state); }),
              HasSubstr("-1 samples in 1 batches"));
  RandomSampler sampler(5, internal::make_generator(1));
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                sampler.load_state_dict({{"generator", at::zeros({3}, at::kByte)}});
              }),
              HasSubstr("RandomSampler::load_state_dict: 'generator' is not the state of a CPU generator"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { sampler.load_state_dict({}); }), HasSubstr("no 'generator'"));
  EXPECT_EQ(samples(loader).size(), 50U) << "a refused state changes nothing";
}

}  // namespace
}  // namespace lockstep::data::data_loader_state_test
