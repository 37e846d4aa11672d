#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/lockstep.h>

#include "command_loop.h"
#include "networks.h"

namespace lockstep::benchmarks {

using DdpModel = lockstep::DistributedDataParallel<Model>;

/// Fresh batches for a network.
class Batches {
 public:
  Batches(const Network& network, c10::Device device) : network_(network), device_(device) {}

  // The memory of earlier batches is written anew: what is measured should not depend on malloc's history.
  void prepare(int64_t count) {
    if (!inputs_.defined() || inputs_.size(0) < count) {
      const auto batches = [&](const std::vector<int64_t>& sample) {
        std::vector<int64_t> sizes = {count, network_.batch_size};
        sizes.insert(sizes.end(), sample.begin(), sample.end());
        return sizes;
      };
      inputs_ =
          torch::empty(batches(network_.input_sizes),
                       torch::device(device_).dtype(network_.tokens > 0 ? torch::kLong : torch::kFloat));
      targets_ = torch::empty(batches(network_.target_sizes), torch::device(device_).dtype(torch::kLong));
    }
    network_.tokens > 0 ? inputs_.random_(0, network_.tokens) : inputs_.normal_();
    targets_.random_(0, network_.classes);
  }
  torch::Tensor input(int64_t batch) const { return inputs_[batch]; }
  torch::Tensor target(int64_t batch) const { return targets_[batch].flatten(); }

 private:
  Network network_;
  c10::Device device_;
  torch::Tensor inputs_, targets_;
};

/// A network with its optimizer and fresh batches.
class Trainer {
 public:
  /// With options it is wrapped by DistributedDataParallel, which is collective; without there is no
  /// communication.
  Trainer(const Network& network, const std::optional<lockstep::DistributedDataParallelOptions>& options,
          c10::Device device = c10::Device(c10::kCPU))
      : batches_(network, device),
        device_(device),
        net_(on_device(network.make(), device)),
        ddp_(options ? std::make_unique<DdpModel>(net_, *options) : nullptr),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(0.01)) {
    // So that the logging data tell of the last step, whichever it was: some clock readings.
    if (ddp_) ddp_->set_ddp_runtime_logging_sample_rate(1);
  }

  /// Null where there is no communication.
  DdpModel* ddp() { return ddp_.get(); }

  void prepare_batches(int64_t count) { batches_.prepare(count); }

  void step(int64_t batch) {
    optimizer_.zero_grad();
    const auto input = batches_.input(batch);
    const auto output = ddp_ ? (*ddp_)(input) : net_->forward(input);
    loss_ = torch::nn::functional::cross_entropy(output, batches_.target(batch));
    loss_.backward();
    optimizer_.step();
  }

  /// Gives back what only the next step needs again: others have their turn meanwhile, and memory is short.
  void rest() { optimizer_.zero_grad(); }

  float loss() const { return loss_.item<float>(); }
  c10::Device device() const { return device_; }

 private:
  static std::shared_ptr<Model> on_device(std::shared_ptr<Model> net, c10::Device device) {
    net->to(device);
    return net;
  }

  Batches batches_;
  c10::Device device_;
  std::shared_ptr<Model> net_;
  std::unique_ptr<DdpModel> ddp_;
  torch::optim::SGD optimizer_;
  torch::Tensor loss_;
};

/// Steps until a model with communication runs as it will: its buckets are built in the order of the
/// gradients and of the size that the first steps suggest, a hook that begins with plain all-reduces has
/// begun. All ranks call it.
template <class AnyTrainer>
void settle(AnyTrainer& trainer) {
  constexpr int64_t kSteps = 15;
  trainer.prepare_batches(1);
  for (int64_t i = 0; i < kSteps; ++i) trainer.step(0);
}

/// Who takes part in a timed burst of steps.
enum class Company {
  kNone,     ///< this rank alone
  kAll,      ///< all ranks begin together
  kAbreast,  ///< and pass a barrier after each step
};

/// Warms up, then times the command's iterations; processor time is the mean of them.
template <class AnyTrainer>
Timings time_steps(AnyTrainer& trainer, const Command& command, Company company) {
  trainer.prepare_batches(command.warmup + command.iterations);
  for (int64_t i = 0; i < command.warmup; ++i) trainer.step(i);
  lockstep::synchronize(trainer.device());
  if (company != Company::kNone) lockstep::barrier();
  Timings timings;
  timings.wall.reserve(command.iterations);
  const int64_t cpu_before = cpu_clock();
  int64_t before = wall_clock();
  for (int64_t i = 0; i < command.iterations; ++i) {
    trainer.step(command.warmup + i);
    if (company == Company::kAbreast) lockstep::barrier();
    const int64_t now = wall_clock();
    timings.wall.push_back(now - before);
    before = now;
  }
  if (!trainer.device().is_cpu()) {
    // The program runs ahead of the device: only all of them together have a time.
    const int64_t last_call = before;
    lockstep::synchronize(trainer.device());
    int64_t all = wall_clock() - last_call;
    for (const int64_t each : timings.wall) all += each;
    timings.wall.assign(timings.wall.size(), all / command.iterations);
  }
  timings.cpu = {(cpu_clock() - cpu_before) / command.iterations};
  TORCH_CHECK(std::isfinite(trainer.loss()), "the loss is ", trainer.loss(),
              ": these steps computed nothing of use");
  trainer.rest();
  return timings;
}

}  // namespace lockstep::benchmarks
