// Profiles a training as PyTorch's tutorials do: one step waits, one warms up, three are recorded, twice, with shapes,
// memory and stacks. Rank 0 prints which operators took longest. docs/profiling.md tells how to read the rest:
//
//     lockstep run --nproc-per-node 2 ./profile
//     lockstep inspect trace --merge all.json.gz log/profiler
#include <cstdio>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
using lockstep::profiler::RecordFunction;

struct Settings {
  std::string dir = "./log/profiler";
  int64_t steps = 10;
  int64_t batch_size = 64;
  int64_t hidden = 512;
  int64_t slow_rank = -1;  // one that has more to do, to see how the trace shows it
};

constexpr int64_t kInputs = 784;
constexpr int64_t kClasses = 10;

struct Net : nn::Module {
  explicit Net(int64_t size)
      : hidden(register_module("hidden", nn::Linear(kInputs, size))),
        last(register_module("last", nn::Linear(size, kClasses))) {}
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(hidden(x))); }
  nn::Linear hidden;
  nn::Linear last;
};

void train(const Settings& settings) {
  auto world = lockstep::init_process_group();
  torch::manual_seed(0);
  lockstep::DistributedDataParallel<Net> model(std::make_shared<Net>(settings.hidden));
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));

  torch::manual_seed(1 + world.rank());  // each rank has samples of its own
  lockstep::data::TensorDataset samples(torch::randn({settings.steps * settings.batch_size, kInputs}),
                                        torch::randint(kClasses, {settings.steps * settings.batch_size}));
  lockstep::data::DataLoader loader(samples, {.batch_size = settings.batch_size, .num_workers = 1});

  const auto write_trace = lockstep::profiler::tensorboard_trace_handler(settings.dir);
  lockstep::Profiler profiler(
      {.schedule = lockstep::profiler::schedule({.wait = 1, .warmup = 1, .active = 3, .repeat = 2}),
       .on_trace_ready =
           [&](lockstep::Profiler& ready) {
             if (world.rank() == 0) {
               std::cout << ready.key_averages().table({.sort_by = "self_cpu_time_total", .row_limit = 10});
             }
             write_trace(ready);
           },
       .record_shapes = true,
       .profile_memory = true,
       .with_stack = true});
  for (auto& batch : loader) {
    optimizer.zero_grad();
    auto loss = nn::functional::cross_entropy(model(batch.data), batch.target);
    if (world.rank() == settings.slow_rank) {
      const RecordFunction scope("more to do");
      for (int i = 0; i < 20; ++i) torch::mm(torch::ones({256, 256}), torch::ones({256, 256}));
    }
    loss.backward();
    {
      const RecordFunction scope("optimizer");
      optimizer.step();
    }
    profiler.step();
  }
  profiler.stop();
  std::printf("rank %d: traces are in %s\n", world.rank(), settings.dir.c_str());
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app("Profiles a training, step by step. Start it with: lockstep run --nproc-per-node N …");
  app.add_option("--dir", settings.dir, "where the traces go")->capture_default_str();
  app.add_option("--steps", settings.steps, "steps of the training")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples of a rank in a step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--hidden", settings.hidden, "size of the hidden layer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--slow-rank", settings.slow_rank, "a rank that has more to do than others");
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "profile: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "profile: " << error.what() << std::endl;
  return 1;
}
