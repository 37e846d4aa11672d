#include <cmath>
#include <cstdint>
#include <gmock/gmock.h>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/optim/autocast.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/parallel/pipeline/testing/replicas.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// Mixed precision by PipelineOptions::autocast, and clipping by any norm.
namespace lockstep::pipeline_amp_test {
namespace {

using namespace pipeline_test;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(Pipelines, WithAutocastAreOneProcessUnderTheSame) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      SCOPED_TRACE(to_string(schedule));
      const int64_t stages = is_interleaved(schedule) ? 4 : 2;
      auto model = random_model(81, stages), expected = random_model(81, stages);
      const AutocastOptions half{.dtype = at::kBFloat16};
      PipelineRunner pipeline(
          stages_of(model, rank, 2),
          {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares, .autocast = half});
      for (uint64_t step = 0; step < 2; ++step) {
        const Batch batch = random_batch(82 + 2 * step, 10);
        Tensors losses, wanted_losses, wanted;
        const auto outputs = pipeline.step({batch.data}, batch.target, &losses);
        const auto data = at::tensor_split(batch.data, 4), target = at::tensor_split(batch.target, 4);
        for (size_t m = 0; m < data.size(); ++m) {
          at::Tensor x = data[m], loss;
          {
            const auto guard = autocast(at::kCPU, half);
            for (auto& stage : expected) x = stage->forward(x);
            loss = mean_of_squares(x, target[m]);
          }
          (loss / 4.0).backward();
          wanted.push_back(x.detach());
          wanted_losses.push_back(loss.detach());
        }
        if (rank == 1) {
          EXPECT_EQ(outputs.at(0).scalar_type(), at::kBFloat16);
          EXPECT_EQ(losses.at(0).scalar_type(), at::kFloat);
          EXPECT_TRUE(at::equal(outputs[0], at::cat(wanted)));
          EXPECT_TRUE(testing::equal(losses, wanted_losses));
        }
        const auto first = static_cast<size_t>(rank);
        expect_same_gradients(parameters_of(model, first, 2), parameters_of(expected, first, 2));
        EXPECT_EQ(parameters_of(model, first, 2)[0].grad().scalar_type(), at::kFloat);
      }
    }
  });
}

TEST(Pipelines, ClippingTakesAnyNormOfAnyStages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule : kSchedules) {
      for (const double norm_type : {1.0, 2.0, kInfinity}) {
        SCOPED_TRACE(to_string(schedule) + ", norm " + std::to_string(norm_type));
        const int64_t stages = is_interleaved(schedule) ? 4 : 2;
        auto model = random_model(85, stages, at::kDouble), expected = random_model(85, stages, at::kDouble);
        PipelineRunner pipeline(stages_of(model, rank, 2),
                                {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares});
        const Batch batch = random_batch(86, 8, at::kDouble);
        pipeline.step({batch.data}, batch.target);
        run_as_one_process(expected, batch, 4);
        const double wanted = nn::utils::clip_grad_norm_(parameters_of(expected), 0.01, norm_type);
        EXPECT_GT(wanted, 0.01);
        EXPECT_NEAR(pipeline.clip_grad_norm_(0.01, norm_type).item<double>(), wanted, 1e-12 * wanted);
        const auto first = static_cast<size_t>(rank);
        expect_close(gradients_in(parameters_of(model, first, 2)),
                     gradients_in(parameters_of(expected, first, 2)), 1e-13);
      }
    }
  });
}

TEST(Pipelines, WithDataParallelismClippingMeasuresThePipelineOnce) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    const Place place;
    const auto number = static_cast<size_t>(place.number);
    for (const PipelineSchedule schedule : {PipelineSchedule::k1F1B, PipelineSchedule::kInterleaved1F1B}) {
      for (const double norm_type : {2.0, kInfinity}) {
        SCOPED_TRACE(to_string(schedule) + ", norm " + std::to_string(norm_type));
        const int64_t stages = is_interleaved(schedule) ? 4 : 2;
        auto model = random_model(87, stages, at::kDouble), expected = random_model(87, stages, at::kDouble);
        PipelineRunner pipeline(stages_of(model, place.number, 2, place.pipeline),
                                {.schedule = schedule,
                                 .n_microbatches = 4,
                                 .loss_fn = mean_of_squares,
                                 .data_parallel_group = place.replicas});
        const Batch batch = random_batch(88, 16, at::kDouble), part = place.part_of(batch);
        const Tensors own = parameters_of(model, number, 2), wanted = parameters_of(expected, number, 2);
        pipeline.step({part.data}, part.target);
        run_as_one_process(expected, batch, 1);
        const double norm = nn::utils::clip_grad_norm_(parameters_of(expected), 0.01, norm_type);
        EXPECT_NEAR(pipeline.clip_grad_norm_(0.01, norm_type, /*error_if_nonfinite=*/true).item<double>(),
                    norm, 1e-12 * norm);
        expect_close(gradients_in(own), gradients_in(wanted), 1e-13);
      }
    }
  });
}

TEST(Pipelines, ClippingTellsAllStagesOfAGradientThatIsNotFinite) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(89, 2), expected = random_model(89, 2);
    PipelineRunner pipeline(stages_of(model, rank, 2), {.n_microbatches = 2, .loss_fn = mean_of_squares});
    const Batch batch = random_batch(90, 6);
    const auto own = model[static_cast<size_t>(rank)]->parameters();
    for (const double norm_type : {2.0, kInfinity}) {
      pipeline.step({batch.data}, batch.target);
      if (rank == 1) own[0].mutable_grad()[0] = kInfinity;
      const Tensors before = testing::copies(gradients_in(own));
      EXPECT_THAT(message_of<c10::Error>(
                      [&] { pipeline.clip_grad_norm_(0.1, norm_type, /*error_if_nonfinite=*/true); }),
                  HasSubstr("is non-finite, so it cannot be clipped"));
      EXPECT_TRUE(testing::equal(gradients_in(own), before));
      EXPECT_TRUE(std::isinf(pipeline.clip_grad_norm_(0.1, norm_type).item<double>()));
      for (const auto& parameter : own) parameter.mutable_grad().reset();
    }
    // Nothing is broken by that.
    pipeline.step({batch.data}, batch.target);
    run_as_one_process(expected, batch, 2);
    expect_same_gradients(own, expected[static_cast<size_t>(rank)]->parameters());
  });
}

}  // namespace
}  // namespace lockstep::pipeline_amp_test
