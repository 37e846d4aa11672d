// That the order is Python's is tested by distributed_sampler_test.py.
#include <atomic>
#include <dirent.h>
#include <future>
#include <iterator>
#include <stdexcept>
#include <thread>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/deadline.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::data::data_loader_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::message_of;

using Indices = std::vector<int64_t>;

/// Sample i is [i, 10 i] with target i.
struct Numbers {
  int64_t size() const { return count; }
  Example get(int64_t i) const { return {torch::tensor({i, 10 * i}), torch::tensor(i)}; }
  int64_t count = 0;
};

/// A data set whose batches are their indices; calls `on_batch` before each.
struct Batches {
  int64_t size() const { return count; }
  Indices get_batch(std::span<const int64_t> indices) const {
    if (on_batch) on_batch(indices);
    return {indices.begin(), indices.end()};
  }
  int64_t count = 0;
  std::function<void(std::span<const int64_t>)> on_batch;
};

struct FixedSampler : Sampler {
  explicit FixedSampler(Indices order) : order_(std::move(order)) {}
  int64_t size() const override { return static_cast<int64_t>(order_.size()); }
  Indices indices() override { return order_; }
  Indices order_;
};

template <class Loader>
auto epoch(Loader& loader) {
  std::vector<typename Loader::Batch> batches;
  for (auto& batch : loader) batches.push_back(batch);
  return batches;
}

int thread_count() {
  DIR* folder = ::opendir("/proc/self/task");
  int count = -2;                                // . and ..
  while (::readdir(folder) != nullptr) ++count;  // NOLINT(concurrency-mt-unsafe)
  ::closedir(folder);
  return count;
}

/// Waits until there are no more threads than before. The kernel takes a thread off the list some time after
/// pthread_join() has returned, so `count` may have had some of an earlier test; one that was left behind
/// stays there.
void expect_at_most_threads(int count) {
  const auto deadline = Deadline::after(std::chrono::seconds(20));
  while (thread_count() > count && !deadline.expired()) std::this_thread::yield();
  EXPECT_LE(thread_count(), count);
}

/// Each test runs without, with one, and with several background threads.
class DataLoaderTest : public ::testing::TestWithParam<int> {
 protected:
  DataLoaderOptions options(int64_t batch_size) const {
    return {.batch_size = batch_size, .num_workers = GetParam()};
  }
};
INSTANTIATE_TEST_SUITE_P(Workers, DataLoaderTest, ::testing::Values(0, 1, 3));

TEST_P(DataLoaderTest, StacksSamples) {
  const Numbers numbers{5};
  DataLoader loader(numbers, options(2));
  EXPECT_EQ(loader.size(), 3);
  const auto batches = epoch(loader);
  ASSERT_EQ(batches.size(), 3U);
  EXPECT_TRUE(at::equal(batches[1].data, torch::tensor({{2, 20}, {3, 30}}, at::kLong)));
  EXPECT_TRUE(at::equal(batches[1].target, torch::tensor({2, 3}, at::kLong)));
  EXPECT_TRUE(at::equal(batches[2].target, torch::tensor({4}, at::kLong)));
}

TEST_P(DataLoaderTest, TakesABatchSampler) {
  SequentialSampler order(7);
  BatchSampler sampler(order, 3, /*drop_last=*/false);
  auto batched = options(1);
  batched.batch_sampler = &sampler;
  DataLoader loader(Batches{7, {}}, batched);
  EXPECT_EQ(loader.size(), 3);
  for (int time = 0; time < 2; ++time) {
    EXPECT_THAT(epoch(loader), ElementsAre(Indices{0, 1, 2}, Indices{3, 4, 5}, Indices{6}));
  }
  struct Wrong : SamplerOfBatches {
    int64_t size() const override { return 2; }
    std::vector<Indices> batches() override { return {{0}, {}}; }
  } wrong;
  batched.batch_sampler = &wrong;
  DataLoader failing(Batches{7, {}}, batched);
  EXPECT_THAT(message_of<c10::ValueError>([&] { failing.begin(); }), HasSubstr("empty batch, number 1"));
}

TEST_P(DataLoaderTest, DropsAnIncompleteBatchWhenTold) {
  auto dropping = options(2);
  dropping.drop_last = true;
  for (const int64_t count : {0, 1, 4, 5}) {
    DataLoader loader(Batches{count, {}}, dropping);
    EXPECT_EQ(loader.size(), count / 2);
    EXPECT_EQ(static_cast<int64_t>(epoch(loader).size()), count / 2);
    DataLoader keeping(Batches{count, {}}, options(2));
    EXPECT_EQ(keeping.size(), (count + 1) / 2);
    EXPECT_EQ(static_cast<int64_t>(epoch(keeping).size()), (count + 1) / 2);
  }
}

TEST_P(DataLoaderTest, FollowsTheSamplerEpochByEpoch) {
  DistributedSampler sampler(10, 2, 1);
  auto sampled = options(3);
  sampled.sampler = &sampler;
  DataLoader loader(Batches{10, {}}, sampled);
  EXPECT_EQ(loader.size(), 2);
  for (const int64_t number : {0, 1, 5}) {
    sampler.set_epoch(number);
    Indices seen;
    for (const auto& batch : loader) seen.insert(seen.end(), batch.begin(), batch.end());
    EXPECT_EQ(seen, sampler.indices());
  }
}

TEST_P(DataLoaderTest, ShufflesAnewEachEpochAndAlikeForTheSameSeed) {
  auto shuffled = options(100);
  shuffled.shuffle = true;
  shuffled.seed = 3;
  DataLoader loader(Batches{100, {}}, shuffled);
  DataLoader twin(Batches{100, {}}, shuffled);
  const auto first = epoch(loader);
  const auto second = epoch(loader);
  EXPECT_NE(first, second);
  EXPECT_EQ(epoch(twin), first);
  EXPECT_EQ(epoch(twin), second);
}

TEST_P(DataLoaderTest, ACollateFunctionGetsTheSamples) {
  DataLoader loader(Numbers{4}, options(3), [](const std::vector<Example>& samples) {
    int64_t sum = 0;
    for (const auto& sample : samples) sum += sample.target.item<int64_t>();
    return sum;
  });
  EXPECT_THAT(epoch(loader), ElementsAre(0 + 1 + 2, 3));
}

TEST_P(DataLoaderTest, StacksPlainTensors) {
  struct Tensors {
    size_t size() const { return 3; }
    at::Tensor get(int64_t i) const { return torch::full({2}, static_cast<double>(i)); }
  };
  DataLoader loader(Tensors{}, options(3));
  EXPECT_TRUE(at::equal(epoch(loader).at(0), torch::tensor({{0.F, 0.F}, {1.F, 1.F}, {2.F, 2.F}})));
}

/// The error that an epoch ends with, and how many batches came before it.
template <class Error, class Loader>
std::pair<int, std::string> failure(Loader& loader) {
  int batches = 0;
  try {
    for (const auto& batch : loader) {
      static_cast<void>(batch);
      ++batches;
    }
  } catch (const Error& error) {
    return {batches, error.what()};
  }
  return {batches, "no error"};
}

TEST_P(DataLoaderTest, ErrorsArriveInOrderWithTheSample) {
  struct Failing : Numbers {
    Example get(int64_t i) const {
      TORCH_CHECK_VALUE(i != 5, "sample is unreadable");
      return Numbers::get(i);
    }
  };
  DataLoader loader(Failing{{8}}, options(2));
  const auto [batches, message] = failure<c10::ValueError>(loader);
  EXPECT_EQ(batches, 2);
  EXPECT_THAT(message,
              AllOf(HasSubstr("sample is unreadable"), HasSubstr("while loading sample 5 of the data set"),
                    HasSubstr("while loading batch 2 of the epoch, samples 4, 5")));
  EXPECT_EQ((failure<c10::ValueError>(loader).first), 2) << "and again in the next epoch";
}

TEST_P(DataLoaderTest, OtherExceptionsAreNested) {
  DataLoader loader(Batches{4,
                            [](auto indices) {
                              if (indices[0] == 2) throw std::out_of_range("beyond");
                            }},
                    options(2));
  const auto [batches, message] = failure<c10::Error>(loader);
  EXPECT_EQ(batches, 1);
  EXPECT_THAT(message,
              AllOf(HasSubstr("beyond"), HasSubstr("while loading batch 1 of the epoch, samples 2, 3")));
  try {
    epoch(loader);
    FAIL() << "the data set throws";
  } catch (const c10::Error& error) {
    EXPECT_THROW(std::rethrow_if_nested(error), std::out_of_range);
  }
  DataLoader odd(Batches{1, [](auto) { throw 1; }}, options(2));
  EXPECT_THAT(failure<c10::Error>(odd).second, HasSubstr("not a std::exception"));
}

TEST_P(DataLoaderTest, StackingDifferentShapesIsAnError) {
  struct Ragged : Numbers {
    Example get(int64_t i) const { return {torch::zeros({i + 1}), torch::tensor(i)}; }
  };
  DataLoader loader(Ragged{{2}}, options(2));
  EXPECT_THAT(failure<c10::Error>(loader).second, AllOf(HasSubstr("equal size"), HasSubstr("samples 0, 1")));
}

TEST_P(DataLoaderTest, AnIndexOutsideTheDataSetIsAnError) {
  for (const int64_t wrong : {-1, 3, 1000}) {
    FixedSampler sampler({0, 1, 2, wrong});
    auto sampled = options(2);
    sampled.sampler = &sampler;
    DataLoader loader(Batches{3, {}}, sampled);
    const auto [batches, message] = failure<c10::IndexError>(loader);
    EXPECT_EQ(batches, 1);
    EXPECT_THAT(message,
                HasSubstr("the sampler gave index " + std::to_string(wrong) + ", but the data set has 3"));
  }
}

/// Batches of an iterator, from the one that it has; an empty one for each error that is caught.
template <class Loader, class Iterator>
std::vector<Indices> batches_and_errors(Loader& loader, Iterator& iterator) {
  std::vector<Indices> seen;
  while (iterator != loader.end()) {
    seen.push_back(*iterator);
    for (bool failed = true; failed;) {
      try {
        ++iterator;
        failed = false;
      } catch (const c10::ValueError&) {
        EXPECT_TRUE(iterator == loader.end()) << "it has no batch";
        seen.emplace_back();
      }
    }
  }
  return seen;
}

TEST_P(DataLoaderTest, TheEpochGoesOnAfterAnErrorThatIsCaught) {
  const Batches torn{11, [](auto indices) {
                       const bool is_torn = indices[0] >= 4 && indices[0] < 8;
                       TORCH_CHECK_VALUE(!is_torn && indices[0] != 10, "torn");
                     }};
  DataLoader loader(torn, options(2));
  auto iterator = loader.begin();
  EXPECT_THAT(batches_and_errors(loader, iterator),
              ElementsAre(Indices{0, 1}, Indices{2, 3}, IsEmpty(), IsEmpty(), Indices{8, 9}, IsEmpty()));
  ++iterator;
  EXPECT_TRUE(iterator == loader.end());
  EXPECT_TRUE(loader.state_dict().at("epoch_finished").toBool());
}

TEST_P(DataLoaderTest, ABatchThatFailedIsToComeUntilTheNextIsAskedFor) {
  const Batches torn{8, [](auto indices) { TORCH_CHECK_VALUE(indices[0] != 2, "torn"); }};
  DataLoader loader(torn, options(2));
  auto iterator = loader.begin();
  EXPECT_THROW(++iterator, c10::ValueError);
  const auto rest = [&](const StateDict& state) {
    DataLoader later(Batches{8, {}}, options(2));
    later.load_state_dict(state);
    return epoch(later);
  };
  EXPECT_THAT(rest(loader.state_dict()), ElementsAre(Indices{2, 3}, Indices{4, 5}, Indices{6, 7}));
  ++iterator;
  EXPECT_THAT(*iterator, ElementsAre(4, 5));
  EXPECT_THAT(rest(loader.state_dict()), ElementsAre(Indices{6, 7}));
  EXPECT_THAT(rest(loader.state_dict(/*unseen_batches=*/1)), ElementsAre(Indices{4, 5}, Indices{6, 7}));
}

TEST_P(DataLoaderTest, LeavingEarlyLeavesNothingBehind) {
  DataLoader loader(Batches{1000, {}}, options(1));
  const int threads = thread_count();
  for (int trial = 0; trial < 50; ++trial) {
    for (const auto& batch : loader) {
      if (batch[0] == trial % 3) break;
    }
    expect_at_most_threads(threads);
  }
  EXPECT_EQ(epoch(loader).size(), 1000U);
}

TEST_P(DataLoaderTest, SeveralLoadersAndIteratorsAreIndependent) {
  const Batches set{20, {}};
  DataLoader one(set, options(1));
  DataLoader two(set, options(1));
  auto a = one.begin();
  auto b = two.begin();
  auto c = one.begin();
  for (int64_t i = 0; i < 20; ++i, ++a, ++b) {
    EXPECT_THAT(*a, ElementsAre(i));
    EXPECT_THAT(*b, ElementsAre(i));
  }
  EXPECT_TRUE(a == one.end() && b == two.end());
  EXPECT_THAT(*c, ElementsAre(0));
}

TEST_P(DataLoaderTest, OwnsATemporaryDataSetAndItsIteratorOutlivesIt) {
  auto marker = std::make_shared<std::atomic<int>>(0);
  {
    auto iterator = [&] {
      DataLoader loader(Batches{3, [marker](auto) { ++*marker; }}, options(1));
      return loader.begin();
    }();
    EXPECT_GT(marker.use_count(), 1) << "the data set is alive";
    Indices seen;
    for (; iterator != std::default_sentinel; ++iterator) seen.push_back(iterator->at(0));
    EXPECT_THAT(seen, ElementsAre(0, 1, 2));
  }
  EXPECT_EQ(marker.use_count(), 1) << "and is gone with the last that uses it";
  EXPECT_EQ(*marker, 3);
}

TEST_P(DataLoaderTest, RefersToANamedDataSet) {
  Batches set{3, {}};
  DataLoader loader(set, options(3));
  int calls = 0;
  set.on_batch = [&](auto) { ++calls; };
  epoch(loader);
  EXPECT_EQ(calls, 1);
}

TEST(DataLoader, IsARange) {
  using Loader = DataLoader<Batches>;
  static_assert(std::input_iterator<Loader::Iterator>);
  static_assert(std::sentinel_for<std::default_sentinel_t, Loader::Iterator>);
  static_assert(std::is_same_v<DataLoader<Numbers>::Batch, Example>);
}

TEST(DataLoader, WithoutAWorkerABatchIsMadeWhenAskedFor) {
  int made = 0;
  DataLoader loader(Batches{10, [&](auto) { ++made; }}, {.batch_size = 1});
  auto iterator = loader.begin();
  EXPECT_EQ(made, 1);
  ++iterator;
  EXPECT_EQ(made, 2);
}

TEST(DataLoader, AWorkerGoesAheadAsFarAsToldAndNoFurther) {
  constexpr int kAhead = 3;
  std::atomic<int> made{0};
  std::promise<void> reached;
  std::atomic<int> in_hand{0};
  std::atomic<bool> too_far{false};
  DataLoader loader(Batches{50,
                            [&](auto) {
                              const int now = ++made;
                              if (now == 1 + kAhead) reached.set_value();
                              // One more than is ahead: the batch that next() is about to count as in hand.
                              if (now > in_hand + 1 + kAhead) too_far = true;
                            }},
                    {.batch_size = 1, .num_workers = 1, .prefetch_factor = kAhead});
  auto iterator = loader.begin();  // one in hand
  // No batch is asked for, and yet kAhead more are made; if not, the test's time runs out.
  reached.get_future().wait();
  for (; iterator != loader.end(); ++iterator) ++in_hand;
  EXPECT_EQ(made, 50);
  EXPECT_FALSE(too_far);
}

TEST(DataLoader, AWorkerLoadsInOneThreadOfItsOwn) {
  std::vector<std::pair<std::thread::id, int>> seen;
  DataLoader loader(
      Batches{4, [&](auto) { seen.emplace_back(std::this_thread::get_id(), at::get_num_threads()); }},
      {.batch_size = 1, .num_workers = 1});
  const int threads_here = at::get_num_threads();
  epoch(loader);
  ASSERT_EQ(seen.size(), 4U);
  for (const auto& [thread, operators] : seen) {
    EXPECT_EQ(thread, seen[0].first);
    EXPECT_NE(thread, std::this_thread::get_id());
    EXPECT_EQ(operators, 1) << "a worker doesn't compete with the training for cores";
  }
  EXPECT_EQ(at::get_num_threads(), threads_here);
}

TEST(DataLoader, RefusesOptionsThatAreWrong) {
  const Batches set{4, {}};
  const auto message = [&](const DataLoaderOptions& options) {
    return message_of<c10::ValueError>([&] { DataLoader loader(set, options); });
  };
  SequentialSampler sampler(4);
  EXPECT_EQ(message({.batch_size = 0}),
            "batch_size should be a positive integer value, but got batch_size=0");
  EXPECT_THAT(message({.num_workers = -1}), HasSubstr("num_workers option should be non-negative"));
  EXPECT_THAT(message({.prefetch_factor = 0}), HasSubstr("prefetch_factor=0"));
  EXPECT_THAT(message({.persistent_workers = true}),
              HasSubstr("persistent_workers option needs num_workers"));
  EXPECT_THAT(message({.timeout = std::chrono::seconds(1)}),
              HasSubstr("timeout option needs num_workers > 0"));
  EXPECT_THAT(message({.num_workers = 1, .timeout = std::chrono::milliseconds(-5)}),
              HasSubstr("timeout option should be non-negative, but got timeout=-5 ms"));
  BatchSampler batches(sampler, 2, false);
  EXPECT_THAT(message({.batch_size = 2, .batch_sampler = &batches}),
              HasSubstr("batch_sampler option is mutually exclusive with batch_size, shuffle, sampler"));
  EXPECT_THAT(message({.sampler = &sampler, .batch_sampler = &batches}), HasSubstr("mutually exclusive"));
  EXPECT_THAT(message({.batch_sampler = &batches, .shuffle = true}), HasSubstr("mutually exclusive"));
  EXPECT_THAT(message({.batch_sampler = &batches, .drop_last = true}), HasSubstr("mutually exclusive"));
  EXPECT_THAT(message({.sampler = &sampler, .shuffle = true}), HasSubstr("mutually exclusive with shuffle"));
  EXPECT_THAT(message_of<c10::ValueError>([] {
                DataLoader loader(Batches{-1, {}});
              }),
              HasSubstr("size() is -1"));
  EXPECT_NO_THROW(DataLoader(set, DataLoaderOptions{}));
}

}  // namespace
}  // namespace lockstep::data::data_loader_test
