#include <gmock/gmock.h>
#include <optional>
#include <stdexcept>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/join.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::join_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;

/// The counter of PyTorch's tutorial on Join: counts what all ranks process, each with a collective of its
/// own.
class Counter : public Joinable {
 public:
  explicit Counter(ProcessGroup group = {}, int collectives = 1)
      : group_(std::move(group)), collectives_(collectives) {}

  void operator()() {
    notified = Join::notify_join_context(*this);
    for (int i = 0; i < collectives_; ++i) {
      const auto one = torch::ones({1});
      all_reduce(one, ReduceOp::SUM, group_);
      count += one.item<float>();
    }
  }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    seen_options = options;
    return std::make_unique<Hook>(*this);
  }
  at::Device join_device() const override { return at::kCPU; }
  ProcessGroup join_process_group() const override { return group_; }

  double count = 0;
  double max_count = 0;
  int shadowed = 0;
  std::vector<int64_t> training;  // ranks, in each shadowed iteration
  std::optional<bool> last;
  Work notified;
  JoinOptions seen_options;

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(Counter& counter) : counter_(counter) {}
    void main_hook() override {
      ++counter_.shadowed;
      counter_.training.push_back(Join::training_ranks(counter_));
      EXPECT_TRUE(counter_.join_config().enable);
      EXPECT_FALSE(Join::notify_join_context(counter_)) << "a rank that has joined notifies no other";
      for (int i = 0; i < counter_.collectives_; ++i)
        all_reduce(torch::zeros({1}), ReduceOp::SUM, counter_.group_);
    }
    void post_hook(bool is_last_joiner) override {
      counter_.last = is_last_joiner;
      // The highest rank of those that came last tells the others what it counted.
      const auto common = torch::full({1}, is_last_joiner ? get_rank() : -1, torch::kLong);
      all_reduce(common, ReduceOp::MAX, counter_.group_);
      const auto count = torch::full({1}, counter_.count);
      broadcast(count, static_cast<int>(common.item<int64_t>()), counter_.group_);
      counter_.max_count = count.item<float>();
    }

   private:
    Counter& counter_;
  };

  ProcessGroup group_;
  int collectives_;
};

TEST(Join, CountsInputsOfUnevenRanks) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [ranks](int rank) {
      auto world = init_process_group();
      Counter counter;
      {
        Join join({&counter});
        EXPECT_TRUE(counter.join_config().enable);
        EXPECT_TRUE(counter.join_config().is_first_joinable);
        for (int input = 0; input < 5 + rank; ++input) {
          counter();
          ASSERT_TRUE(counter.notified);
          counter.notified->wait();
          const int active = input < 5 ? ranks : ranks - (input - 4);
          EXPECT_EQ(counter.notified->result().at(0).item<float>(), active) << input;
          EXPECT_EQ(Join::training_ranks(counter), active) << input;
        }
      }
      double all = 0;
      for (int peer = 0; peer < ranks; ++peer) all += 5 + peer;
      double seen = 0;  // by this rank, before it joined
      for (int input = 0; input < 5 + rank; ++input) seen += input < 5 ? ranks : ranks - (input - 4);
      EXPECT_EQ(counter.count, seen);
      EXPECT_EQ(counter.max_count, all);
      EXPECT_EQ(counter.shadowed, ranks - 1 - rank);
      for (int i = 0; i < counter.shadowed; ++i) EXPECT_EQ(counter.training[i], counter.shadowed - i);
      EXPECT_EQ(counter.last, rank == ranks - 1);
      EXPECT_FALSE(counter.join_config().enable);
      EXPECT_FALSE(Join::notify_join_context(counter)) << "outside of a Join no rank is told";
      EXPECT_THAT(message_of<c10::Error>([&] { Join::training_ranks(counter); }), HasSubstr("in no Join"));
    });
  }
}

TEST(Join, SeveralJoinablesInTheirOrderAndTheFirstNotifies) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Counter first({}, 2), second({}, 3);
    for (int epoch = 0; epoch < 2; ++epoch) {  // one after the other
      Join join({&first, &second}, {.divide_by_initial_world_size = false});
      for (int input = 0; input < 4 - rank; ++input) {
        first();
        second();
        EXPECT_TRUE(first.notified);
        EXPECT_FALSE(second.notified);
      }
      join.finish();
      EXPECT_FALSE(first.join_config().enable);
      EXPECT_EQ(first.shadowed, (epoch + 1) * rank);
      EXPECT_EQ(second.shadowed, (epoch + 1) * rank);
      EXPECT_EQ(first.last, rank == 0);
      EXPECT_EQ(second.last, rank == 0);
      join.finish();  // nothing more
    }
    EXPECT_FALSE(first.seen_options.divide_by_initial_world_size);
    EXPECT_EQ(first.max_count, 2 * 2 * (4 + 3 + 2));
    EXPECT_EQ(second.max_count, 2 * 3 * (4 + 3 + 2));
  });
}

TEST(Join, OverASubgroup) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto pair = new_group({1, 2});
    if (rank == 0) return;
    Counter counter(pair);
    {
      Join join({&counter});
      for (int input = 0; input < 2 * rank; ++input) counter();
    }
    EXPECT_EQ(counter.max_count, 2 + 4);
    EXPECT_EQ(counter.shadowed, rank == 1 ? 2 : 0);
  });
}

TEST(Join, DisabledItDoesNothing) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    Counter counter;
    {
      Join join({&counter}, {.enable = false});
      for (int input = 0; input < 3; ++input) {
        counter();
        EXPECT_FALSE(counter.notified);
      }
    }
    EXPECT_EQ(counter.count, 6);
    EXPECT_EQ(counter.last, std::nullopt);
  });
}

TEST(Join, ThrowsOnAllRanksOnEarlyTermination) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    Counter first, second;
    const auto train = [&] {
      Join join({&first, &second}, {.throw_on_early_termination = true});
      for (int input = 0; input < 5 + rank; ++input) {
        first();
        second();
      }
      // The scope's end throws where the inputs ended first.
    };
    EXPECT_EQ(message_of<c10::Error>(train),
              rank == 0 ? "Rank 0 exhausted all inputs."
                        : "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
    EXPECT_EQ(first.count, 15);
    EXPECT_EQ(first.last, std::nullopt);
    EXPECT_FALSE(first.join_config().enable);
    // Nothing is left over: the group and the joinables go on.
    {
      Join join({&second, &first}, {.throw_on_early_termination = true});
      for (int input = 0; input < 2; ++input) {
        second();
        first();
      }
    }
    EXPECT_EQ(first.count, 21);
    EXPECT_EQ(second.last, true) << "even inputs: all were last";
  });
}

TEST(Join, AnExceptionOnItsWayIsNotHeldUp) {
  // Rank 1 fails; the group ends with it, so that rank 0, which waits for it, and rank 2, which trains on,
  // get an error instead of hanging.
  run_ranks(3,
            [](int rank) {
              Counter counter;
              const auto train = [&] {
                auto world = init_process_group();
                Join join({&counter});
                for (int input = 0; input < 3 + 3 * rank; ++input) {
                  if (rank == 1 && input == 4) throw std::runtime_error("bad batch");
                  counter();
                }
              };
              if (rank == 1) {
                EXPECT_THROW(train(), std::runtime_error);
              } else {
                EXPECT_THAT(message_of<c10::DistBackendError>(train), HasSubstr("rank 1"));
              }
              EXPECT_FALSE(counter.join_config().enable);
              EXPECT_EQ(counter.last, std::nullopt);
            },
            {.deadline = std::chrono::seconds(30)});
}

TEST(Join, WarnsOnceAboutALargeSkew) {
  const auto outcomes = testing::run_ranks_collect(2, [](int rank) {
    auto world = init_process_group();
    Counter counter;
    Join join({&counter});
    for (int input = 0; input < 1 + 1005 * rank; ++input) counter();
  });
  for (const auto& outcome : outcomes) {
    const std::string warning = "has at least 1000 fewer inputs than other currently-active ranks";
    const auto first = outcome.output.find(warning);
    EXPECT_EQ(first != std::string::npos, outcome.rank == 0) << outcome.output;
    if (first != std::string::npos) {
      EXPECT_THAT(outcome.output,
                  HasSubstr("Detected uneven input skew of greater than 1000. This means that rank 0"));
      EXPECT_THAT(outcome.output.substr(first + 1), Not(HasSubstr(warning)));
    }
  }
}

TEST(Join, RefusesWhatMakesNoSense) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    Counter counter;
    Counter elsewhere(new_group());
    Counter by_name(default_group());
    EXPECT_EQ(message_of<c10::ValueError>([] { Join join({}); }),
              "The join context manager requires at least one joinable");
    EXPECT_EQ(message_of<c10::ValueError>([&] {
                Join join({&counter, &elsewhere});
              }),
              "Using join context manager with multiple process groups");
    EXPECT_FALSE(counter.join_config().enable);
    Join join({&counter, &by_name});
    EXPECT_THAT(message_of<c10::Error>([&] { Join again({&counter}); }), HasSubstr("another Join"));
    EXPECT_TRUE(counter.join_config().enable);
  });
}

}  // namespace
}  // namespace lockstep::join_test
