#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <torch/torch.h>

#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/distributed_sampler.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::testing {

/// Three ranks have 5, 4 and 4 samples, so rank 0 alone has a third batch of two.
struct UnevenJob {
  UnevenJob(const CheckpointManagerOptions& checkpoint, int64_t stop_after,
            std::optional<int64_t> max_steps = {}, const TrainerCallbacks::Function& before_validation = {})
      : trainer(model, optimizer, loader, LossOf{},
                {.max_epochs = 2,
                 .max_steps = max_steps,
                 .validate_every_n_epochs = 2,
                 .checkpoint = checkpoint,
                 .progress_bar = false,
                 .callbacks = {{.after_step =
                                    [stop_after](TrainerCore& core) {
                                      if (core.step() == stop_after) core.stop();
                                    },
                                .before_validation = before_validation}}}) {
    trainer.validate_on(validation);
  }

  struct LossOf {
    template <class Model>
    torch::Tensor operator()(Model& net, const data::Example& batch) const {
      return loss_of(net, batch);
    }
  };
  DistributedDataParallel<SmallNet> model{std::make_shared<SmallNet>(0.3)};
  torch::optim::Adam optimizer{model.parameters(), torch::optim::AdamOptions(0.01)};
  data::DistributedEvalSampler sampler{13};
  Loader loader{Points{13}, {.batch_size = 2, .sampler = &sampler, .num_workers = 1}};
  Loader validation{Points{13}, {.batch_size = 2, .sampler = &sampler}};
  Trainer<DistributedDataParallel<SmallNet>, Loader, LossOf> trainer;
};

}  // namespace lockstep::testing
