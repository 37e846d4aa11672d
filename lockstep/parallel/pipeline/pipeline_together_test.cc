#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/join.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/model_averaging.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/data_parallel/data_parallel.h>
#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/parallel/pipeline/testing/replicas.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// What the guide's table "Together with" says of what synchronises or averages by itself.
namespace lockstep::pipeline_together_test {
namespace {

using namespace pipeline_test;
using testing::run_ranks;

// A Join takes Joinables, so that pipelines of uneven numbers of batches don't compile there.
static_assert(!std::is_base_of_v<Joinable, PipelineRunner>);

/// A stage with a batch normalisation in it.
template <class Norm>
nn::Sequential stage_with(const Norm& norm, uint64_t seed) {
  torch::manual_seed(seed);
  nn::Sequential layers(nn::Linear(6, 7), norm, nn::Tanh(), nn::Linear(7, 6));
  layers->to(at::kDouble);
  return layers;
}

TEST(Pipelines, WithDataParallelismSyncBatchNormNormalisesTheWholeMicroBatch) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    const Place place;
    for (const PipelineSchedule schedule : kSchedules) {
      SCOPED_TRACE(to_string(schedule));
      const uint64_t stages = is_interleaved(schedule) ? 4 : 2;
      std::vector<nn::Sequential> model, expected;
      for (uint64_t i = 0; i < stages; ++i) {
        expected.push_back(stage_with(nn::BatchNorm1d(7), i));
        if (i % 3 == 0) {
          model.push_back(stage_with(SyncBatchNorm(nn::BatchNormOptions(7), place.replicas), i));
        } else {
          model.push_back(stage_with(nn::BatchNorm1d(7), i));
          convert_sync_batchnorm_(*model.back(), place.replicas);
        }
      }
      PipelineRunner pipeline(stages_of(model, place.number, 2, place.pipeline),
                              {.schedule = schedule,
                               .n_microbatches = 4,
                               .loss_fn = mean_of_squares,
                               .data_parallel_group = place.replicas});
      // One process with the rows of both replicas in each micro-batch.
      const auto put_together = [](const at::Tensor& rows) {
        return rows.view({2, 4, 2, 6}).transpose(0, 1).reshape({16, 6});
      };
      for (uint64_t step = 0; step < 2; ++step) {
        const Batch batch = random_batch(120 + 2 * step, 16, at::kDouble), own = place.part_of(batch);
        pipeline.step({own.data}, own.target);
        run_as_one_process(expected, {put_together(batch.data), put_together(batch.target)}, 4);
      }
      const auto number = static_cast<size_t>(place.number);
      expect_close(gradients_in(parameters_of(model, number, 2)),
                   gradients_in(parameters_of(expected, number, 2)), 1e-12);
      for (size_t i = number; i < model.size(); i += 2) {
        expect_close(model[i]->buffers(), expected[i]->buffers(), 1e-13);
      }
    }
  });
}

TEST(Pipelines, WithDataParallelismAGradScalerSkipsTheSameStepsEverywhere) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    const Place place;
    // The pipeline's ranks are enough, for its replicas have the same gradients.
    for (const ProcessGroup& group : {place.pipeline, default_group()}) {
      auto model = random_model(101, 2), expected = random_model(101, 2);
      auto& own = model[static_cast<size_t>(place.number)];
      GradScaler scaler({.device = at::kCPU, .init_scale = 1024.0, .process_group = group});
      torch::optim::SGD optimizer(own->parameters(), 0.1);
      PipelineRunner pipeline(stages_of(model, place.number, 2, place.pipeline),
                              {.n_microbatches = 2,
                               .loss_fn = mean_of_squares,
                               .scale_loss = [&](const at::Tensor& seed) { return scaler.scale(seed); },
                               .data_parallel_group = place.replicas});
      const auto before = testing::copies(own->parameters());
      // On one rank of four, before its gradients are averaged.
      bool overflows = true;
      if (place.replica == 1 && place.number == 1) {
        own->parameters()[0].register_hook([&overflows](const at::Tensor& gradient) -> at::Tensor {
          return overflows ? gradient / 0 : gradient;
        });
      }
      const Batch batch = random_batch(102, 16), part = place.part_of(batch);
      for (const bool is_skipped : {true, false}) {
        overflows = is_skipped;
        optimizer.zero_grad();
        pipeline.step({part.data}, part.target);
        scaler.step(optimizer);
        scaler.update();
        EXPECT_EQ(testing::equal(own->parameters(), before), is_skipped);
        EXPECT_EQ(scaler.get_scale(), 512.0);
      }
      torch::optim::SGD reference(parameters_of(expected), 0.1);
      run_as_one_process(expected, batch, 1);
      reference.step();
      expect_close(own->parameters(), expected[static_cast<size_t>(place.number)]->parameters(), 1e-6);
    }
  });
}

TEST(Pipelines, WithDataParallelismReplicasShareOutTheOptimizersState) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    const Place place;
    for (const PipelineSchedule schedule :
         {PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      const int64_t stages = is_interleaved(schedule) ? 4 : 2;
      auto model = random_model(103, stages, at::kDouble), expected = random_model(103, stages, at::kDouble);
      PipelineRunner pipeline(stages_of(model, place.number, 2, place.pipeline),
                              {.schedule = schedule,
                               .n_microbatches = 4,
                               .loss_fn = mean_of_squares,
                               .data_parallel_group = place.replicas});
      const auto number = static_cast<size_t>(place.number);
      const Tensors own = parameters_of(model, number, 2);
      const torch::optim::AdamOptions adam(0.01);
      ZeroRedundancyOptimizer optimizer(own, optimizer_class<torch::optim::Adam>(adam),
                                        {.process_group = place.replicas});
      torch::optim::Adam reference(parameters_of(expected), adam);
      for (uint64_t step = 0; step < 3; ++step) {
        const Batch batch = random_batch(130 + 2 * step, 16, at::kDouble), part = place.part_of(batch);
        optimizer.zero_grad();
        reference.zero_grad();
        pipeline.step({part.data}, part.target);
        run_as_one_process(expected, batch, 1);
        optimizer.step();
        reference.step();
        expect_close(own, parameters_of(expected, number, 2), 1e-10);
      }
      EXPECT_FALSE(optimizer.optim().state().empty());
      EXPECT_LT(optimizer.optim().state().size(), own.size());
    }
  });
}

/// Local SGD: replicas with gradients of their own, whose weights are averaged now and then.
TEST(Pipelines, WithModelAveragingReplicasTrainByThemselvesMeanwhile) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    const Place place;
    auto model = random_model(105, 2, at::kDouble);
    std::vector<std::vector<nn::Sequential>> expected{random_model(105, 2, at::kDouble),
                                                      random_model(105, 2, at::kDouble)};
    PipelineRunner pipeline(stages_of(model, place.number, 2, place.pipeline),
                            {.n_microbatches = 2, .loss_fn = mean_of_squares});
    const auto number = static_cast<size_t>(place.number);
    const Tensors own = parameters_of(model, number, 2);
    torch::optim::SGD optimizer(own, 0.1);
    PeriodicModelAverager averager(/*period=*/2, /*warmup_steps=*/1, place.replicas);
    Tensors of_first = parameters_of(expected[0]), of_second = parameters_of(expected[1]);
    torch::optim::SGD first(of_first, 0.1), second(of_second, 0.1);
    for (uint64_t step = 0; step < 4; ++step) {
      const Batch batch = random_batch(140 + 2 * step, 16, at::kDouble), part = place.part_of(batch);
      optimizer.zero_grad();
      pipeline.step({part.data}, part.target);
      optimizer.step();
      averager.average_parameters(own);

      first.zero_grad();
      second.zero_grad();
      run_as_one_process(expected[0], {batch.data.narrow(0, 0, 8), batch.target.narrow(0, 0, 8)}, 2);
      run_as_one_process(expected[1], {batch.data.narrow(0, 8, 8), batch.target.narrow(0, 8, 8)}, 2);
      first.step();
      second.step();
      if (step % 2 == 1) {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < of_first.size(); ++i) {
          of_first[i].add_(of_second[i]).div_(2);
          of_second[i].copy_(of_first[i]);
        }
      }
      expect_close(own, parameters_of(expected[static_cast<size_t>(place.replica)], number, 2), 1e-13);
      EXPECT_EQ(testing::same_everywhere(own[0], place.replicas), step % 2 == 1);
    }
  });
}

/// A DataParallel on the first rank, and a Pipe on the second.
TEST(Pipelines, StagesMayHaveReplicasOrPartitionsInTheirProcess) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule : kSchedules) {
      SCOPED_TRACE(to_string(schedule));
      const int64_t count = is_interleaved(schedule) ? 4 : 2;
      auto model = random_model(107, count, at::kDouble), expected = random_model(107, count, at::kDouble);
      std::vector<PipelineStage> stages;
      for (int64_t index = rank; index < count; index += 2) {
        const nn::Sequential& layers = model[static_cast<size_t>(index)];
        const PipelineStageOptions options{.parameters = layers->parameters()};
        if (rank == 0) {
          const auto parallel = std::make_shared<DataParallel<nn::SequentialImpl>>(
              layers, DataParallelOptions{.num_replicas = 2});
          stages.emplace_back([parallel](const at::Tensor& x) { return parallel->forward(x); }, index, count,
                              options);
        } else {
          const std::vector<int64_t> balance{1, static_cast<int64_t>(layers->size()) - 1};
          const auto pipe = std::make_shared<Pipe>(
              layers, balance,
              PipeOptions{.devices = {c10::Device(at::kCPU), c10::Device(at::kCPU)}, .chunks = 2});
          stages.emplace_back([pipe](const at::Tensor& x) { return pipe->forward(x); }, index, count,
                              options);
        }
      }
      PipelineRunner pipeline(stages,
                              {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares});
      for (uint64_t step = 0; step < 2; ++step) {
        const Batch batch = random_batch(150 + 2 * step, 17, at::kDouble);
        pipeline.step({batch.data}, batch.target);
        run_as_one_process(expected, batch, 4);
      }
      const auto first = static_cast<size_t>(rank);
      expect_close(gradients_in(parameters_of(model, first, 2)),
                   gradients_in(parameters_of(expected, first, 2)), 1e-13);
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_together_test
