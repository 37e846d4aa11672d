// Pipelines over processes whose stages are on devices: the gradients of one process on the CPU, and how their tensors travel.
#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/pipeline/internal/tensor_messages.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::pipeline_device_test {
namespace {

using namespace pipeline_test;
using pipeline::internal::TensorMessages;
using ::testing::ContainsRegex;
using testing::run_ranks;

c10::Device own_device() {
  return testing::device_of_rank(get_rank());
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.detach().cpu();
}

void expect_close(const at::Tensor& actual, const at::Tensor& wanted) {
  EXPECT_LT(testing::difference(on_cpu(actual), wanted), 1e-12);
}

/// Random models in all schedules, with uneven micro-batches. `on_device`: whether a rank's stages are on its device.
void expect_gradients_of_one_process(int ranks, int hosts, const std::function<bool(int rank)>& on_device) {
  run_ranks(
      ranks,
      [&](int rank) {
        auto world = init_process_group();
        for (const PipelineSchedule schedule : kSchedules) {
          SCOPED_TRACE(to_string(schedule));
          const int64_t stages = is_interleaved(schedule) ? 2 * ranks : ranks, micro_batches = 2 * ranks;
          const auto seed = static_cast<uint64_t>(10 * ranks + hosts);
          auto model = random_model(seed, stages, at::kDouble),
               expected = random_model(seed, stages, at::kDouble);
          if (on_device(rank)) {
            for (auto& stage : model) stage->to(own_device());
          }
          PipelineRunner pipeline(
              stages_of(model, rank, ranks),
              {.schedule = schedule, .n_microbatches = micro_batches, .loss_fn = mean_of_squares});
          for (int step = 0; step < 3; ++step) {
            const Batch batch = random_batch(seed + 100, micro_batches + 3 + step, at::kDouble);
            const Results wanted = run_as_one_process(expected, batch, micro_batches);
            Tensors losses;
            const auto outputs = pipeline.step({batch.data}, batch.target, &losses);
            if (rank + 1 == ranks) {
              expect_close(outputs.at(0), wanted.output);
              for (size_t i = 0; i < losses.size(); ++i) expect_close(losses[i], wanted.losses.at(i));
            }
            for (auto i = static_cast<size_t>(rank); i < model.size(); i += static_cast<size_t>(ranks)) {
              for (size_t p = 0; p < model[i]->parameters().size(); ++p) {
                expect_close(model[i]->parameters()[p].grad(), expected[i]->parameters()[p].grad());
              }
            }
          }
          const Batch batch = random_batch(seed + 200, micro_batches + 1, at::kDouble);
          const auto outputs = pipeline.eval({batch.data});
          if (rank + 1 == ranks) {
            expect_close(outputs.at(0), run_as_one_process(expected, batch, micro_batches).output);
          }
        }
      },
      {.hosts = hosts});
}

TEST(PipelinesOnDevice, GradientsAreThoseOfOneProcessOnTheCpu) {
  for (const int ranks : {2, 3}) {
    expect_gradients_of_one_process(ranks, 1, [](int) { return true; });
  }
}

TEST(PipelinesOnDevice, StagesOnTheCpuAndOnDevicesGoTogether) {
  expect_gradients_of_one_process(3, 1, [](int rank) { return rank == 1; });
}

TEST(PipelinesOnDevice, HostsPassEachOtherTensors) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_gradients_of_one_process(2, 2, [](int) { return true; });
}

/// Takes lists in another order than that in which they were sent, both ways at once.
TEST(PipelinesOnDevice, ListsAreTakenByTheirTagsInAnyOrder) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    constexpr int kOrderedTag = 1000, kLists = 12;
    TensorMessages messages(default_group(), own_device(), kOrderedTag);
    const int peer = 1 - rank;
    const auto list = [](int from, int tag) {
      const auto seed = static_cast<uint64_t>(100 * from + tag);
      // Some with gaps, some in another order in memory, some on the CPU, large and small, none and empty ones.
      return Tensors{testing::random({5, 7}, seed).t(),
                     testing::random({300 + tag, 9}, seed + 1).slice(1, 0, 9, 2),
                     at::Tensor(),
                     at::empty({0, 3}, at::kDouble),
                     testing::random({tag, 64}, seed + 2),
                     testing::random({}, seed + 3)};
    };
    for (int tag = 0; tag < kLists; ++tag) {
      Tensors sent = list(rank, tag);
      for (size_t i = 0; i < sent.size(); ++i) {
        if (sent[i].defined() && i != 4) sent[i] = sent[i].to(own_device());
      }
      sent[0].requires_grad_();
      messages.send(sent, peer, tag);
    }
    std::vector<int> order(kLists);
    for (int tag = 0; tag < kLists; ++tag) order[static_cast<size_t>(tag)] = tag;
    std::shuffle(order.begin(), order.end(), std::mt19937_64(static_cast<uint64_t>(rank)));
    std::vector<std::shared_ptr<TensorMessages::Receipt>> receipts;
    for (const int tag : order) receipts.push_back(messages.receive(peer, tag));
    receipts.back()->advance();
    for (size_t i = 0; i < order.size(); ++i) {
      const Tensors taken = receipts[i]->take(own_device()), wanted = list(peer, order[i]);
      ASSERT_EQ(taken.size(), wanted.size());
      for (size_t t = 0; t < taken.size(); ++t) {
        ASSERT_EQ(taken[t].defined(), wanted[t].defined());
        if (!wanted[t].defined()) continue;
        EXPECT_EQ(taken[t].device(), own_device());
        EXPECT_EQ(taken[t].requires_grad(), t == 0);
        EXPECT_TRUE(at::equal(on_cpu(taken[t]), wanted[t])) << "tag " << order[i] << ", tensor " << t;
      }
      EXPECT_EQ(taken[0].strides(), wanted[0].strides());
    }
    messages.finish_sends();
    EXPECT_EQ(messages.bytes_in_flight(), 0);
  });
}

TEST(PipelinesOnDevice, ADeadStageIsNamedOnAll) {
  for (const int operation : {1, 6}) {
    testing::run_survivors(3, {1}, [&](int rank) {
      auto world = init_process_group();
      auto model = random_model(3, 3);
      for (auto& stage : model) stage->to(own_device());
      int forwards = 0;
      const auto stage = [&](const at::Tensor& x) {
        if (rank == 1 && ++forwards == operation) testing::die();
        return model[static_cast<size_t>(rank)]->forward(x);
      };
      PipelineRunner pipeline(PipelineStage(stage, rank, 3,
                                            {.device = own_device(),
                                             .parameters = model[static_cast<size_t>(rank)]->parameters()}),
                              {.n_microbatches = 4, .loss_fn = mean_of_squares});
      const Batch batch = random_batch(1, 8);
      EXPECT_THAT(testing::message_of<c10::Error>([&] {
                    for (;;) pipeline.step({batch.data}, batch.target);
                  }),
                  ContainsRegex("rank 1 \\(pid [0-9]+\\) (was )?killed by signal 9"));
    });
  }
}

}  // namespace
}  // namespace lockstep::pipeline_device_test
