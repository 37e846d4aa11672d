#include <functional>
#include <gmock/gmock.h>
#include <random>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/algorithms/algorithms.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/testing/thread_ranks.h>

// The whole backend with ranks as threads of one process, so that ThreadSanitizer sees both sides of each
// exchange.
namespace lockstep::threads_test {
namespace {

namespace algorithms = collectives::internal::algorithms;
using namespace std::chrono_literals;
using Backend = c10::intrusive_ptr<LockstepBackend>;

/// Runs body(backend) on `ranks` threads.
void on_ranks(int ranks, const std::function<void(const Backend&)>& body) {
  at::ones({1}).add(1);  // libtorch's first-use initialisation happens here, in one thread
  testing::run_rank_threads(ranks,
                            [&](std::shared_ptr<transport::GroupChannel> channel) {
                              body(c10::make_intrusive<LockstepBackend>(
                                  std::move(channel), LockstepBackend::Settings{"test", 60s}));
                            },
                            {.segment_bytes = size_t{1} << 20});
}

/// One operation of a random sequence that all ranks draw alike.
struct Step {
  int kind;
  int64_t numel;
  bool shared;
  bool asynchronous;
  int root;
};

std::vector<Step> random_steps(unsigned seed, int ranks) {
  std::mt19937 random(seed);
  std::vector<Step> steps(60);
  for (Step& step : steps) {
    // Around the borders between the paths.
    const int64_t sizes[] = {0, 1, 100, 2048, 2049, 3000, 20000};
    step = {static_cast<int>(random() % 4), sizes[random() % 7], random() % 2 == 0, random() % 2 == 0,
            static_cast<int>(random() % ranks)};
  }
  return steps;
}

class BackendOnThreads : public ::testing::TestWithParam<int> {};

TEST_P(BackendOnThreads, RandomSequencesGiveTheRightSums) {
  const int ranks = GetParam();
  algorithms::set_chunk_bytes_for_testing(4096);
  for (unsigned seed = 0; seed < 6; ++seed) {
    const auto steps = random_steps(seed, ranks);
    on_ranks(ranks, [&](const Backend& backend) {
      const int rank = backend->getRank();
      struct Pending {
        c10::intrusive_ptr<c10d::Work> work;
        std::vector<at::Tensor> tensors;
        std::vector<float> expected;
      };
      std::vector<Pending> pending;
      const auto finish = [&] {
        for (Pending& each : pending) {
          each.work->wait();
          for (size_t i = 0; i < each.tensors.size(); ++i) {
            if (each.tensors[i].numel() == 0) continue;
            ASSERT_EQ(each.tensors[i].min().item<float>(), each.expected[i]);
            ASSERT_EQ(each.tensors[i].max().item<float>(), each.expected[i]);
          }
        }
        pending.clear();
      };
      for (const Step& step : steps) {
        at::Tensor tensor =
            step.shared ? backend->allocateTensor(step.numel, at::kFloat) : at::empty({step.numel});
        tensor.fill_(rank + 1);
        std::vector<at::Tensor> tensors{tensor};
        Pending next;
        next.tensors = tensors;
        if (step.kind == 0 || step.kind == 1) {
          c10d::AllreduceOptions options;
          options.reduceOp = step.kind == 0 ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX;
          options.asyncOp = step.asynchronous;
          next.work = backend->allreduce(tensors, options);
          next.expected = {step.kind == 0 ? static_cast<float>(ranks * (ranks + 1) / 2)
                                          : static_cast<float>(ranks)};
        } else if (step.kind == 2) {
          c10d::BroadcastOptions options;
          options.rootRank = step.root;
          options.asyncOp = step.asynchronous;
          next.work = backend->broadcast(tensors, options);
          next.expected = {static_cast<float>(step.root + 1)};
        } else {
          std::vector<std::vector<at::Tensor>> outputs(1);
          next.expected.clear();
          for (int peer = 0; peer < ranks; ++peer) {
            outputs[0].push_back(at::empty({step.numel}));
            next.expected.push_back(static_cast<float>(peer + 1));
          }
          next.work = backend->allgather(outputs, tensors, {});
          next.tensors = outputs[0];
        }
        pending.push_back(std::move(next));
        if (!step.asynchronous) finish();
      }
      finish();
    });
  }
  algorithms::set_chunk_bytes_for_testing(size_t{256} << 10);
}

INSTANTIATE_TEST_SUITE_P(Ranks, BackendOnThreads, ::testing::Values(1, 2, 3, 4, 9));

TEST(BackendOnThreads, WaitersOfOneGroupInSeveralThreadsShareTheWork) {
  on_ranks(2, [](const Backend& backend) {
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 40; ++i) {
      tensors.push_back(at::full({i % 2 == 0 ? 10 : 5000}, 1.0f));
      std::vector<at::Tensor> one{tensors.back()};
      works.push_back(backend->allreduce(one));
    }
    std::vector<std::thread> waiters;
    for (int which = 0; which < 3; ++which) {
      waiters.emplace_back([&, which] {
        for (size_t i = which; i < works.size(); i += 3) works[i]->wait();
      });
    }
    for (auto& waiter : waiters) waiter.join();
    for (const auto& tensor : tensors) ASSERT_EQ(tensor.max().item<float>(), 2);
  });
}

TEST(BackendOnThreads, WaitWithATimeoutDoesNotStopTheOperation) {
  on_ranks(2, [](const Backend& backend) {
    static std::atomic<bool> gave_up{false};
    std::vector<at::Tensor> tensors{at::ones({3})};
    if (backend->getRank() == 0) {
      c10d::AllreduceOptions options;
      options.asyncOp = false;
      auto work = backend->allreduce(tensors, options);
      EXPECT_THROW(work->wait(20ms), DistTimeoutError);
      gave_up = true;
      work->wait();
    } else {
      while (!gave_up) std::this_thread::yield();
      backend->allreduce(tensors)->wait();
    }
    EXPECT_EQ(tensors[0].sum().item<float>(), 6);
  });
}

TEST(BackendOnThreads, FailedOperationsReachTheFuture) {
  on_ranks(2, [](const Backend& backend) {
    if (backend->getRank() == 1) return;  // leaves
    std::vector<at::Tensor> tensors{at::ones({3})};
    auto work = backend->allreduce(tensors);
    auto future = work->getFuture();
    EXPECT_THROW(future->waitAndThrow(), std::exception);
    EXPECT_FALSE(work->isSuccess());
    EXPECT_NE(work->exception(), nullptr);
  });
}

}  // namespace
}  // namespace lockstep::threads_test
