#pragma once

/// What most training programs use. Include <torch/torch.h> beside it for modules and optimizers. Headers of
/// their own have, among others, communication hooks, DataParallel, Pipe, IDX and CSV files, TorchSampler,
/// state_dict() and load_state_dict(), files of torch.save, and the components (image, parquet, mlflow,
/// cuda); docs/headers.md has all.

#include <lockstep/base/errors.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/datasets/concat_dataset.h>
#include <lockstep/data/datasets/fashion_mnist.h>
#include <lockstep/data/datasets/subset.h>
#include <lockstep/data/datasets/tensor_dataset.h>
#include <lockstep/data/datasets/text_dataset.h>
#include <lockstep/data/device_loader.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/data/samplers/rank_share.h>
#include <lockstep/data/worker_info.h>
#include <lockstep/device/device.h>
#include <lockstep/launch/spawn.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/meta_device_guard.h>
#include <lockstep/nn/sync_batch_norm/sync_batch_norm.h>
#include <lockstep/observe/combined_writer.h>
#include <lockstep/observe/csv_writer.h>
#include <lockstep/observe/json_lines_writer.h>
#include <lockstep/observe/metrics_writer.h>
#include <lockstep/observe/progress_bar.h>
#include <lockstep/observe/summary_writer.h>
#include <lockstep/observe/trial.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/optim/model_averaging.h>
#include <lockstep/optim/post_local_sgd_optimizer.h>
#include <lockstep/optim/swa_utils.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/gradient_accumulation.h>
#include <lockstep/parallel/ddp/hooks/zero_hook.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>
#include <lockstep/train/batch_size_finder.h>
#include <lockstep/train/robust_loop.h>
#include <lockstep/train/trainer.h>
