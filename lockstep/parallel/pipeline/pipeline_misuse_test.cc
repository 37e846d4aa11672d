#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// What pipelines refuse.
namespace lockstep::pipeline_misuse_test {
namespace {

using namespace pipeline_test;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

TEST(PipelinesMisuse, StagesAreChecked) {
  const nn::Linear layer(2, 2);
  const auto refused = [](auto&& make) { return message_of<c10::ValueError>(make); };
  EXPECT_THAT(refused([&] { PipelineStage(layer, 3, 3); }), HasSubstr("Stage index 3 is out of range of 3"));
  EXPECT_THAT(refused([&] { PipelineStage(layer, 0, 0); }), HasSubstr("out of range"));
  EXPECT_THAT(refused([&] { PipelineStage(nn::Linear(nullptr), 0, 2); }),
              HasSubstr("no module in the holder"));
  EXPECT_THAT(refused([&] { PipelineStage(layer, 1, 3, {.outputs_to = {{1}}}); }),
              HasSubstr("output 0 shall go to stage 1; it can go to the stages from 2 to 2"));
  EXPECT_THAT(refused([&] { PipelineStage(layer, 2, 3, {.outputs_to = {{2}}}); }),
              HasSubstr("go to the caller"));
  EXPECT_THAT(refused([&] {
                PipelineStage(layer, 0, 2, {.tied = {{"w", at::ones({2})}}});
              }),
              HasSubstr("'w' is not among its parameters"));
  EXPECT_THAT(refused([&] { PipelineStage(layer, 0, 2, {.parameters = {at::ones({2})}}); }),
              HasSubstr("a module knows its parameters"));
}

TEST(PipelinesMisuse, ModulesThatAverageTheirGradientsAreRefused) {
  struct Holds : nn::Module {
    explicit Holds(const std::shared_ptr<DistributedDataParallel<nn::LinearImpl>>& wrapped)
        : layer(register_module("layer", wrapped)) {}
    torch::Tensor forward(const torch::Tensor& x) { return layer->forward(x); }
    std::shared_ptr<DistributedDataParallel<nn::LinearImpl>> layer;
  };
  run_ranks(1, [](int) {
    auto world = init_process_group();
    const auto wrapped = std::make_shared<DistributedDataParallel<nn::LinearImpl>>(nn::Linear(2, 2));
    const auto text = HasSubstr("give the module itself");
    EXPECT_THAT(message_of<c10::ValueError>([&] { PipelineStage(wrapped, 0, 1); }), text);
    const auto holds = std::make_shared<Holds>(wrapped);
    EXPECT_THAT(message_of<c10::ValueError>([&] { PipelineStage(holds, 0, 1); }), text);
  });
}

TEST(PipelinesMisuse, ADataParallelGroupHasTheSameStages) {
  run_ranks(4, [](int /*rank*/) {
    auto world = init_process_group();
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    const nn::Linear layer(6, 6);
    const auto runner = [&](const std::string& pipeline, const std::string& replicas) {
      const int place = mesh.get_local_rank(pipeline);
      PipelineRunner(PipelineStage(layer, place, 2, {.group = mesh.get_group(pipeline)}),
                     {.data_parallel_group = mesh.get_group(replicas)});
    };
    EXPECT_THAT(message_of<c10::ValueError>([&] { runner("pp", "pp"); }),
                HasSubstr("data_parallel_group has rank"));
    runner("pp", "dp");
  });
}

TEST(PipelinesMisuse, ASyncBatchNormOverRanksWithoutItsStageIsRefusedOnAll) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    const auto pipeline = mesh.get_group("pp"), replicas = mesh.get_group("dp");
    const int place = mesh.get_local_rank("pp");
    const auto make = [&](const nn::Sequential& layers, const std::optional<ProcessGroup>& data_parallel) {
      PipelineRunner(PipelineStage(layers, place, 2, {.group = pipeline}),
                     {.data_parallel_group = data_parallel});
    };
    const auto built = [](const ProcessGroup& group) {
      return nn::Sequential(nn::Linear(6, 6), SyncBatchNorm(nn::BatchNormOptions(6), group));
    };
    const auto converted = [&](const ProcessGroup& group) {
      nn::Sequential layers(nn::Linear(6, 6), nn::BatchNorm1d(6));
      if (place == 1) convert_sync_batchnorm_(*layers, group);
      return layers;
    };
    const auto refused = [&](const nn::Sequential& layers, const std::optional<ProcessGroup>& data_parallel) {
      return message_of<c10::ValueError>([&] { make(layers, data_parallel); });
    };
    const auto remedy = HasSubstr("give the layer the data_parallel_group");
    const std::string first = "a SyncBatchNorm of its stage 0 normalises over the ranks ";
    EXPECT_THAT(refused(built({}), replicas),
                AllOf(HasSubstr(first + "[0, 1, 2, 3], of which [1, 3]"), remedy));
    EXPECT_THAT(refused(built(pipeline), replicas),
                HasSubstr(first + (rank < 2 ? "[0, 1], of which [1]" : "[2, 3], of which [3]")));
    EXPECT_THAT(refused(built(replicas), {}),
                HasSubstr(first + (rank < 2 ? "[0, 2], of which [2]" : "[0, 2], of which [0]")));
    EXPECT_THAT(refused(converted({}), replicas),
                AllOf(HasSubstr("a SyncBatchNorm of its stage 1"), HasSubstr("of which [0, 2]"), remedy));
    // Nothing is broken by that.
    make(built(replicas), replicas);
    make(converted(replicas), replicas);
  });
}

TEST(PipelinesMisuse, ARefusedPipelineIsToldToTheReplicas) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    const nn::Linear layer(6, 6);
    const auto make = [&](int64_t place) {
      PipelineRunner(PipelineStage(layer, place, 2, {.group = mesh.get_group("pp")}),
                     {.data_parallel_group = mesh.get_group("dp")});
    };
    const int place = mesh.get_local_rank("pp");
    const auto text = message_of<c10::ValueError>([&] { make(rank == 1 ? 0 : place); });
    EXPECT_THAT(text, HasSubstr("on rank 1, it has stage 0 in the place of stage 1"));
    if (rank > 1) {
      EXPECT_THAT(text, HasSubstr("its data_parallel_group has rank 0, whose pipeline is refused"));
    }
    make(place);  // nothing is broken by that
  });
}

/// A module or tensor of a class's own that is none of its layers.
struct Beside : nn::SequentialImpl {
  enum class What { kLayerBefore, kParameter, kBuffer };
  explicit Beside(What what) {
    if (what == What::kLayerBefore) register_module("before", nn::Linear(3, 3));
    if (what == What::kParameter) register_parameter("scale", torch::ones({1}));
    if (what == What::kBuffer) register_buffer("mean", torch::zeros({1}));
    push_back(nn::Linear(3, 3));
    push_back(nn::Tanh());
  }
};

TEST(PipelinesMisuse, WhatIsBesideTheLayersOfASequentialIsRefused) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    for (const auto what : {Beside::What::kLayerBefore, Beside::What::kParameter, Beside::What::kBuffer}) {
      const nn::Sequential module(
          std::static_pointer_cast<nn::SequentialImpl>(std::make_shared<Beside>(what)));
      EXPECT_THAT(message_of<c10::ValueError>([&] {
                    pipeline_stages(module, {1, 1});
                  }),
                  HasSubstr("of its own beside its layers"));
    }
  });
}

TEST(PipelinesMisuse, WhatRanksDontAgreeOnIsRefusedOnAll) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const nn::Linear layer(6, 6);
    const auto refused = [&](const std::vector<PipelineStage>& stages, const PipelineOptions& options) {
      return message_of<c10::ValueError>([&] { PipelineRunner(stages, options); });
    };
    const PipelineStage right(layer, rank, 2);
    EXPECT_THAT(refused({right}, {.n_microbatches = 2 + rank}),
                AllOf(HasSubstr("different pipelines: rank 0 1F1B of 2 stages, with 2 micro-batches"),
                      HasSubstr("rank 1 1F1B of 2 stages, with 3 micro-batches")));
    EXPECT_THAT(refused({PipelineStage(layer, 1 - rank, 2)}, {}),
                HasSubstr("on rank 0, it has stage 1 in the place of stage 0"));
    EXPECT_THAT(refused({PipelineStage(layer, rank, 3)}, {}), HasSubstr("it has 1 stages of 3"));
    EXPECT_THAT(refused({right}, {.n_microbatches = 0}), HasSubstr("0 micro-batches"));
    EXPECT_THAT(refused({PipelineStage(layer, rank, 4), PipelineStage(layer, rank + 2, 4)}, {}),
                HasSubstr("has one stage on each rank"));
    const auto weight = torch::ones({2 + rank}).requires_grad_();
    const auto identity = [](const at::Tensor& x) { return x; };
    EXPECT_THAT(
        refused({PipelineStage(identity, rank, 2, {.tied = {{"w", weight}}, .parameters = {weight}})}, {}),
        HasSubstr("the tied weight 'w' is Float [2] on stage 0 and Float [3] on stage 1"));
    PipelineStageOptions alone;
    if (rank == 1) alone = {.tied = {{"w", weight}}, .parameters = {weight}};
    EXPECT_THAT(refused({PipelineStage(identity, rank, 2, alone)}, {}), HasSubstr("is on stage 1 alone"));
    PipelineStageOptions nowhere;
    if (rank == 0) nowhere.outputs_to = {{}};
    EXPECT_THAT(refused({PipelineStage(identity, rank, 2, nowhere)}, {}),
                HasSubstr("no stage sends anything to stage 1"));
    const auto on_rank_0_alone = rank == 0 ? std::vector<PipelineStage>{right} : std::vector<PipelineStage>{};
    EXPECT_THAT(refused(on_rank_0_alone, {}), HasSubstr("on rank 1, it has no stage"));
    // Nothing is broken by that.
    PipelineRunner pipeline(right, {.n_microbatches = 2});
    EXPECT_THAT(message_of<c10::ValueError>([&] {
                  pipeline.step({at::ones({2, 6})});
                }),
                HasSubstr("loss function"));
    pipeline.eval({at::ones({2, 6})});
  });
}

TEST(PipelinesMisuse, ARankWithoutStagesIsToldInWhateverGroupTheOthersWait) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    std::vector<PipelineStage> stages;
    if (rank == 0) stages.emplace_back(nn::Linear(6, 6), 0, 2, PipelineStageOptions{.group = group});
    const auto make = [&] { PipelineRunner(stages, {}); };
    if (rank == 0) {
      EXPECT_THAT(message_of<c10::DistBackendError>(make), HasSubstr("rank 1"));
    } else {
      EXPECT_THAT(message_of<c10::ValueError>(make), HasSubstr("this one gave none"));
    }
    shrink_group();  // until here no rank ends, so that none is told by that
  });
}

TEST(PipelinesMisuse, SparseAndQuantizedTensorsBetweenStagesAreRefused) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto sparse = [](const at::Tensor& x) { return x.to_sparse(); };
    const auto quantized = [](const at::Tensor& x) {
      return at::quantize_per_tensor(x, /*scale=*/0.1, /*zero_point=*/0, at::kQUInt8);
    };
    for (const auto& of_first : {std::function<at::Tensor(const at::Tensor&)>(sparse),
                                 std::function<at::Tensor(const at::Tensor&)>(quantized)}) {
      const auto identity = [](const at::Tensor& x) { return x; };
      const auto group = new_group();
      const auto stage = rank == 0 ? PipelineStage(of_first, 0, 2, {.group = group})
                                   : PipelineStage(identity, 1, 2, {.group = group});
      PipelineRunner pipeline(stage, {.n_microbatches = 2});
      const auto run = [&] { pipeline.eval({at::ones({4, 6})}); };
      const auto text =
          HasSubstr("stages of a pipeline pass each other dense tensors, not sparse or quantized");
      if (rank == 0) {
        EXPECT_THAT(message_of<c10::ValueError>(run), text);
      } else {
        EXPECT_THAT(message_of<c10::DistBackendError>(run), AllOf(HasSubstr("rank 0"), text));
      }
    }
  });
}

TEST(PipelinesMisuse, WhatAStepLacksIsToldOnAllRanks) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear layer(6, 6);
    struct Mistake {
      Tensors inputs;
      at::Tensor target;
      int culprit;
      std::string text;
    };
    const auto x = at::ones({4, 6});
    for (const Mistake& mistake :
         {Mistake{{}, x, 0, "needs the batch's inputs"}, Mistake{{x}, {}, 1, "needs the batch's target"},
          Mistake{{at::ones({1, 6})}, x, 0, "input 0 has 1 rows, which can't make 2 micro-batches"},
          Mistake{{x, at::ones({3})}, x, 0, "input 1 has 3 rows, and input 0 has 4"},
          Mistake{{x, x}, x, 0, "it does not take 2 tensors"},
          Mistake{{x}, at::ones({}), 1, "must have rows"}}) {
      auto group = new_group();
      const auto call = [](auto& layer) {
        return [&layer](const at::Tensor& x) { return layer->forward(x); };
      };
      PipelineRunner pipeline(
          PipelineStage(call(layer), rank, 2, {.group = group, .parameters = layer->parameters()}),
          {.n_microbatches = 2, .loss_fn = mean_of_squares});
      const auto step = [&] { pipeline.step(mistake.inputs, mistake.target); };
      if (rank == mistake.culprit) {
        EXPECT_THAT(message_of<c10::ValueError>(step), HasSubstr(mistake.text));
      } else {
        EXPECT_THAT(message_of<c10::DistBackendError>(step),
                    AllOf(HasSubstr("rank " + std::to_string(mistake.culprit)), HasSubstr(mistake.text)));
      }
      EXPECT_THAT(message_of<c10::Error>(step), HasSubstr("has failed before"));
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_misuse_test
