#include <atomic>
#include <numeric>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/world_defaults.h>
#include <lockstep/data/data_loader.h>

namespace lockstep::data::iterable_dataset_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Numbers = std::vector<int64_t>;

/// 0 … count - 1, one after the other.
struct Counting {
  struct Stream {
    std::optional<int64_t> next() {
      TORCH_CHECK_VALUE(at != fails_at, "line ", at, " is torn");
      return at < count ? std::optional(at++) : std::nullopt;
    }
    int64_t count;
    int64_t fails_at;
    int64_t at = 0;
  };
  Stream stream() const { return {count, fails_at}; }
  int64_t count = 0;
  int64_t fails_at = -1;
};
static_assert(IterableDataset<Counting>);

/// The same, and it can skip.
struct Skipping {
  struct Stream {
    std::optional<int64_t> next() {
      ++*reads;
      return at < 100 ? std::optional(at++) : std::nullopt;
    }
    void skip(int64_t count) { at += count; }
    std::atomic<int>* reads;
    int64_t at = 0;
  };
  Stream stream() const { return {reads}; }
  int64_t size() const { return 100; }
  std::atomic<int>* reads;
};

const auto kKeep = [](Numbers samples) { return samples; };

Numbers count_to(int64_t count) {
  Numbers numbers(static_cast<size_t>(count));
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

template <class Loader>
std::vector<Numbers> epoch(Loader& loader) {
  std::vector<Numbers> batches;
  for (auto& batch : loader) batches.push_back(batch);
  return batches;
}

Numbers joined(const std::vector<Numbers>& batches) {
  Numbers all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

TEST(IterableDataset, BatchesComeInTheStreamsOrderForAnyNumberOfWorkers) {
  for (const int64_t count : {0, 1, 7, 8, 100}) {
    for (const bool drop_last : {false, true}) {
      DataLoader alone(Counting{count}, {.batch_size = 4, .drop_last = drop_last}, kKeep);
      const auto batches = epoch(alone);
      EXPECT_EQ(joined(batches), count_to(drop_last ? count / 4 * 4 : count));
      for (const int workers : {1, 2, 5}) {
        DataLoader loader(Counting{count}, {.batch_size = 4, .num_workers = workers, .drop_last = drop_last},
                          kKeep);
        EXPECT_EQ(epoch(loader), batches);
        EXPECT_EQ(epoch(loader), batches) << "each epoch begins anew";
      }
    }
  }
}

TEST(IterableDataset, TheDefaultCollateFunctionServesToo) {
  DataLoader loader(Counting{5}, {.batch_size = 3, .num_workers = 2});
  std::vector<int64_t> sums;
  for (const auto& batch : loader) sums.push_back(batch.sum().item<int64_t>());
  EXPECT_THAT(sums, ElementsAre(0 + 1 + 2, 3 + 4));
}

TEST(IterableDataset, LeavingEarlyAndPersistentWorkers) {
  DataLoader loader(Counting{5000}, {.batch_size = 4, .num_workers = 3, .persistent_workers = true}, kKeep);
  for (int time = 0; time < 20; ++time) {
    int64_t batches = 0;
    for (const auto& batch : loader) {
      EXPECT_EQ(batch[0], 4 * batches);
      if (++batches == time) break;
    }
  }
}

TEST(IterableDataset, ErrorsNameTheSample) {
  for (const int workers : {0, 1, 3}) {
    DataLoader torn(Counting{20, 9}, {.batch_size = 4, .num_workers = workers}, kKeep);
    Numbers seen;
    try {
      for (const auto& batch : torn) seen.push_back(batch[0]);
      ADD_FAILURE() << "line 9 is torn";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("line 9 is torn"),
                        HasSubstr("while loading batch 2 of the epoch, sample 9 of the stream")));
    }
    EXPECT_THAT(seen, ElementsAre(0, 4));
    DataLoader collating(Counting{20}, {.batch_size = 4, .num_workers = workers}, [](const Numbers& samples) {
      TORCH_CHECK_VALUE(samples[0] != 8, "no token");
      return samples;
    });
    try {
      epoch(collating);
      ADD_FAILURE() << "8 is no token";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("no token"), HasSubstr("batch 2 of the epoch, samples 8 to 11")));
    }
  }
}

TEST(IterableDataset, AnErrorOfTheCollateFunctionCostsItsBatchAndOneOfTheStreamTheRest) {
  for (const int workers : {0, 1, 3}) {
    const DataLoaderOptions options = {.batch_size = 4, .num_workers = workers};
    DataLoader collating(Counting{19}, options, [](const Numbers& samples) {
      TORCH_CHECK_VALUE(samples[0] != 8 && samples[0] != 16, "no token");
      return samples;
    });
    auto iterator = collating.begin();
    ++iterator;
    EXPECT_THROW(++iterator, c10::ValueError);
    ++iterator;
    EXPECT_THAT(*iterator, ElementsAre(12, 13, 14, 15));
    DataLoader later(Counting{19}, options, kKeep);
    later.load_state_dict(collating.state_dict());
    EXPECT_THAT(epoch(later), ElementsAre(Numbers{16, 17, 18}));
    EXPECT_THROW(++iterator, c10::ValueError);
    ++iterator;
    EXPECT_TRUE(iterator == collating.end());
    EXPECT_TRUE(collating.state_dict().at("epoch_finished").toBool());

    DataLoader torn(Counting{20, 9}, options, kKeep);
    auto of_torn = torn.begin();
    ++of_torn;
    EXPECT_THROW(++of_torn, c10::ValueError);
    ++of_torn;
    EXPECT_TRUE(of_torn == torn.end());
    EXPECT_FALSE(torn.state_dict().at("epoch_finished").toBool()) << "a state has the rest to come";
  }
}

TEST(IterableDataset, RanksShareItWithoutOverlapOrLoss) {
  for (const int64_t count : {0, 1, 5, 6, 7, 100}) {
    for (const int64_t ranks : {1, 2, 3, 7}) {
      std::vector<int> seen(static_cast<size_t>(count));
      for (int64_t rank = 0; rank < ranks; ++rank) {
        DataLoader loader(DistributedStream(Counting{count}, {.num_replicas = ranks, .rank = rank}),
                          {.batch_size = 2, .num_workers = static_cast<int>(rank)}, kKeep);
        const auto mine = joined(epoch(loader));
        for (size_t i = 0; i < mine.size(); ++i) {
          EXPECT_EQ(mine[i], rank + static_cast<int64_t>(i) * ranks);
          ++seen.at(static_cast<size_t>(mine[i]));
        }
        DataLoader even(
            DistributedStream(Counting{count}, {.num_replicas = ranks, .rank = rank, .drop_last = true}),
            {.batch_size = 2}, kKeep);
        EXPECT_EQ(static_cast<int64_t>(joined(epoch(even)).size()), count / ranks)
            << "all ranks get equally many";
      }
      EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(count), 1));
    }
  }
}

TEST(IterableDataset, RanksAreThoseOfTheDefaultGroup) {
  const Counting numbers{10};
  clear_world_defaults();
  EXPECT_THROW(DistributedStream{numbers}, c10::ValueError);
  set_world_defaults({.rank = 1, .world_size = 4});
  DataLoader loader(DistributedStream{numbers}, {.batch_size = 9}, kKeep);
  clear_world_defaults();
  EXPECT_THAT(epoch(loader), ElementsAre(Numbers{1, 5, 9}));
}

TEST(IterableDataset, AnEpochGoesOnWithAnyNumberOfWorkers) {
  for (const auto& [workers, later_workers] : {std::pair(0, 2), std::pair(3, 0), std::pair(2, 4)}) {
    const auto share = DistributedStream(Counting{50}, {.num_replicas = 2, .rank = 1});
    DataLoader loader(share, {.batch_size = 4, .num_workers = workers}, kKeep);
    auto iterator = loader.begin();
    ++iterator;
    DataLoader later(share, {.batch_size = 3, .num_workers = later_workers}, kKeep);
    later.load_state_dict(loader.state_dict());
    Numbers expected;
    for (int64_t number = 17; number < 50; number += 2) expected.push_back(number);
    EXPECT_EQ(joined(epoch(later)), expected);
    EXPECT_EQ(joined(epoch(later)).size(), 25U) << "and then a new one";
  }
}

TEST(IterableDataset, SeedsOfSamplesFollowTheirPosition) {
  const auto draw = [](int workers, int64_t batch_size) {
    DataLoader loader(Counting{20}, {.batch_size = batch_size, .num_workers = workers, .seed = 4},
                      [](const Numbers& samples) {
                        Numbers seeds;
                        for (size_t i = 0; i < samples.size(); ++i) {
                          seeds.push_back(static_cast<int64_t>(sample_seed(static_cast<int64_t>(i))));
                        }
                        return seeds;
                      });
    return joined(epoch(loader));
  };
  EXPECT_EQ(draw(0, 4), draw(3, 7));
}

TEST(IterableDataset, WhatCanSkipIsNotRead) {
  std::atomic<int> reads{0};
  DataLoader loader(Skipping{&reads}, {.batch_size = 10}, kKeep);
  EXPECT_EQ(loader.size(), 10);
  auto iterator = loader.begin();
  for (int i = 0; i < 7; ++i) ++iterator;
  const auto state = loader.state_dict();
  reads = 0;
  DataLoader later(Skipping{&reads}, {.batch_size = 10}, kKeep);
  later.load_state_dict(state);
  EXPECT_EQ(joined(epoch(later)).front(), 80);
  EXPECT_EQ(reads, 20 + 1);
}

TEST(IterableDataset, AreChained) {
  DataLoader loader(ChainDataset(std::vector<Counting>{{3}, {0}, {2}}), {.batch_size = 2, .num_workers = 2},
                    kKeep);
  EXPECT_THAT(epoch(loader), ElementsAre(Numbers{0, 1}, Numbers{2, 0}, Numbers{1}));
  DataLoader none(ChainDataset(std::vector<Counting>{}), {}, kKeep);
  EXPECT_THAT(epoch(none), IsEmpty());
}

TEST(IterableDataset, HasNoOrderToChoose) {
  SequentialSampler sampler(5);
  BatchSampler batches(sampler, 2, false);
  for (const DataLoaderOptions& options :
       {DataLoaderOptions{.sampler = &sampler}, DataLoaderOptions{.batch_sampler = &batches},
        DataLoaderOptions{.shuffle = true}}) {
    EXPECT_THROW(DataLoader(Counting{5}, options, kKeep), c10::ValueError);
  }
}

}  // namespace
}  // namespace lockstep::data::iterable_dataset_test
