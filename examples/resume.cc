// Trains on through whatever kills it: started again, it goes on where it was, and ends with the weights of a
// run that was left alone, having seen each sample exactly once per epoch. It prints both.
//
//     lockstep run --nproc-per-node 3 ./resume --checkpoints run      # kill a rank, and start it again
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <thread>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/train/robust_loop.h>
#include <lockstep/train/trainer.h>

namespace {

namespace nn = torch::nn;
using lockstep::data::Example;

struct Settings {
  std::string checkpoints = "run";
  int64_t epochs = 4;
  int64_t samples = 120;
  int64_t batch_size = 4;
  int64_t every_steps = 2;
  int64_t step_milliseconds = 0;
  bool must_resume = false;
};

/// Sample i: eight numbers that follow from i. Its target is i itself, so that the program knows what it saw.
struct Waves {
  int64_t size() const { return count; }
  Example get(int64_t i) const {
    return {torch::sin(torch::arange(1, 9) * (0.1 * static_cast<double>(i))), torch::tensor(i)};
  }
  int64_t count = 0;
};

struct Net : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(hidden(x))); }
  nn::Linear hidden = register_module("hidden", nn::Linear(8, 32));
  nn::Linear output = register_module("output", nn::Linear(32, 1));
};

/// A state of the program's own: how often each sample was seen in each epoch, on all ranks together. What of
/// it belongs to a step is counted when the step is done, so that a step done twice counts once.
class Seen {
 public:
  Seen(int64_t epochs, int64_t samples)
      : counts_(torch::zeros({epochs, samples}, torch::kLong)),
        of_step_(torch::zeros({samples}, torch::kLong)) {}

  void begin_step() { of_step_.zero_(); }
  /// Of all ranks, which call it equally often.
  void note(const torch::Tensor& indices) {
    auto mine = torch::bincount(indices, {}, of_step_.numel());
    lockstep::all_reduce(mine);
    of_step_ += mine;
  }
  void end_step(int64_t epoch) { counts_[epoch] += of_step_; }
  bool each_once() const { return counts_.eq(1).all().item<bool>(); }

  lockstep::StateDict state_dict() const { return {{"counts", counts_}}; }
  void load_state_dict(const lockstep::StateDict& state) {
    counts_.copy_(lockstep::state_value<torch::Tensor>(state, "counts", "Seen"));
  }

 private:
  torch::Tensor counts_, of_step_;
};

/// Tells weights apart that differ in a bit (FNV-1a).
uint64_t fingerprint(const nn::Module& module) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const auto& parameter : module.parameters()) {
    const auto values = parameter.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(values.const_data_ptr());
    for (size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3U;
  }
  return hash;
}

int train(const Settings& settings) {
  auto world = lockstep::init_process_group();
  torch::manual_seed(0);
  lockstep::DistributedDataParallel model(std::make_shared<Net>());
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
  lockstep::lr_scheduler::StepLR schedule(optimizer, 1, 0.7);
  lockstep::data::DistributedSampler sampler(settings.samples);
  lockstep::data::DataLoader loader(
      Waves{settings.samples}, {.batch_size = settings.batch_size, .sampler = &sampler, .num_workers = 1});

  Seen seen(settings.epochs, settings.samples);
  const auto loss_of = [&](auto& net, const Example& batch) {
    seen.note(batch.target);
    return nn::functional::mse_loss(net.forward(batch.data).squeeze(1), batch.data.sum(1));
  };
  const auto step_time = std::chrono::milliseconds(settings.step_milliseconds);
  lockstep::Trainer trainer(
      model, optimizer, loader, loss_of,
      {.max_epochs = settings.epochs,
       .clip_grad_norm = 1.0,
       .scheduler = &schedule,
       .checkpoint = lockstep::CheckpointManagerOptions{.directory = settings.checkpoints,
                                                        .every_steps = settings.every_steps,
                                                        .must_resume = settings.must_resume},
       .progress_bar = false,
       .callbacks = {
           {.before_step = [&](auto&) { seen.begin_step(), std::this_thread::sleep_for(step_time); },
            .after_step = [&](auto& core) { seen.end_step(core.epoch()); }}}});
  trainer.state().add("seen", seen);

  lockstep::RobustLoop loop(trainer);
  if (const int status = loop.run(); status != 0) return status;
  if (world.rank() == 0) {
    std::printf("each sample once in each epoch: %s\nweights: %016llx\n", seen.each_once() ? "yes" : "no",
                static_cast<unsigned long long>(fingerprint(*model.module)));
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains on through whatever kills it. Start it with: lockstep run --nproc-per-node N resume …");
  app.add_option("--checkpoints", settings.checkpoints, "folder for them; to start anew, name another")
      ->capture_default_str();
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--samples", settings.samples, "in an epoch; a multiple of the ranks, or some come twice")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples a step on each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--every-steps", settings.every_steps, "save every so many steps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--step-milliseconds", settings.step_milliseconds, "how much longer to make a step")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_flag("--must-resume", settings.must_resume, "an error where there is no checkpoint to go on from");
  CLI11_PARSE(app, argc, argv);
  std::printf("process %d\n", static_cast<int>(::getpid()));
  std::fflush(stdout);
  return train(settings);
} catch (const c10::Error& error) {
  std::cerr << "resume: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "resume: " << error.what() << std::endl;
  return 1;
}
