#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::pipeline_runner_test {
namespace {

using namespace pipeline_test;
using testing::run_ranks;

// ---- all schedules, against one process

class Pipeline : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Pipeline, ::testing::Range(1, 5));

/// Random models, numbers of micro-batches and rows, several steps with batches of different sizes.
TEST_P(Pipeline, GradientsAreThoseOfOneProcess) {
  const int64_t ranks = GetParam();
  run_ranks(GetParam(), [ranks](int rank) {
    auto world = init_process_group();
    uint64_t seed = 100 * static_cast<uint64_t>(ranks);
    for (const PipelineSchedule schedule : kSchedules) {
      for (int repeat = 0; repeat < 3; ++repeat) {
        SCOPED_TRACE(to_string(schedule) + ", seed " + std::to_string(++seed));
        std::mt19937_64 random(seed);
        const bool interleaved = is_interleaved(schedule);
        const int64_t per_rank = interleaved ? 1 + static_cast<int64_t>(random() % 3) : 1;
        // Fewer than stages, too.
        int64_t micro_batches = 1 + static_cast<int64_t>(random() % 9);
        if (interleaved) micro_batches -= micro_batches % std::max<int64_t>(1, micro_batches / ranks);
        auto model = random_model(seed, ranks * per_rank), expected = random_model(seed, ranks * per_rank);
        PipelineRunner pipeline(
            stages_of(model, rank, ranks),
            {.schedule = schedule, .n_microbatches = micro_batches, .loss_fn = mean_of_squares});
        for (int step = 0; step < 2; ++step) {
          const int64_t rows =
              micro_batches + static_cast<int64_t>(random() % 12);  // uneven; another number each step
          const Batch batch = random_batch(seed + 1000, rows);
          const Results wanted = run_as_one_process(expected, batch, micro_batches);
          Tensors losses;
          const auto outputs = pipeline.step({batch.data}, batch.target, &losses);
          const bool is_last = rank + 1 == ranks;
          ASSERT_EQ(outputs.size(), is_last ? 1 : 0);
          ASSERT_EQ(losses.size(), is_last ? static_cast<size_t>(micro_batches) : 0);
          if (is_last) {
            EXPECT_TRUE(at::equal(outputs[0], wanted.output));
            EXPECT_TRUE(testing::equal(losses, wanted.losses));
          }
          for (size_t i = static_cast<size_t>(rank); i < model.size(); i += static_cast<size_t>(ranks)) {
            expect_same_gradients(model[i]->parameters(), expected[i]->parameters());
          }
          const auto table = pipeline_table(schedule, {ranks, per_rank, micro_batches});
          EXPECT_EQ(pipeline.memory().activations, peak_activations(table, rank));
          // Gradients stay, and the second step adds to them.
        }
      }
    }
  });
}

TEST(Pipelines, EvalGivesOutputsAndLossesWithoutGraphs) {
  run_ranks(3, [](int rank) {
    constexpr int64_t kRanks = 3, kMicroBatches = 4 * kRanks;
    auto world = init_process_group();
    for (const PipelineSchedule schedule : kSchedules) {
      const int64_t stages = is_interleaved(schedule) ? 2 * kRanks : kRanks;
      auto model = random_model(5, stages);
      PipelineRunner pipeline(
          stages_of(model, rank, kRanks),
          {.schedule = schedule, .n_microbatches = kMicroBatches, .loss_fn = mean_of_squares});
      const Batch batch = random_batch(9, kMicroBatches + 5);
      Tensors losses;
      const auto outputs = pipeline.eval({batch.data}, batch.target, &losses);
      const auto without_target = pipeline.eval({batch.data});
      for (auto& stage : model) {
        for (const auto& parameter : stage->parameters()) EXPECT_FALSE(parameter.grad().defined());
      }
      EXPECT_EQ(pipeline.memory().activations, 0);
      if (rank + 1 < kRanks) {
        EXPECT_TRUE(outputs.empty() && losses.empty() && without_target.empty());
        continue;
      }
      const Results wanted = run_as_one_process(model, batch, kMicroBatches);
      EXPECT_TRUE(at::equal(outputs.at(0), wanted.output));
      EXPECT_TRUE(at::equal(without_target.at(0), wanted.output));
      EXPECT_TRUE(testing::equal(losses, wanted.losses));
      EXPECT_FALSE(outputs[0].requires_grad());
    }
  });
}

TEST(Pipelines, OutputsThatAreNotWantedNeedNotFitTogether) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto stage = [rank](const at::Tensor& x) {  // as many columns as the micro-batch needs
      return rank == 0 ? x : x.narrow(1, 0, x[0][0].item<int64_t>());
    };
    const auto sum = [](const at::Tensor& output, const at::Tensor& target) {
      return output.sum() + target.sum();
    };
    PipelineRunner pipeline(PipelineStage(stage, rank, 2), {.n_microbatches = 2, .loss_fn = sum});
    const auto x = at::tensor({2, 3}).view({2, 1}).expand({2, 4});
    Tensors losses;
    EXPECT_TRUE(pipeline.eval({x}, at::zeros({2}), &losses, /*return_outputs=*/false).empty());
    if (rank == 1) {
      EXPECT_EQ(losses.at(0).item<int64_t>(), 2 * 2);
      EXPECT_EQ(losses.at(1).item<int64_t>(), 3 * 3);
    }
  });
}

std::vector<std::string>& recorded_actions() {
  static thread_local std::vector<std::string> names;
  return names;
}

/// Messages have scopes, too.
std::unique_ptr<at::ObserverContext> record_action(const at::RecordFunction& scope) {
  const std::string_view name = scope.name();
  if (name.starts_with("PP:")) recorded_actions().emplace_back(name);
  return nullptr;
}

TEST(Pipelines, TracesNameTheActionsAsTorchDoes) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(7, 2);
    PipelineRunner pipeline(stages_of(model, rank, 2), {.n_microbatches = 2, .loss_fn = mean_of_squares});
    const auto handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(record_action).scopes({at::RecordScope::USER_SCOPE}));
    const Batch batch = random_batch(7, 4);
    pipeline.step({batch.data}, batch.target);
    at::removeCallback(handle);
    const std::vector<std::string> first{"PP:0F0",      "PP:0F1", "PP:0B0",
                                         "PP:0RECV_B0", "PP:0B1", "PP:0RECV_B1"};
    const std::vector<std::string> last{"PP:1F0", "PP:1RECV_F0", "PP:1B0", "PP:1F1", "PP:1RECV_F1", "PP:1B1"};
    EXPECT_EQ(recorded_actions(), rank == 0 ? first : last);
  });
}

// ---- what stages pass each other

/// It has three stages. Its inputs are x and the numbers of rows of a table; stage 0 gives a hidden state (to stages 1 and 2), the
/// numbers (to stage 2), a mask (to stage 1) and a large tensor of another dtype and order in memory (to stage 2).
struct SkippingModel {
  nn::Linear first{6, 6}, second{6, 6}, last{6, 6};
  nn::Embedding table{10, 6};

  Tensors stage0(const at::Tensor& x, const at::Tensor& numbers) {
    const auto hidden = torch::tanh(first(x));
    return {hidden, numbers, hidden > 0,
            hidden.to(at::kDouble).unsqueeze(2).repeat({1, 1, 40}).permute({2, 0, 1})};
  }
  std::tuple<at::Tensor, at::Tensor> stage1(const at::Tensor& hidden, const at::Tensor& mask) {
    const auto next = torch::tanh(second(hidden));
    return {next, torch::where(mask, next, 2 * next)};
  }
  at::Tensor stage2(const at::Tensor& hidden, const at::Tensor& numbers, const at::Tensor& large,
                    const at::Tensor& from1, const at::Tensor& also_from1) {
    return last(hidden + from1 * also_from1) + table(numbers) + large.square().sum(0).to(at::kFloat);
  }
  Tensors parameters() {
    Tensors all;
    for (const auto& part :
         {first->parameters(), second->parameters(), last->parameters(), table->parameters()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
};

TEST(Pipelines, PassSeveralTensorsOfAllKindsAndSkipStages) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      SCOPED_TRACE(to_string(schedule));
      torch::manual_seed(3);
      SkippingModel model;
      torch::manual_seed(3);
      SkippingModel expected;
      std::vector<PipelineStage> stages;
      if (rank == 0) {
        stages.emplace_back([&](const at::Tensor& x, const at::Tensor& n) { return model.stage0(x, n); }, 0,
                            3,
                            PipelineStageOptions{.outputs_to = {{1, 2}, {2}, {1}, {2}},
                                                 .parameters = model.first->parameters()});
      } else if (rank == 1) {
        stages.emplace_back([&](const at::Tensor& h, const at::Tensor& m) { return model.stage1(h, m); }, 1,
                            3, PipelineStageOptions{.parameters = model.second->parameters()});
      } else {
        stages.emplace_back(
            [&](const Tensors& in) { return model.stage2(in.at(0), in.at(1), in.at(2), in.at(3), in.at(4)); },
            2, 3);
      }
      PipelineRunner pipeline(stages,
                              {.schedule = schedule, .n_microbatches = 3, .loss_fn = mean_of_squares});
      const Batch batch = random_batch(8, 7);
      const auto numbers = at::arange(7).remainder(10);
      const auto outputs = pipeline.step({batch.data, numbers}, batch.target);

      Tensors wanted;
      const auto data = at::tensor_split(batch.data, 3), target = at::tensor_split(batch.target, 3),
                 rows = at::tensor_split(numbers, 3);
      for (size_t m = 0; m < 3; ++m) {
        const auto zero = expected.stage0(data[m], rows[m]);
        const auto [one, also] = expected.stage1(zero[0], zero[2]);
        wanted.push_back(expected.stage2(zero[0], zero[1], zero[3], one, also));
        (mean_of_squares(wanted.back(), target[m]) / 3.0).backward();
      }
      if (rank == 2) {
        EXPECT_TRUE(at::equal(outputs.at(0), at::cat(wanted)));
      }
      const auto actual_parameters = model.parameters(), wanted_parameters = expected.parameters();
      for (size_t i = 0; i < actual_parameters.size(); ++i) {
        if (!actual_parameters[i].grad().defined()) continue;  // another rank's
        EXPECT_TRUE(at::equal(actual_parameters[i].grad(), wanted_parameters[i].grad())) << i;
      }
      const size_t own = rank == 2 ? 3 : 2;
      EXPECT_EQ(std::count_if(actual_parameters.begin(), actual_parameters.end(),
                              [](const auto& parameter) { return parameter.grad().defined(); }),
                own);
    }
  });
}

TEST(Pipelines, PassManyTensorsAndLargeOnes) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    // More than the message in front can describe; and of more bytes than travel at once.
    const auto first = [](const at::Tensor& x) {
      Tensors many;
      for (int i = 0; i < 60; ++i) many.push_back(i == 7 ? x.repeat({1, 20'000}) : x * i);
      many.push_back(at::empty({0, 3}));
      return many;
    };
    const auto second = [](const Tensors& many) {
      EXPECT_EQ(many.size(), 61);
      EXPECT_EQ(many.back().sizes(), at::IntArrayRef({0, 3}));
      at::Tensor sum = many[7].narrow(1, 59'990, 6);
      for (size_t i = 0; i < 60; ++i) sum = i == 7 ? sum : sum + many[i];
      return sum;
    };
    const auto stage = rank == 0 ? PipelineStage(first, 0, 2) : PipelineStage(second, 1, 2);
    PipelineRunner pipeline(stage, {.schedule = PipelineSchedule::kGPipe, .n_microbatches = 4});
    const auto x = testing::random({5, 3}, 2).repeat({1, 2});
    const auto outputs = pipeline.eval({x});
    if (rank == 1) {
      Tensors wanted;
      for (const auto& part : at::tensor_split(x, 4)) wanted.push_back(second(first(part)));
      EXPECT_TRUE(at::equal(outputs.at(0), at::cat(wanted)));
    }
  });
}

TEST(Pipelines, StagesThatLearnNothingSendNoGradients) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      auto model = random_model(4, 3), expected = random_model(4, 3);
      for (auto* one : {&model, &expected}) {
        for (const auto& parameter : one->at(0)->parameters()) parameter.set_requires_grad(false);
      }
      const Batch batch = random_batch(6, 8);
      PipelineRunner pipeline(stages_of(model, rank, 3),
                              {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares});
      pipeline.step({batch.data}, batch.target);
      run_as_one_process(expected, batch, 4);
      if (rank > 0) {
        expect_same_gradients(model[static_cast<size_t>(rank)]->parameters(),
                              expected[static_cast<size_t>(rank)]->parameters());
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_runner_test
