// What only background threads do: their number, seeds, lives and failures.
#include <algorithm>
#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <set>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::data_loader_workers_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;

using Indices = std::vector<int64_t>;

/// A data set whose batches are what `make` makes of their indices.
template <class Make>
struct Batches {
  int64_t size() const { return count; }
  auto get_batch(std::span<const int64_t> indices) const { return make(indices); }
  int64_t count;
  Make make;
};
template <class Make>
Batches(int64_t, Make) -> Batches<Make>;

const auto kIndices = [](std::span<const int64_t> indices) {
  return Indices(indices.begin(), indices.end());
};

template <class Loader>
auto epoch(Loader& loader) {
  std::vector<typename Loader::Batch> batches;
  for (auto& batch : loader) batches.push_back(batch);
  return batches;
}

/// Runs `action` in a child, which has none of this process's threads, and is ended should it wait for one.
void expect_ends_in_forked_child(const std::function<void()>& action) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(30);
    action();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(DataLoaderWorkers, AreNotWaitedForInAForkedChild) {
  const Batches dataset{64, kIndices};
  for (const bool persistent : {true, false}) {
    auto loader = std::make_unique<DataLoader<std::decay_t<decltype(dataset)>>>(
        dataset, DataLoaderOptions{.batch_size = 1, .num_workers = 2, .persistent_workers = persistent});
    EXPECT_EQ(epoch(*loader).size(), 64u);
    expect_ends_in_forked_child([&] { loader.reset(); });  // its workers rest
    auto iterator = std::make_unique<decltype(loader->begin())>(loader->begin());
    expect_ends_in_forked_child([&] {  // they are ahead as far as they may
      iterator.reset();
      loader.reset();
    });
    EXPECT_EQ(**iterator, Indices{0});
    iterator.reset();
    EXPECT_EQ(epoch(*loader).size(), 64u);
  }
}

TEST(DataLoaderWorkers, MakeBatchesAtTheSameTime) {
  constexpr int kWorkers = 4;
  std::atomic<int> inside{0};
  std::promise<void> all;
  const auto together = all.get_future().share();
  DataLoader loader(
      Batches{8,
              [&](auto indices) {
                if (++inside == kWorkers) all.set_value();
                together.wait();  // if they don't work at the same time, the test's time runs out
                return indices[0];
              }},
      {.num_workers = kWorkers, .prefetch_factor = 1});
  EXPECT_THAT(epoch(loader), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(DataLoaderWorkers, KeepTheOrderWhenLaterBatchesAreReadyEarlier) {
  std::promise<void> second_made;
  const auto later = second_made.get_future().share();
  DataLoader loader(Batches{4,
                            [&](auto indices) {
                              if (indices[0] == 0) later.wait();
                              if (indices[0] == 1) second_made.set_value();
                              return indices[0];
                            }},
                    {.num_workers = 2});
  EXPECT_THAT(epoch(loader), ElementsAre(0, 1, 2, 3));
}

TEST(DataLoaderWorkers, GoAheadByThePrefetchFactorEach) {
  constexpr int kWorkers = 3;
  constexpr int kPrefetch = 2;
  std::atomic<int> made{0};
  std::atomic<int> in_hand{0};
  std::atomic<bool> too_far{false};
  std::promise<void> reached;
  DataLoader loader(Batches{60,
                            [&](auto) {
                              const int now = ++made;
                              if (now == 1 + kWorkers * kPrefetch) reached.set_value();
                              if (now > in_hand + 1 + kWorkers * kPrefetch) too_far = true;
                              return now;
                            }},
                    {.num_workers = kWorkers, .prefetch_factor = kPrefetch});
  auto iterator = loader.begin();
  reached.get_future().wait();  // none is asked for, and yet they are made
  for (; iterator != loader.end(); ++iterator) ++in_hand;
  EXPECT_EQ(made, 60);
  EXPECT_FALSE(too_far);
}

TEST(DataLoaderWorkers, KnowWhoTheyAreAndAreSeededAsInPython) {
  // What a worker draws from its generator is the same in each run with as many workers.
  const auto draw = [](int workers) {
    DataLoader loader(Batches{12,
                              [](auto) {
                                const WorkerInfo& info = *get_worker_info();
                                return std::tuple(info.id, info.num_workers, info.seed,
                                                  at::rand({}, info.generator).item<double>());
                              }},
                      {.num_workers = workers, .seed = 7});
    auto batches = epoch(loader);
    const auto second = epoch(loader);
    batches.insert(batches.end(), second.begin(), second.end());
    return batches;
  };
  const auto seen = draw(3);
  const auto generator = internal::make_generator(7);
  ASSERT_EQ(seen.size(), 24U);
  for (int epoch = 0; epoch < 2; ++epoch) {
    const int64_t base_seed = internal::draw_seed(generator);
    for (int i = 0; i < 12; ++i) {
      const auto [id, workers, seed, number] = seen[static_cast<size_t>(12 * epoch + i)];
      EXPECT_EQ(id, i % 3);
      EXPECT_EQ(workers, 3);
      EXPECT_EQ(seed, base_seed + id) << "as torch/utils/data/_utils/worker.py has it";
      if (i >= 3) continue;
      EXPECT_EQ(number, at::rand({}, internal::make_generator(static_cast<uint64_t>(seed))).item<double>());
    }
  }
  EXPECT_EQ(draw(3), seen);
  EXPECT_EQ(get_worker_info(), nullptr);
  DataLoader alone(Batches{1, [](auto) { return get_worker_info() == nullptr; }});
  EXPECT_THAT(epoch(alone), ElementsAre(true));
}

struct Augmented {
  int64_t size() const { return 20; }
  at::Tensor get(int64_t i) const { return at::rand({2}, sample_generator()) + i; }
};

TEST(DataLoaderWorkers, RandomTransformsOfSamplesDontDependOnTheirNumberOrTheBatchSize) {
  const auto draw = [](int workers, int64_t batch_size) {
    DataLoader loader(Augmented{},
                      {.batch_size = batch_size, .shuffle = true, .num_workers = workers, .seed = 3});
    return std::pair(at::cat(epoch(loader)), at::cat(epoch(loader)));
  };
  const auto [first, second] = draw(0, 4);
  for (const int workers : {1, 2, 3, 8}) {
    const auto [a, b] = draw(workers, 1 + workers);
    EXPECT_TRUE(at::equal(a, first) && at::equal(b, second)) << workers << " workers";
  }
  EXPECT_FALSE(at::equal(std::get<0>(at::sort(first.frac().flatten())),
                         std::get<0>(at::sort(second.frac().flatten()))))
      << "each epoch has other numbers";
  EXPECT_EQ(std::get<0>(at::_unique(first.frac().flatten())).numel(), 40) << "and each sample";
}

TEST(DataLoaderWorkers, ABatchMayAskForTheSeedOfEachOfItsSamples) {
  const auto seeds_of_batch = [](auto indices) {
    std::vector<uint64_t> seeds;
    for (size_t i = 0; i < indices.size(); ++i) seeds.push_back(sample_seed(static_cast<int64_t>(i)));
    EXPECT_THROW(sample_seed(static_cast<int64_t>(indices.size())), c10::IndexError);
    EXPECT_THROW(sample_seed(-1), c10::IndexError);
    return seeds;
  };
  DataLoader by_batch(Batches{6, seeds_of_batch}, {.batch_size = 4, .seed = 1});
  struct Seeds {
    int64_t size() const { return 6; }
    uint64_t get(int64_t) const { return sample_seed(); }
  };
  DataLoader by_sample(Seeds{}, {.batch_size = 2, .num_workers = 2, .seed = 1},
                       [](const std::vector<uint64_t>& seeds) { return seeds; });
  std::vector<uint64_t> one, other;
  for (const auto& batch : epoch(by_batch)) one.insert(one.end(), batch.begin(), batch.end());
  for (const auto& batch : epoch(by_sample)) other.insert(other.end(), batch.begin(), batch.end());
  EXPECT_EQ(one, other);
  EXPECT_EQ(std::set(one.begin(), one.end()).size(), 6U);
  at::manual_seed(5);
  const auto outside = sample_seed();
  at::manual_seed(5);
  EXPECT_EQ(sample_seed(), outside) << "elsewhere the default generator decides";
}

TEST(DataLoaderWorkers, PersistentOnesServeAllEpochs) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::vector<int> initialised;
  DataLoader loader(Batches{10,
                            [&](auto indices) {
                              const std::lock_guard<std::mutex> lock(mutex);
                              threads.insert(std::this_thread::get_id());
                              return indices[0];
                            }},
                    {.num_workers = 2, .persistent_workers = true, .worker_init_fn = [&](int id) {
                       const std::lock_guard<std::mutex> lock(mutex);
                       initialised.push_back(id);
                     }});
  for (int time = 0; time < 5; ++time) {
    EXPECT_EQ(epoch(loader).size(), 10U);
    for (const auto& batch : loader) {
      if (batch == 3) break;
    }
  }
  EXPECT_EQ(threads.size(), 2U);
  std::sort(initialised.begin(), initialised.end());
  EXPECT_THAT(initialised, ElementsAre(0, 1)) << "once in each thread";
  EXPECT_EQ(threads.count(std::this_thread::get_id()), 0U);
}

TEST(DataLoaderWorkers, PersistentOnesHaveANewSeedInEachEpochAndAfterAResume) {
  const auto seeds = Batches{2, [](auto) { return sample_seed(); }};
  const DataLoaderOptions options = {.num_workers = 1, .persistent_workers = true, .seed = 1};
  DataLoader loader(seeds, options);
  std::vector<uint64_t> all = epoch(loader);
  const auto state = loader.state_dict();
  for (int time = 0; time < 3; ++time) {
    for (const uint64_t seed : epoch(loader)) all.push_back(seed);
  }
  EXPECT_EQ(std::set(all.begin(), all.end()).size(), 8U);
  DataLoader later(seeds, options);
  later.load_state_dict(state);
  EXPECT_THAT(epoch(later), ElementsAre(all[2], all[3]));
}

TEST(DataLoaderWorkers, ANewEpochOfPersistentOnesEndsTheOneBefore) {
  DataLoader loader(Batches{100, kIndices}, {.num_workers = 2, .persistent_workers = true});
  auto first = loader.begin();
  EXPECT_EQ(epoch(loader).size(), 100U);
  const auto rest = [&] {
    for (; first != loader.end(); ++first) continue;
  };
  EXPECT_THAT(message_of<c10::Error>(rest), HasSubstr("ended by a later begin() of its loader"));
  EXPECT_EQ(epoch(loader).size(), 100U) << "a dead iterator does no harm";
}

TEST(DataLoaderWorkers, AnIteratorOfPersistentOnesOutlivesItsLoader) {
  auto iterator = [] {
    DataLoader loader(Batches{10, kIndices}, {.num_workers = 2, .persistent_workers = true});
    return loader.begin();
  }();
  int batches = 0;
  for (; iterator != std::default_sentinel; ++iterator) ++batches;
  EXPECT_EQ(batches, 10);
}

TEST(DataLoaderWorkers, InitRunsInEachAndItsFailureIsToldToTheConsumer) {
  std::atomic<int> sum{0};
  {
    DataLoader loader(Batches{5, kIndices}, {.num_workers = 3, .worker_init_fn = [&](int id) {
                                               sum += get_worker_info()->id == id;
                                             }});
    epoch(loader);
    EXPECT_EQ(sum, 3);
  }
  DataLoader failing(Batches{5, kIndices}, {.num_workers = 2, .worker_init_fn = [](int id) {
                                              TORCH_CHECK_VALUE(id != 1, "no database here");
                                            }});
  int batches = 0;
  const auto message = message_of<c10::ValueError>([&] {
    for (const auto& batch : failing) batches += static_cast<int>(batch.size());
  });
  EXPECT_EQ(batches, 1) << "worker 0's first one";
  EXPECT_THAT(message, AllOf(HasSubstr("no database here"), HasSubstr("in worker_init_fn of worker 1")));
}

TEST(DataLoaderWorkers, ATimeoutNamesTheBatchAndTheEpochCanGoOn) {
  std::promise<void> go;
  const auto may_go = go.get_future().share();
  // Worker 1 begins with batch 3 when batch 1 has been taken, not before.
  DataLoader loader(
      Batches{10,
              [&](auto indices) {
                if (indices[0] == 6) may_go.wait();
                return kIndices(indices);
              }},
      {.batch_size = 2, .num_workers = 2, .prefetch_factor = 1, .timeout = std::chrono::milliseconds(20)});
  // A busy machine may need more than 20 ms for the other batches.
  const auto patiently = [](const auto& step) {
    while (true) {
      try {
        return step();
      } catch (const c10::Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("timed out"));
      }
    }
  };
  auto iterator = patiently([&] { return loader.begin(); });
  const auto next = [&] { ++iterator; };
  patiently(next);
  patiently(next);
  EXPECT_THAT(*iterator, ElementsAre(4, 5));
  const double before = loader.waited();
  EXPECT_THAT(
      message_of<c10::Error>(next),
      HasSubstr("DataLoader timed out after 20 ms waiting for batch 3 of the epoch, samples 6, 7, which "
                "worker 1 makes"));
  EXPECT_GE(loader.waited() - before, 0.02);
  go.set_value();
  patiently(next);
  EXPECT_THAT(*iterator, ElementsAre(6, 7));
  patiently(next);
  EXPECT_THAT(*iterator, ElementsAre(8, 9));
}

TEST(DataLoaderWorkers, AFailureStopsNoOtherBatches) {
  struct Failing {
    int64_t size() const { return 40; }
    int64_t get(int64_t i) const {
      TORCH_CHECK_VALUE(i != 17, "torn image");
      return i;
    }
  };
  for (const int workers : {1, 2, 5}) {
    DataLoader loader(Failing{}, {.batch_size = 4, .num_workers = workers});
    int batches = 0;
    const auto message = message_of<c10::ValueError>([&] {
      for (const auto& batch : loader) batches += batch.size(0) == 4;
    });
    EXPECT_EQ(batches, 4);
    EXPECT_THAT(message, AllOf(HasSubstr("torn image"), HasSubstr("while loading sample 17 of the data set"),
                               HasSubstr("batch 4 of the epoch, samples 16, 17, 18, 19")));
  }
}

TEST(DataLoaderWorkers, WithoutThemTheCallerWaitsWhileBatchesAreMade) {
  DataLoader loader(Batches{200, [](auto) { return at::rand({100}); }});
  EXPECT_EQ(loader.waited(), 0);
  epoch(loader);
  EXPECT_GT(loader.waited(), 0);
}

TEST(DataLoaderWorkers, PinWhereThereIsADevice) {
  for (const int workers : {0, 2}) {
    DataLoader loader(Augmented{}, {.batch_size = 5, .num_workers = workers, .pin_memory = true});
    const auto batches = epoch(loader);
    ASSERT_EQ(batches.size(), 4U);
    const bool pinned = accelerator().has_value();
    for (const auto& batch : batches) EXPECT_EQ(pinned && batch.is_pinned(), pinned);
  }
}

}  // namespace
}  // namespace lockstep::data::data_loader_workers_test
