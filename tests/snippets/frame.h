#pragma once

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/python_checkpoint.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/data/samplers/torch_sampler.h>
#include <lockstep/image/image_folder.h>
#include <lockstep/image/read_image.h>
#include <lockstep/lockstep.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>
#include <lockstep/parallel/pipeline/balance.h>
#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/parquet/parquet_batches.h>
#include <lockstep/parquet/parquet_rows.h>
#include <lockstep/parquet/row_group_collate.h>
#include <lockstep/parquet/row_group_sampler.h>

/// What the guides' fragments take for granted: tests/guides_test.py compiles each in the namespace of its
/// page, and links nothing. What several pages use stands in front, what one page uses in a namespace
/// page_NAME.
namespace guides {

struct Net : torch::nn::Cloneable<Net> {
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& images) { return fc1(images); }
  torch::nn::Embedding embedding{nullptr}, position{nullptr};
  torch::nn::Linear fc1{nullptr};
};

inline constexpr auto loss_of = [](auto&&...) -> torch::Tensor { return {}; };

/// What an ellipsis in parentheses stands for.
bool unsaid();

extern std::shared_ptr<Net> net;
extern lockstep::DistributedDataParallel<Net> model;
extern torch::optim::AdamW optimizer;
extern lockstep::lr_scheduler::CosineAnnealingLR schedule, scheduler;
extern lockstep::data::FashionMnist train;
extern lockstep::data::DistributedSampler sampler;
using Loader = decltype(lockstep::data::DataLoader(train, lockstep::data::DataLoaderOptions{}));
extern Loader loader, validation, batches;
extern lockstep::data::Example batch;
extern lockstep::DefaultGroup world;
extern lockstep::ProcessGroup group;
extern lockstep::GradScaler scaler;
extern torch::Tensor x, y, tensor, loss, images, labels, image;
extern int rank, world_size, epoch;
extern int64_t step, steps;
extern double learning_rate;
inline constexpr int kSteps = 4;

namespace page_checkpoints {
extern double validation_loss;
}  // namespace page_checkpoints
namespace page_communication_hooks {
struct State {};
extern lockstep::PowerSGDState state;
extern torch::Tensor gradient;
}  // namespace page_communication_hooks
namespace page_data {
using namespace lockstep::data;
extern c10::optional<at::Generator> generator;
std::vector<std::string> tokenise(std::vector<std::string> lines);
struct Saved {
  lockstep::StateDict loader;
  int64_t epoch = 0;
};
extern Saved checkpoint;
}  // namespace page_data
namespace page_data_parallel {}
namespace page_debugging_a_hang {}
namespace page_distributed_data_parallel {}
namespace page_from_pytorch_ddp {}
namespace page_fully_sharded_data_parallel {
struct BlockImpl : torch::nn::Module {};
extern lockstep::FullyShardedDataParallel<Net> model;
extern std::unique_ptr<lockstep::ShardedOptimizer<torch::optim::AdamW>> optimizer;
}  // namespace page_fully_sharded_data_parallel
namespace page_getting_started {}
namespace page_gpu {
extern at::Device device;
}  // namespace page_gpu
namespace page_gradient_accumulation_and_uneven_inputs {
extern lockstep::GradientAccumulation accumulation;
extern double tokens_here, tokens_of_the_group, tokens_of_my_group;
extern std::vector<torch::Tensor> my_shards, sharded_gradients, replicated_gradients;
}  // namespace page_gradient_accumulation_and_uneven_inputs
namespace page_images {
namespace image = lockstep::image;
using Options = image::ImageFolderOptions;
}  // namespace page_images
namespace page_from_spawn_to_several_hosts {}
namespace page_launching {
void work(int rank, const std::string& greeting);
}  // namespace page_launching
namespace page_learning_rate_schedules {
namespace lr = lockstep::lr_scheduler;
namespace swa = lockstep::swa_utils;
extern torch::Tensor validation_loss;
extern lr::ReduceLROnPlateau plateau;
extern lockstep::GradientAccumulation accumulation;
extern swa::AveragedModel<Net> average;
void train_one_epoch();
}  // namespace page_learning_rate_schedules
namespace page_logging_metrics {
extern lockstep::SummaryWriter writer;
struct Saved {
  int64_t step = 0;
};
extern Saved checkpoint;
struct PrintWriter : lockstep::MetricsWriter {
  void log_metrics(const lockstep::Metrics& metrics, int64_t step) override;
};
}  // namespace page_logging_metrics
namespace page_mixed_precision {
extern torch::Tensor loss_a, loss_b;
extern torch::optim::SGD optimizer_a, optimizer_b;
}  // namespace page_mixed_precision
namespace page_parquet {
using namespace lockstep::data;
extern std::string path;
extern ParquetDataset data;
extern RowGroupSampler sampler;
void step(Table& batch);
}  // namespace page_parquet
namespace page_pipelines {
struct TwoDevices : torch::nn::Module {
  TwoDevices(at::Device first, at::Device last);
  torch::Tensor forward(const torch::Tensor& x);
};
extern torch::nn::Sequential layers;
extern int local_rank;
}  // namespace page_pipelines
namespace page_pipelines {
extern torch::nn::Sequential encoder, layers;
extern torch::nn::Embedding embedding;
extern lockstep::PipelineStage stage;
}  // namespace page_pipelines
namespace page_process_groups {}
namespace page_profiling {}
namespace page_python_checkpoints {
extern lockstep::StateDict state;
}  // namespace page_python_checkpoints
namespace page_ranks_threads_cores {}
namespace page_README {}
namespace page_recovery {}
namespace page_sharded_optimizers {
extern torch::optim::AdamOptions options;
extern lockstep::ZeroRedundancyOptimizer optimizer;
inline constexpr auto hook = lockstep::allreduce_hook;
inline constexpr auto state = nullptr;
}  // namespace page_sharded_optimizers
namespace page_sweep {
extern int64_t epochs;
}  // namespace page_sweep
namespace page_sync_batch_norm {
struct ResNet : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& x);
};
}  // namespace page_sync_batch_norm
namespace page_trainer {
using lockstep::data::Example;
using torch::nn::functional::cross_entropy;
using Options = lockstep::TrainerOptions;
struct Settings {
  std::filesystem::path run;
};
extern Settings settings;
extern lockstep::data::TensorDataset<2> images;
}  // namespace page_trainer

}  // namespace guides
