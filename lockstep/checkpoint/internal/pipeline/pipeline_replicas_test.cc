#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parallel/pipeline/testing/models.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>

// Checkpoints of pipelines whose replicas share out the optimizers' states.
namespace lockstep::pipeline_replicas_test {
namespace {

using namespace pipeline_test;
using testing::run_ranks;

constexpr uint64_t kSteps = 3;

Batch batch_of(uint64_t step) {
  return random_batch(2 * step, 16, at::kDouble);
}

struct Trained {
  nn::Sequential model{nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 6),
                       nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 6)};
  TrainingState state;

  Trained() {
    torch::manual_seed(7);
    const at::NoGradGuard no_grad;
    model->to(at::kDouble);
    for (const at::Tensor& parameter : model->parameters()) parameter.normal_(0, 0.4);
  }
};

struct InOneProcess : Trained {
  torch::optim::Adam optimizer{model->parameters(), torch::optim::AdamOptions(0.01)};

  InOneProcess() {
    state.add_model("model", model);
    state.add_optimizer("optimizer", optimizer, model);
  }
  void train(uint64_t from) {
    std::vector<nn::Sequential> whole{model};
    for (uint64_t step = from; step < from + kSteps; ++step) {
      optimizer.zero_grad();
      run_as_one_process(whole, batch_of(step), 1);
      optimizer.step();
    }
  }
};

struct InPipelines : Trained {
  InPipelines(const DeviceMesh& mesh, const std::vector<int64_t>& balance)
      : replica(mesh.get_local_rank("dp")), stages(pipeline_stages(model, balance, mesh.get_group("pp"))) {
    runner = std::make_unique<PipelineRunner>(
        stages,
        PipelineOptions{
            .n_microbatches = 2, .loss_fn = mean_of_squares, .data_parallel_group = mesh.get_group("dp")});
    optimizer = std::make_unique<ZeroRedundancyOptimizer>(
        stages.front().parameters(), optimizer_class<torch::optim::Adam>(torch::optim::AdamOptions(0.01)),
        ZeroRedundancyOptions{.process_group = mesh.get_group("dp")});
    state.add_model("model", stages);
    state.add_optimizer("optimizer", *optimizer, stages);
  }
  void train(uint64_t from) {
    for (uint64_t step = from; step < from + kSteps; ++step) {
      const Batch batch = batch_of(step);
      optimizer->zero_grad();
      runner->step({batch.data.narrow(0, 8 * replica, 8)}, batch.target.narrow(0, 8 * replica, 8));
      optimizer->step();
    }
  }

  int replica;
  std::vector<PipelineStage> stages;
  std::unique_ptr<PipelineRunner> runner;
  std::unique_ptr<ZeroRedundancyOptimizer> optimizer;
};

TEST(PipelineReplicas, AnOptimizerThatTheyShareOutIsSavedAndLoadedAsThePlainOne) {
  const testing::SharedFolder folder;
  run_ranks(4,
            [&](int /*rank*/) {
              auto world = init_process_group();
              const auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
              const auto path = folder.path() / "step";
              InPipelines saved(mesh, {3, 3});
              saved.train(0);
              save_checkpoint(path, saved.state.state_dict(), {}, {.step = kSteps});

              InOneProcess undisturbed, whole;
              undisturbed.train(0);
              undisturbed.train(kSteps);
              whole.state.load_state_dict(load_checkpoint(path).state);
              whole.train(kSteps);
              InPipelines other(mesh, {2, 4});
              other.state.load_state_dict(load_checkpoint(path).state);
              other.train(kSteps);
              for (const auto& wanted : undisturbed.model->named_parameters()) {
                const auto actual = whole.model->named_parameters()[wanted.key()];
                EXPECT_LT(testing::difference(actual, wanted.value()), 1e-10) << wanted.key();
              }
              for (const auto& [name, actual] : other.stages.front().named_parameters()) {
                EXPECT_LT(testing::difference(actual, undisturbed.model->named_parameters()[name]), 1e-10)
                    << name;
              }
            },
            {.environment = folder.environment()});
}

}  // namespace
}  // namespace lockstep::pipeline_replicas_test
