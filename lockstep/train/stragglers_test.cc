// Which rank the log calls slow, in trainings that know nothing of it.
#include <chrono>
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/train/testing/fixtures.h>

namespace lockstep::stragglers_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Points;
using testing::SmallNet;

constexpr int kSlow = 1;
/// The work of a slow rank: long enough that no other rank, whatever else the machine does, takes as long by chance.
constexpr auto kWork = std::chrono::milliseconds(120);

struct SlowNet : SmallNet {
  explicit SlowNet(bool slow) : slow(slow) {}
  torch::Tensor forward(const torch::Tensor& x) {
    if (slow) std::this_thread::sleep_for(kWork);
    return SmallNet::forward(x);
  }
  bool slow;
};

struct SlowPoints : Points {
  data::Example get_batch(std::span<const int64_t> indices) const {
    if (slow) std::this_thread::sleep_for(kWork);
    return Points::get_batch(indices);
  }
  bool slow = false;
};

/// Three windows of 20 steps, and the first step of the next. Of the first one the steps may be slower on a busy machine,
/// and what another rank has told last may be of the window before, with which the second one is then not compared.
constexpr int64_t kSteps = 61;

void train(int rank, bool slow_forward, bool slow_data) {
  auto world = init_process_group();
  DistributedDataParallel model(std::make_shared<SlowNet>(slow_forward && rank == kSlow));
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  data::DataLoader loader(SlowPoints{{kSteps}, slow_data && rank == kSlow}, {.batch_size = 1});
  for (const auto& batch : loader) {
    optimizer.zero_grad();
    torch::mse_loss(model(batch.data), batch.target).backward();
    optimizer.step();
  }
}

/// How often the first rank's log has named one.
int64_t named(const std::vector<testing::RankOutcome>& outcomes) {
  int64_t count = 0;
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status, 0) << outcome.output;
    const std::string& text = outcome.output;
    for (size_t at = text.find(" is slow"); at != std::string::npos; at = text.find(" is slow", at + 1)) {
      ++count;
      EXPECT_EQ(outcome.rank, 0) << text;
    }
  }
  return count;
}

TEST(Stragglers, ASlowForwardIsNamedOnce) {
  const auto outcomes = testing::run_ranks_collect(3, [](int rank) { train(rank, true, false); });
  EXPECT_EQ(named(outcomes), 1);
  EXPECT_THAT(outcomes[0].output,
              AllOf(HasSubstr("warning: rank 1 (pid " + std::to_string(outcomes[kSlow].pid) +
                              ") is slow, and the others wait for it: it takes "),
                    HasSubstr("; most of it in forward (")));
}

TEST(Stragglers, AreNamedOverHostsAndByTheData) {
  if (!testing::has_wire()) GTEST_SKIP() << "without UCX ranks are on one host";
  const auto outcomes =
      testing::run_ranks_collect(2, [](int rank) { train(rank, false, true); }, {.hosts = 2});
  EXPECT_EQ(named(outcomes), 1);
  EXPECT_THAT(outcomes[0].output,
              AllOf(HasSubstr("warning: rank 1 (pid "), HasSubstr("; most of it in data (")));
}

TEST(Stragglers, AreNotNamedWhereTheUserSaysSo) {
  const auto outcomes = testing::run_ranks_collect(2, [](int rank) { train(rank, true, false); },
                                                   {.environment = {{"LOCKSTEP_STRAGGLERS", "0"}}});
  EXPECT_EQ(named(outcomes), 0);
}

}  // namespace
}  // namespace lockstep::stragglers_test
