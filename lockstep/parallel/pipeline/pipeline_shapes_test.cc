#include <cstdint>
#include <functional>
#include <gmock/gmock.h>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Several outputs, outputs without dimensions, and batches of other shapes and dtypes from step to step.
namespace lockstep::pipeline_shapes_test {
namespace {

using namespace pipeline_test;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

/// Its last stage gives an output with rows, and one without dimensions.
struct TwoOutputs {
  nn::Linear first{6, 6}, last{6, 6};

  at::Tensor stage0(const at::Tensor& x) { return torch::tanh(first(x)); }
  std::tuple<at::Tensor, at::Tensor> stage1(const at::Tensor& x) {
    const auto y = last(x);
    return {y, x.square().mean()};
  }
};

at::Tensor loss_of_both(const Tensors& outputs, const at::Tensor& target) {
  return mean_of_squares(outputs.at(0), target) + 0.1 * outputs.at(1);
}

TEST(Pipelines, WithSeveralOutputsOfTheLastStageTheLossTakesAll) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kGPipe, PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      SCOPED_TRACE(to_string(schedule));
      torch::manual_seed(31);
      TwoOutputs model;
      torch::manual_seed(31);
      TwoOutputs expected;
      const auto stage = rank == 0 ? PipelineStage([&](const at::Tensor& x) { return model.stage0(x); }, 0, 2,
                                                   {.parameters = model.first->parameters()})
                                   : PipelineStage([&](const at::Tensor& x) { return model.stage1(x); }, 1, 2,
                                                   {.parameters = model.last->parameters()});
      PipelineRunner pipeline(stage, {.schedule = schedule, .n_microbatches = 4, .loss_fn = loss_of_both});
      const Batch batch = random_batch(32, 10);
      Tensors losses, evaluated;
      const auto outputs = pipeline.step({batch.data}, batch.target, &losses);
      const auto of_eval = pipeline.eval({batch.data}, batch.target, &evaluated);

      Tensors rows, numbers, wanted_losses;
      const auto data = at::tensor_split(batch.data, 4), target = at::tensor_split(batch.target, 4);
      for (size_t m = 0; m < 4; ++m) {
        const auto [y, number] = expected.stage1(expected.stage0(data[m]));
        const auto loss = loss_of_both({y, number}, target[m]);
        (loss / 4.0).backward();
        rows.push_back(y.detach());
        numbers.push_back(number.detach());
        wanted_losses.push_back(loss.detach());
      }
      expect_same_gradients(rank == 0 ? model.first->parameters() : model.last->parameters(),
                            rank == 0 ? expected.first->parameters() : expected.last->parameters());
      if (rank == 0) {
        EXPECT_TRUE(outputs.empty() && losses.empty() && of_eval.empty());
        continue;
      }
      // Rows are put together, numbers are stacked: one for each micro-batch.
      const Tensors wanted{at::cat(rows), at::stack(numbers)};
      EXPECT_TRUE(testing::equal(outputs, wanted));
      EXPECT_TRUE(testing::equal(of_eval, wanted));
      EXPECT_TRUE(testing::equal(losses, wanted_losses));
      EXPECT_TRUE(testing::equal(evaluated, wanted_losses));
    }
  });
}

/// A stage that computes the loss itself.
TEST(Pipelines, OutputsWithoutDimensionsAreStacked) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto weight = at::ones({6}).requires_grad_();
    const auto stage = [&](const at::Tensor& x) {
      return rank == 0 ? x * weight : (x * weight).square().mean();
    };
    const auto itself = [](const at::Tensor& output, const at::Tensor&) { return output; };
    PipelineRunner pipeline(PipelineStage(stage, rank, 2, {.parameters = {weight}}),
                            {.n_microbatches = 3, .loss_fn = itself});
    const Batch batch = random_batch(33, 7);
    Tensors losses;
    const auto outputs = pipeline.step({batch.data}, batch.target, &losses);
    ASSERT_EQ(outputs.size(), rank == 0 ? 0 : 1);
    if (rank == 1) {
      EXPECT_EQ(outputs[0].dim(), 1);
      EXPECT_TRUE(at::equal(outputs[0], at::stack(losses)));
    }
  });
}

TEST(Pipelines, ALossOfOneOutputIsNotGivenTwo) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group();
    const auto weight = at::ones({6}).requires_grad_();
    const auto stage = [&](const at::Tensor& x) { return rank == 0 ? Tensors{x * weight} : Tensors{x, x}; };
    PipelineRunner pipeline(PipelineStage(stage, rank, 2, {.group = group}),
                            {.n_microbatches = 2, .loss_fn = mean_of_squares});
    const Batch batch = random_batch(34, 4);
    const auto step = [&] { pipeline.step({batch.data}, batch.target); };
    const auto text = AllOf(HasSubstr("the loss function takes one output, and the last stage gave 2"),
                            HasSubstr("let it take a std::vector<at::Tensor>"));
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::ValueError>(step), text);
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>(step), AllOf(HasSubstr("rank 1"), text));
    }
  });
}

/// Stages of whatever rows, sequences, width and dtype.
at::Tensor any_shape(int64_t stage, const at::Tensor& x, const at::Tensor& scale, const at::Tensor& shift) {
  return stage % 2 == 0 ? torch::tanh(x * scale + shift)
                        : x * scale + torch::sin(x).mean({-1}, /*keepdim=*/true) * shift;
}

TEST(Pipelines, WithBatchesOfOtherShapesAndDtypesInEachStepAreOneProcess) {
  struct Kind {
    int64_t rows, length, width;
    at::ScalarType type;
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const std::vector<Kind> kinds{{8, 5, 6, at::kFloat},    {8, 9, 6, at::kFloat},
                                  {5, 2, 3, at::kDouble},   {13, 70, 40, at::kDouble},
                                  {4, 1, 1, at::kBFloat16}, {9, 12, 200, at::kFloat}};
    for (const PipelineSchedule schedule : kSchedules) {
      SCOPED_TRACE(to_string(schedule));
      const int64_t count = is_interleaved(schedule) ? 4 : 2;
      // Numbers, which leave the inputs' dtype as it is.
      const auto weights = [count] {
        std::vector<Tensors> weights;
        for (int64_t i = 0; i < count; ++i) {
          weights.push_back({at::full({}, 0.5 + 0.1 * static_cast<double>(i), at::kFloat).requires_grad_(),
                             at::full({}, 0.3 - 0.1 * static_cast<double>(i), at::kFloat).requires_grad_()});
        }
        return weights;
      };
      const auto own = weights(), expected = weights();
      std::vector<PipelineStage> stages;
      for (int64_t index = rank; index < count; index += 2) {
        const Tensors& mine = own[static_cast<size_t>(index)];
        stages.emplace_back([=](const at::Tensor& x) { return any_shape(index, x, mine[0], mine[1]); }, index,
                            count, PipelineStageOptions{.parameters = mine});
      }
      PipelineRunner pipeline(stages,
                              {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares});
      uint64_t seed = 35;
      for (const Kind& kind : kinds) {
        const std::vector<int64_t> sizes{kind.rows, kind.length, kind.width};
        const Batch batch{testing::random(sizes, ++seed, kind.type),
                          testing::random(sizes, ++seed, kind.type)};
        const auto outputs = pipeline.step({batch.data}, batch.target);
        Tensors wanted;
        const auto data = at::tensor_split(batch.data, 4), target = at::tensor_split(batch.target, 4);
        for (size_t m = 0; m < 4; ++m) {
          at::Tensor x = data[m];
          for (int64_t i = 0; i < count; ++i) {
            const Tensors& its = expected[static_cast<size_t>(i)];
            x = any_shape(i, x, its[0], its[1]);
          }
          wanted.push_back(x.detach());
          (mean_of_squares(x, target[m]) / 4.0).backward();
        }
        if (rank == 1) {
          ASSERT_EQ(outputs.size(), 1);
          EXPECT_EQ(outputs[0].scalar_type(), kind.type);
          EXPECT_TRUE(at::equal(outputs[0], at::cat(wanted)));
        }
        // They add up over the steps.
        for (auto i = static_cast<size_t>(rank); i < own.size(); i += 2) {
          expect_same_gradients(own[i], expected[i]);
        }
      }
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_shapes_test
