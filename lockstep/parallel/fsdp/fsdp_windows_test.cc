// The windows in which weights are read and written, with real processes: one is stopped at each transition, all evaluate
// whenever they like, alone, and gradients come in another order on each rank and in each step.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <fstream>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/mix_bits.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_windows_test {
namespace {

constexpr int kRanks = 3;
constexpr int kSteps = 12;
constexpr int kTransitions = 4;

/// A weight whose gradients are a group of their own.
struct Piece : torch::nn::Module {
  explicit Piece(int64_t number)
      : weight(register_parameter(
            "weight", testing::random({5 + number, 300}, static_cast<uint64_t>(number), at::kFloat))) {}
  torch::Tensor weight;
};

struct Pieces : torch::nn::Module {
  Pieces() {
    for (int64_t i = 0; i < 7; ++i) {
      pieces.push_back(register_module("piece" + std::to_string(i), std::make_shared<Piece>(i)));
    }
  }
  /// Backward gives the gradients in the reverse order.
  torch::Tensor forward(const torch::Tensor& x, uint64_t seed) {
    auto order = pieces;
    std::mt19937_64 generator(seed);
    std::shuffle(order.begin(), order.end(), generator);
    torch::Tensor sum = x.sum();
    for (const auto& piece : order) sum = sum.sin() + (piece->weight * x.mean()).sin().sum();
    return sum;
  }
  std::vector<std::shared_ptr<Piece>> pieces;
};

/// Of all weights' bits.
uint64_t checksum(const StateDict& state) {
  uint64_t sum = 0;
  for (const auto& [name, value] : state) {
    const auto bits = value.toTensor().contiguous().view(at::kInt).view({-1});
    for (int64_t i = 0; i < bits.numel(); ++i) {
      sum = mix_bits(sum ^ static_cast<uint32_t>(bits.const_data_ptr<int32_t>()[i]));
    }
  }
  return sum;
}

/// 'T' when it is stopped.
char state_of_process(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto end = text.rfind(')');
  return end == std::string::npos || end + 2 >= text.size() ? '?' : text[end + 2];
}

/// Threads that end with the object.
class Threads {
 public:
  template <class Action>
  void repeat(Action action) {
    threads_.emplace_back([this, action = std::move(action)] {
      while (!done_) action();
    });
  }
  Threads() = default;
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() {
    done_ = true;
    for (auto& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> done_ = false;
  std::vector<std::thread> threads_;
};

void train(int rank, int victim) {
  auto world = init_process_group();
  FullyShardedDataParallel model(std::make_shared<Pieces>(),
                                 {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1),
                                  .gradient_buffers = 2,
                                  .gradient_buffer_cap_mb = 0.01});
  auto optimizer = model.make_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  auto pids = torch::zeros({kRanks}, at::kLong);
  pids[rank] = static_cast<int64_t>(::getpid());
  all_reduce(pids);
  const int64_t victims_pid = pids[victim].item<int64_t>();

  std::set<uint64_t> of_steps{checksum(model.full_state_dict())};
  std::mutex mutex;
  std::set<uint64_t> seen;
  std::atomic<int> evaluations = 0;
  int stops = 0;
  {
    Threads threads;
    threads.repeat([&] {
      const uint64_t sum = checksum(model.full_state_dict());
      const std::lock_guard lock(mutex);
      seen.insert(sum);
      ++evaluations;
    });
    if (rank == (victim + 1) % kRanks) {
      threads.repeat([&] {
        if (state_of_process(victims_pid) != 'T') return std::this_thread::yield();
        // Meanwhile this rank evaluates, or waits for the step in which the other one stands still.
        const int before = evaluations;
        for (int poll = 0; poll < 2000 && evaluations < before + 3; ++poll)
          (void)state_of_process(victims_pid);
        ++stops;
        ::kill(static_cast<pid_t>(victims_pid), SIGCONT);
      });
    }
    barrier();
    if (rank == victim) {
      failpoint::configure(
          "fsdp.window.entering=kill(19)@2;fsdp.window.writing=kill(19)@5;"
          "fsdp.window.leaving=kill(19)@7;fsdp.window.left=kill(19)@9");
    }
    std::mt19937 generator(static_cast<uint32_t>(100 * victim + rank));
    for (int step = 0; step < kSteps; ++step) {
      optimizer->zero_grad();
      const auto x = testing::random({4}, static_cast<uint64_t>(10 * step + rank), at::kFloat);
      model(x, static_cast<uint64_t>(1000 * rank + step)).backward();
      optimizer->step();
      const uint64_t now = checksum(model.full_state_dict());
      EXPECT_TRUE(of_steps.insert(now).second) << "step " << step << " has changed nothing";
      EXPECT_TRUE(testing::same_everywhere(torch::tensor({static_cast<int64_t>(now)}))) << "step " << step;
      // Alone, and not as often as the others.
      for (uint32_t again = generator() % 5; again > 0; --again) {
        EXPECT_EQ(checksum(model.full_state_dict()), now) << "step " << step;
      }
    }
  }
  for (const uint64_t sum : seen) EXPECT_TRUE(of_steps.contains(sum)) << "weights of no step were read";
  EXPECT_GT(evaluations, 0);
  if (rank == (victim + 1) % kRanks) {
    EXPECT_EQ(stops, kTransitions);
  }
}

TEST(FsdpWindows, ARankThatStandsStillAtAnyTransitionTearsNoRead) {
  for (int victim = 0; victim < kRanks; ++victim) {
    testing::run_ranks(kRanks, [&](int rank) { train(rank, victim); });
  }
}

}  // namespace
}  // namespace lockstep::fsdp_windows_test
