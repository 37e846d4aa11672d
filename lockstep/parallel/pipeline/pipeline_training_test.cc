#include <gmock/gmock.h>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/parallel/pipeline/pipeline_random.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// What pipelines train together with.
namespace lockstep::pipeline_training_test {
namespace {

using namespace pipeline_test;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

TEST(Pipelines, TiedWeightsHaveOneGradient) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule :
         {PipelineSchedule::k1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      const int64_t count = is_interleaved(schedule) ? 6 : 3;
      torch::manual_seed(11);
      nn::Linear middle(6, 6);
      middle->to(at::kDouble);
      const auto initial = testing::random({10, 6}, 12);
      // The weight is the embedding of the first stage, and the output layer of the last one; stage 1 uses it, too.
      const auto weight = initial.clone().requires_grad_();  // of one process
      const auto forward = [](int64_t stage, int64_t stages, const at::Tensor& x, const at::Tensor& w) {
        if (stage == 0) return w.index_select(0, x);
        if (stage == 1) return torch::tanh(x.mm(w.narrow(0, 0, 6)));
        return stage + 1 == stages ? x.mm(w.t()) : torch::sin(x);
      };
      std::vector<PipelineStage> stages;
      std::vector<std::pair<int64_t, at::Tensor>> own;
      for (int64_t index = rank; index < count; index += 3) {
        const bool uses = index < 2 || index + 1 == count;
        PipelineStageOptions options;
        at::Tensor copy;
        if (uses) {
          copy = (index == 0 ? initial.clone() : at::zeros_like(initial))
                     .requires_grad_();  // gets the first stage's value
          options.tied = {{"embedding", copy}};
          options.parameters = {copy};
          own.emplace_back(index, copy);
        }
        stages.emplace_back([=](const at::Tensor& x) { return forward(index, count, x, copy); }, index, count,
                            options);
      }
      const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
        return nn::functional::cross_entropy(output, target);
      };
      PipelineRunner pipeline(stages, {.schedule = schedule, .n_microbatches = 3, .loss_fn = loss});
      for (int step = 0; step < 2; ++step) {  // the second one accumulates
        const auto words = at::arange(7).remainder(10) + step, next = (words * 3).remainder(10);
        pipeline.step({words}, next);
        const auto data = at::tensor_split(words, 3), target = at::tensor_split(next, 3);
        for (size_t m = 0; m < 3; ++m) {
          at::Tensor x = data[m];
          for (int64_t index = 0; index < count; ++index) x = forward(index, count, x, weight);
          (loss(x, target[m]) / 3.0).backward();
        }
        for (const auto& [index, copy] : own) {
          EXPECT_TRUE(at::equal(copy, initial)) << index;
          EXPECT_LT(testing::difference(copy.grad(), weight.grad()), 1e-14) << index;
        }
        // The same bits for all, and a norm that counts it once.
        const auto mine = own.empty() ? at::zeros_like(initial) : own.front().second.grad();
        Tensors all{at::empty_like(initial), at::empty_like(initial), at::empty_like(initial)};
        all_gather(all, mine);
        EXPECT_TRUE(at::equal(all[0], all[1]) && at::equal(all[0], all[2]));
      }
      const double norm = pipeline.clip_grad_norm_(0.01).item<double>();
      EXPECT_NEAR(norm, weight.grad().norm().item<double>(), 1e-5);
      for (const auto& [index, copy] : own) EXPECT_NEAR(copy.grad().norm().item<double>(), 0.01, 1e-6);
    }
  });
}

TEST(Pipelines, TiedWeightsKeepTheirGradientsWhenAStepThrows) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group();
    const auto weight = testing::random({6, 6}, 13, at::kFloat).requires_grad_();
    bool fails = false;
    const auto forward = [&](const at::Tensor& x) {
      TORCH_CHECK(!fails, "no such word: xyzzy");
      return x.mm(weight);
    };
    PipelineRunner pipeline(
        PipelineStage(forward, rank, 2, {.group = group, .tied = {{"w", weight}}, .parameters = {weight}}),
        {.n_microbatches = 2, .loss_fn = mean_of_squares});
    const Batch batch = random_batch(14, 4);
    pipeline.step({batch.data}, batch.target);
    const at::Tensor gradient = weight.grad(), before = gradient.clone();
    EXPECT_GT(before.abs().sum().item<double>(), 0);
    fails = rank == 0;  // before any stage has added to them
    EXPECT_THAT(message_of<c10::Error>([&] { pipeline.step({batch.data}, batch.target); }),
                HasSubstr("no such word: xyzzy"));
    ASSERT_TRUE(weight.grad().defined());
    EXPECT_TRUE(weight.grad().is_same(gradient));
    EXPECT_TRUE(at::equal(gradient, before));
  });
}

/// Layers that the caller runs before the pipeline, and to make its targets.
TEST(Pipelines, TheCallersGraphsGetTheirGradients) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const PipelineSchedule schedule : kSchedules) {
      SCOPED_TRACE(to_string(schedule));
      const int64_t stages = is_interleaved(schedule) ? 4 : 2;
      auto model = random_model(23, stages, at::kDouble), expected = random_model(23, stages, at::kDouble);
      const Batch batch = random_batch(24, 9, at::kDouble);
      struct Outside {  // the target, and the input as a leaf and with a graph that can run but once
        at::Tensor leaf, weight = testing::random({6}, 25, at::kDouble).requires_grad_();
        at::Tensor bias = testing::random({6}, 26, at::kDouble).requires_grad_();
        at::Tensor input() const { return torch::tanh(leaf * weight); }
        at::Tensor target(const at::Tensor& given) const { return (given * bias).exp(); }
      };
      Outside actual{.leaf = batch.data.clone().requires_grad_()},
          wanted{.leaf = batch.data.clone().requires_grad_()};
      PipelineRunner pipeline(stages_of(model, rank, 2),
                              {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares});
      for (int step = 0; step < 2; ++step) {  // the second one accumulates
        pipeline.step({actual.input()}, actual.target(batch.target));
        run_as_one_process(expected, {wanted.input(), wanted.target(batch.target)}, 4, /*retains=*/true);
      }
      const Tensors own = rank == 0 ? Tensors{actual.leaf, actual.weight} : Tensors{actual.bias};
      const Tensors theirs = rank == 0 ? Tensors{wanted.leaf, wanted.weight} : Tensors{wanted.bias};
      for (size_t i = 0; i < own.size(); ++i) {
        ASSERT_TRUE(own[i].grad().defined()) << i;
        EXPECT_LT(testing::difference(own[i].grad(), theirs[i].grad()), 1e-13) << i;
      }
      expect_same_gradients(model[static_cast<size_t>(rank)]->parameters(),
                            expected[static_cast<size_t>(rank)]->parameters());
      // A leaf itself.
      at::Tensor leaf = batch.data.clone().requires_grad_(), alone = batch.data.clone().requires_grad_();
      pipeline.step({leaf}, batch.target);
      run_as_one_process(expected, {alone, batch.target}, 4);
      if (rank == 0) {
        EXPECT_TRUE(at::equal(leaf.grad(), alone.grad()));
      }
      for (const auto& output : pipeline.eval({actual.input()})) EXPECT_FALSE(output.requires_grad());
    }
  });
}

TEST(Pipelines, ACheckpointIsComputedAgainOnce) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(61, 4), expected = random_model(61, 4);
    std::vector<PipelineStage> stages;
    int calls = 0;
    for (int64_t index = rank; index < 4; index += 2) {
      const auto layers = model[static_cast<size_t>(index)].ptr();
      const auto forward = [&calls, layers](const at::Tensor& x) {
        ++calls;
        return layers->forward(x);
      };
      stages.emplace_back([=](const at::Tensor& x) { return activation_checkpoint({}, forward, x); }, index,
                          4, PipelineStageOptions{.parameters = layers->parameters()});
    }
    PipelineRunner pipeline(stages, {.schedule = PipelineSchedule::kInterleavedZeroBubble,
                                     .n_microbatches = 4,
                                     .loss_fn = mean_of_squares});
    const Batch batch = random_batch(62, 8);
    pipeline.step({batch.data}, batch.target);
    EXPECT_EQ(calls, 2 * 4 * 2);  // stages, micro-batches, forward and backward
    run_as_one_process(expected, batch, 4);
    for (size_t i = static_cast<size_t>(rank); i < model.size(); i += 2)
      expect_same_gradients(model[i]->parameters(), expected[i]->parameters());
  });
}

/// The loss function has weights itself, such as the output layer's.
TEST(Pipelines, ACheckpointOfTheLossIsComputedAgainOnce) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(63, 4), expected = random_model(63, 4);
    const auto make_head = [] {
      torch::manual_seed(65);
      return nn::Linear(6, 6);
    };
    const nn::Linear head = make_head();
    expected.back()->push_back(make_head());
    std::vector<PipelineStage> stages;
    for (int64_t index = rank; index < 4; index += 2) {
      const auto layers = model[static_cast<size_t>(index)].ptr();
      auto parameters = layers->parameters();
      if (index == 3) {
        for (const auto& parameter : head->parameters()) parameters.push_back(parameter);
      }
      stages.emplace_back([=](const at::Tensor& x) { return layers->forward(x); }, index, 4,
                          PipelineStageOptions{.parameters = parameters});
    }
    int calls = 0;
    const auto loss_of_head = [&](const at::Tensor& output, const at::Tensor& target) {
      ++calls;
      return mean_of_squares(torch::linear(output, head->weight, head->bias), target);
    };
    const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
      return activation_checkpoint({}, loss_of_head, output, target);
    };
    PipelineRunner pipeline(
        stages, {.schedule = PipelineSchedule::kInterleavedZeroBubble, .n_microbatches = 4, .loss_fn = loss});
    const Batch batch = random_batch(64, 8);
    pipeline.step({batch.data}, batch.target);
    EXPECT_EQ(calls, rank == 1 ? 4 * 2 : 0);  // micro-batches, forward and backward
    run_as_one_process(expected, batch, 4);
    for (const PipelineStage& stage : stages) {
      expect_same_gradients(stage.parameters(),
                            expected[static_cast<size_t>(stage.stage_index())]->parameters());
    }
  });
}

TEST(Pipelines, ClippingMeasuresAllStages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(21, 2), expected = random_model(21, 2);
    PipelineRunner pipeline(stages_of(model, rank, 2), {.n_microbatches = 2, .loss_fn = nn::MSELoss()});
    const Batch batch = random_batch(22, 6);
    pipeline.step({batch.data}, batch.target);
    run_as_one_process(expected, batch, 2);
    Tensors all = expected[0]->parameters();
    for (const auto& parameter : expected[1]->parameters()) all.push_back(parameter);
    const double wanted = nn::utils::clip_grad_norm_(all, 0.05);
    const double norm = pipeline.clip_grad_norm_(0.05).item<double>();
    EXPECT_NEAR(norm, wanted, 1e-6 * wanted);
    const auto actual = model[static_cast<size_t>(rank)]->parameters(),
               clipped = expected[static_cast<size_t>(rank)]->parameters();
    for (size_t i = 0; i < actual.size(); ++i)
      EXPECT_LT(testing::difference(actual[i].grad(), clipped[i].grad()), 1e-6);
  });
}

TEST(Pipelines, SumsAreNotScaled) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(31, 2), expected = random_model(31, 2);
    const auto sum = [](const at::Tensor& output, const at::Tensor& target) {
      return (output - target).square().sum();
    };
    PipelineRunner pipeline(stages_of(model, rank, 2),
                            {.n_microbatches = 3, .loss_fn = sum, .scale_grads = false});
    const Batch batch = random_batch(32, 7);
    pipeline.step({batch.data}, batch.target);
    const auto data = at::tensor_split(batch.data, 3), target = at::tensor_split(batch.target, 3);
    for (size_t m = 0; m < 3; ++m)
      sum(expected[1]->forward(expected[0]->forward(data[m])), target[m]).backward();
    expect_same_gradients(model[static_cast<size_t>(rank)]->parameters(),
                          expected[static_cast<size_t>(rank)]->parameters());
  });
}

TEST(Pipelines, AGradScalerSkipsTheSameStepsOnAllStages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto model = random_model(41, 2), expected = random_model(41, 2);
    auto& own = model[static_cast<size_t>(rank)];
    GradScaler scaler({.device = at::kCPU, .init_scale = 1024.0, .process_group = default_group()});
    torch::optim::SGD optimizer(own->parameters(), 0.1);
    PipelineRunner pipeline(stages_of(model, rank, 2),
                            {.n_microbatches = 4,
                             .loss_fn = mean_of_squares,
                             .scale_loss = [&](const at::Tensor& seed) { return scaler.scale(seed); }});
    const Batch batch = random_batch(42, 8);
    const auto before = testing::copies(own->parameters());
    for (const bool overflows : {true, false}) {
      optimizer.zero_grad();
      pipeline.step({batch.data}, batch.target);
      // On the last stage alone.
      if (overflows && rank == 1)
        own->parameters()[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
      scaler.unscale_(optimizer);
      if (!overflows) {
        run_as_one_process(expected, batch, 4);
        expect_same_gradients(own->parameters(), expected[static_cast<size_t>(rank)]->parameters());
      }
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(testing::equal(own->parameters(), before), overflows);
      EXPECT_EQ(scaler.get_scale(), 512.0);
    }
  });
}

TEST(Pipelines, WithDataParallelismAreOneProcess) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    const int replica = mesh.get_local_rank("dp"), place = mesh.get_local_rank("pp");
    for (const PipelineSchedule schedule : kSchedules) {
      const int64_t per_rank = is_interleaved(schedule) ? 2 : 1;
      auto model = random_model(51, 2 * per_rank, at::kDouble);
      auto expected = random_model(51, 2 * per_rank, at::kDouble);
      if (replica == 1) {  // begins with other values, and gets the first replica's
        const at::NoGradGuard no_grad;
        for (auto& stage : model) {
          for (auto& parameter : stage->parameters()) parameter.add_(1);
        }
      }
      PipelineRunner pipeline(stages_of(model, place, 2, mesh.get_group("pp")),
                              {.schedule = schedule,
                               .n_microbatches = 4,
                               .loss_fn = mean_of_squares,
                               .data_parallel_group = mesh.get_group("dp")});
      Tensors own, wanted;
      for (size_t i = static_cast<size_t>(place); i < model.size(); i += 2) {
        for (const auto& parameter : model[i]->parameters()) own.push_back(parameter);
        for (const auto& parameter : expected[i]->parameters()) wanted.push_back(parameter);
      }
      torch::optim::SGD optimizer(own, torch::optim::SGDOptions(0.1).momentum(0.9));
      Tensors all;
      for (auto& stage : expected) {
        for (const auto& parameter : stage->parameters()) all.push_back(parameter);
      }
      torch::optim::SGD reference(all, torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 3; ++step) {
        const Batch batch = random_batch(static_cast<uint64_t>(60 + step), 16, at::kDouble);
        optimizer.zero_grad();
        reference.zero_grad();
        pipeline.step({batch.data.narrow(0, 8 * replica, 8)}, batch.target.narrow(0, 8 * replica, 8));
        run_as_one_process(expected, batch, 1);
        optimizer.step();
        reference.step();
        for (size_t i = 0; i < own.size(); ++i) EXPECT_LT(testing::difference(own[i], wanted[i]), 1e-13) << i;
      }
    }
  });
}

TEST(Pipelines, WithDataParallelismStagesOfARankMayShareALayer) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    const int replica = mesh.get_local_rank("dp"), place = mesh.get_local_rank("pp");
    for (const PipelineSchedule schedule :
         {PipelineSchedule::kInterleaved1F1B, PipelineSchedule::kInterleavedZeroBubble}) {
      auto model = random_model(52, 4, at::kDouble), expected = random_model(52, 4, at::kDouble);
      model[2] = model[0];
      expected[2] = expected[0];
      PipelineRunner pipeline(stages_of(model, place, 2, mesh.get_group("pp")),
                              {.schedule = schedule,
                               .n_microbatches = 4,
                               .loss_fn = mean_of_squares,
                               .data_parallel_group = mesh.get_group("dp")});
      const Batch batch = random_batch(53, 16, at::kDouble);
      pipeline.step({batch.data.narrow(0, 8 * replica, 8)}, batch.target.narrow(0, 8 * replica, 8));
      run_as_one_process(expected, batch, 1);
      for (size_t i = static_cast<size_t>(place); i < model.size(); i += 2) {
        const auto actual = model[i]->parameters(), wanted = expected[i]->parameters();
        for (size_t j = 0; j < actual.size(); ++j)
          EXPECT_LT(testing::difference(actual[j].grad(), wanted[j].grad()), 1e-13) << i << ' ' << j;
      }
    }
  });
}

TEST(Pipelines, WithDataParallelismUnusedParametersHaveNoGradient) {
  struct Partly : nn::Module {
    explicit Partly(bool uses) : uses(uses) {}
    torch::Tensor forward(const torch::Tensor& x) { return uses ? x * always * sometimes : x * always; }
    bool uses;
    torch::Tensor always = register_parameter("always", torch::full({6}, 2.0)),
                  sometimes = register_parameter("sometimes", torch::full({6}, 3.0)),
                  never = register_parameter("never", torch::ones({6}));
  };
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    const int replica = mesh.get_local_rank("dp"), place = mesh.get_local_rank("pp");
    const auto net = std::make_shared<Partly>(replica == 0);
    std::vector<PipelineStage> stages;
    stages.emplace_back(net, place, 2, PipelineStageOptions{.group = mesh.get_group("pp")});
    PipelineRunner pipeline(
        stages,
        {.n_microbatches = 4, .loss_fn = mean_of_squares, .data_parallel_group = mesh.get_group("dp")});
    for (int step = 0; step < 2; ++step) {
      const Batch batch = random_batch(static_cast<uint64_t>(80 + replica), 8);
      net->zero_grad();
      pipeline.step({batch.data}, batch.target);
      EXPECT_FALSE(net->never.grad().defined());
      ASSERT_TRUE(net->sometimes.grad().defined());
      EXPECT_GT(net->sometimes.grad().abs().sum().item<float>(), 0);
      EXPECT_TRUE(testing::same_everywhere(net->sometimes.grad(), mesh.get_group("dp")));
      EXPECT_TRUE(testing::same_everywhere(net->always.grad(), mesh.get_group("dp")));
    }
  });
}

TEST(Pipelines, RandomNumbersDependOnStepMicroBatchAndLayerAlone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    constexpr int64_t kLayers = 4;
    torch::manual_seed(rank);  // of no effect
    const auto layer = [](int64_t number, const at::Tensor& x, const at::Tensor& weight) {
      seed_pipeline_layer(number);
      return torch::dropout(x * weight, 0.5, /*train=*/true);
    };
    const Batch batch = random_batch(71, 12);
    Tensors expected;
    for (int64_t i = 0; i < kLayers; ++i) expected.push_back(torch::full({6}, 0.5 + i, at::requires_grad()));
    for (int64_t step = 0; step < 2; ++step) {
      const auto data = at::tensor_split(batch.data, 4), target = at::tensor_split(batch.target, 4);
      for (size_t m = 0; m < 4; ++m) {
        const PipelineRandomScope scope(77, 5 + step, static_cast<int64_t>(m));
        auto x = data[m];
        for (int64_t i = 0; i < kLayers; ++i) x = layer(i, x, expected[static_cast<size_t>(i)]);
        (mean_of_squares(x, target[m]) / 4.0).backward();
      }
    }
    EXPECT_GT(expected[3].grad().abs().sum().item<float>(), 0);
    // One layer a stage, and two; every other one is computed again in backward.
    for (const auto& [schedule, per_rank] :
         {std::pair{PipelineSchedule::k1F1B, 1}, std::pair{PipelineSchedule::kInterleavedZeroBubble, 2}}) {
      Tensors weights;
      for (const auto& one : expected) weights.push_back(one.detach().clone().requires_grad_());
      const int64_t count = 2 * per_rank, each = kLayers / count;
      std::vector<PipelineStage> stages;
      for (int64_t index = rank; index < count; index += 2) {
        stages.emplace_back(
            [=](at::Tensor x) {
              for (int64_t i = index * each; i < (index + 1) * each; ++i) {
                const at::Tensor& weight = weights[static_cast<size_t>(i)];
                x = i % 2 == 0 ? layer(i, x, weight) : activation_checkpoint({}, layer, i, x, weight);
              }
              return x;
            },
            index, count);
      }
      PipelineRunner pipeline(
          stages, {.schedule = schedule, .n_microbatches = 4, .loss_fn = mean_of_squares, .seed = 77});
      pipeline.set_steps(5);
      pipeline.step({batch.data}, batch.target);
      pipeline.step({batch.data}, batch.target);
      EXPECT_EQ(pipeline.steps(), 7);
      int compared = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        if (!weights[i].grad().defined()) continue;  // another rank's
        EXPECT_TRUE(at::equal(weights[i].grad(), expected[i].grad())) << i;
        ++compared;
      }
      EXPECT_EQ(compared, 2);
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_training_test
