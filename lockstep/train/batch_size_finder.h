#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/sampler.h>
#include <lockstep/device/generator_state.h>
#include <lockstep/parallel/ddp/options.h>

namespace lockstep {

/// Lightning's arguments of scale_batch_size(), with its names and defaults but for the last three.
struct BatchSizeFinderOptions {
  enum class Mode {
    power,     ///< doubles until it does not fit
    binsearch  ///< and then halves the interval until it is one
  };
  Mode mode = Mode::power;
  int64_t steps_per_trial = 3;  ///< one more goes before, untimed
  int64_t init_val = 2;         ///< the first batch size tried
  int64_t max_trials = 25;
  int64_t max_val = 8192;  ///< none larger is tried; Lightning's default
  double memory_share =
      0.75;  ///< of the machine's available memory that all ranks together may take; CPU only
};

/// What was found out about one batch size.
struct BatchSizeTrial {
  int64_t batch_size = 0;  ///< samples on each rank
  bool fits = false;
  double samples_per_second = 0;  ///< of all ranks together; 0 if it does not fit
  int64_t bytes = 0;              ///< that the greediest rank took on top, at most; 0 if it does not fit
  std::string reason = {};        ///< why it does not fit
};

struct BatchSizeReport {
  int64_t batch_size = 0;              ///< the largest that fits on every rank; 0: not even init_val
  std::vector<BatchSizeTrial> trials;  ///< in the order in which they were made
  std::string table() const;           ///< of the trials, for people
};

namespace train {

/// A state that trials change.
class TrialState {
 public:
  TrialState(std::vector<NamedTensor> tensors, torch::optim::Optimizer& optimizer);
  void restore();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // the tensor, its values
  torch::optim::Optimizer& optimizer_;
  std::string optimizer_state_;
  GeneratorStates random_;
};

/// The indices 0, 1, …, again and again, `count` of them.
class RoundRobin final : public data::Sampler {
 public:
  RoundRobin(int64_t size, int64_t count) : size_(size), count_(count) {}
  int64_t size() const override { return count_; }
  std::vector<int64_t> indices() override;

 private:
  int64_t size_;
  int64_t count_;
};

/// The search. `step(batch_size)` does an optimizer step on `device`; `move_to` takes the model to another
/// group. Restores `state` at the end, also when it throws. Pure of the user's types.
BatchSizeReport find_batch_size(const std::function<void(int64_t batch_size)>& step,
                                const std::function<void(const ProcessGroup&)>& move_to, c10::Device device,
                                const BatchSizeFinderOptions& options, TrialState& state);

}  // namespace train

/// The largest batch size per rank with which training steps fit into memory on all ranks, and the throughput
/// with each size tried. Collective. For a DistributedDataParallel in the default group, or any module in a
/// job of one process:
///
///     const auto found = lockstep::scale_batch_size(model, optimizer, train_set, loss_of);
///     if (world.rank() == 0) std::cout << found.table();
///     DataLoader loader(train_set, {.batch_size = found.batch_size / 2, …});   // leave some room
///
/// Each trial takes steps on batches of the data set's first samples. Model, optimizer and torch's random
/// numbers are afterwards as they were; gradients are dropped. `loss_of` is as for a Trainer.
///
/// Memory on the CPU is not like a GPU's: an allocation that is too large succeeds, and the kernel kills a
/// process later, when the pages are touched. So a size is tried only if what the trials before took, carried
/// on in a straight line, leaves all ranks together below memory_share of what machine and control group have
/// available. Allocations that do fail (ulimit -v) end a trial on all ranks; then all process groups but a
/// new default one are gone, so call this before making others. Sizes that are fast stop growing long before
/// those that fit do: look at the table.
///
/// On a GPU an allocation that is too large fails, so there sizes are simply tried, and the memory told is
/// the device's. Batches are brought to the device of the model's first parameter.
///
/// Throws c10::ValueError for options that make no sense, an empty data set, and a ZeroRedundancyOptimizer,
/// whose group would be gone after a trial that failed; and what loss_of throws.
/// lightning/pytorch/tuner/batch_size_scaling.py.
template <class Model, class Dataset, class LossFunction, class Collate = data::DefaultCollate>
BatchSizeReport scale_batch_size(Model& model, torch::optim::Optimizer& optimizer, const Dataset& dataset,
                                 LossFunction loss_of, const BatchSizeFinderOptions& options = {},
                                 Collate collate = {}) {
  TORCH_CHECK_VALUE(dataset.size() > 0, "scale_batch_size: the data set is empty");
  const auto parameters = model.parameters();
  const auto device = parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().device();
  const auto step = [&](int64_t batch_size) {
    train::RoundRobin sampler(static_cast<int64_t>(dataset.size()), batch_size);
    data::DataLoader<Dataset, Collate> loader(dataset, {.batch_size = batch_size, .sampler = &sampler},
                                              collate);
    for (auto& batch : loader) {
      for_each_owned_tensor(batch,
                            [&](at::Tensor& tensor) { tensor = tensor.to(tensor.options().device(device)); });
      optimizer.zero_grad();
      auto output = loss_of(model, batch);
      if constexpr (requires { output.loss; }) {
        output.loss.backward();
      } else {
        output.backward();
      }
      optimizer.step();
    }
  };
  const auto move_to = [&](const ProcessGroup& group) {
    if constexpr (requires { model.update_process_group(group); }) model.update_process_group(group);
  };
  std::vector<NamedTensor> tensors;
  for (const auto& item : model.named_parameters()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers()) tensors.emplace_back(item.key(), item.value());
  train::TrialState state(std::move(tensors), optimizer);
  return train::find_batch_size(step, move_to, device, options, state);
}

}  // namespace lockstep
