// Gradient accumulation: k micro-batches make the optimizer steps of one large batch, with 1/k of the memory
// for activations, and are reduced once. Trains both ways, and prints the difference and what was
// communicated.
//
//     lockstep run --nproc-per-node 2 ./accumulation --steps 4
#include <algorithm>
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;

struct Settings {
  int64_t steps = 4;
  int64_t batch_size = 16;
  int64_t updates = 20;
  int64_t hidden = 256;
  int64_t seed = 0;
};

constexpr int64_t kInputs = 64;
constexpr int64_t kClasses = 10;

/// In float64, to show that nothing but rounding differs. Without BatchNorm, which would see the
/// micro-batches.
struct Net : nn::Module {
  explicit Net(int64_t size)
      : hidden(register_module("hidden", nn::Linear(kInputs, size))),
        last(register_module("last", nn::Linear(size, kClasses))) {
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(hidden(x))); }
  nn::Linear hidden;
  nn::Linear last;
};

struct Outcome {
  torch::Tensor weights;        // all parameters in a row
  int64_t reductions = 0;       // in how many backward passes gradients were reduced
  int64_t bytes = 0;            // that were reduced
  int64_t largest_forward = 0;  // samples in one forward
};

/// Trains on `updates` large batches, each in `steps` parts.
Outcome train(const Settings& settings, int64_t steps) {
  torch::manual_seed(settings.seed);
  auto net = std::make_shared<Net>(settings.hidden);
  lockstep::DistributedDataParallel<Net> model(net);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  torch::manual_seed(settings.seed + 1 + lockstep::get_rank());  // each rank has samples of its own
  const int64_t large = settings.steps * settings.batch_size;
  Outcome outcome;
  lockstep::GradientAccumulation accumulation(model, {.steps = steps});
  for (int64_t update = 0; update < settings.updates; ++update) {
    const auto x = torch::randn({large, kInputs}, torch::kDouble);
    const auto y = torch::randint(kClasses, {large});
    for (int64_t i = 0; i < steps; ++i) {
      const auto part = x.chunk(steps)[i];
      auto micro = accumulation.next();  // its backward() reduces nothing unless it is the last
      micro.backward(nn::functional::cross_entropy(model(part), y.chunk(steps)[i]));
      outcome.largest_forward = std::max(outcome.largest_forward, part.size(0));
      if (!micro.is_last()) continue;
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  const auto facts = model.get_ddp_logging_data().ints_map;
  outcome.reductions = facts.at("iteration");
  outcome.bytes = facts.at("iteration") * facts.at("gradient_bytes");
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : net->parameters()) flat.push_back(parameter.detach().flatten());
  outcome.weights = torch::cat(flat);
  return outcome;
}

void print(const char* what, const Outcome& outcome) {
  std::printf("%-19s %lld samples a forward, %lld reductions, %.2f MB reduced\n", what,
              static_cast<long long>(outcome.largest_forward), static_cast<long long>(outcome.reductions),
              static_cast<double>(outcome.bytes) / 1e6);
}

void run(const Settings& settings) {
  auto world = lockstep::init_process_group();
  const Outcome large = train(settings, 1);
  const Outcome accumulated = train(settings, settings.steps);
  const double difference = (large.weights - accumulated.weights).abs().max().item<double>();
  if (world.rank() != 0) return;
  print("one large batch:", large);
  print("micro-batches:", accumulated);
  const int64_t without = settings.updates * settings.steps;
  std::printf("reducing after each micro-batch would take %lld reductions: %.0f%% are saved\n",
              static_cast<long long>(without),
              100.0 * static_cast<double>(without - accumulated.reductions) / static_cast<double>(without));
  std::printf("largest difference of a weight: %.3g\n", difference);
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Compares micro-batches with one large batch. Start it with: lockstep run --nproc-per-node N …");
  app.add_option("--steps", settings.steps, "micro-batches for each optimizer step")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples of a rank in a micro-batch")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--updates", settings.updates, "optimizer steps")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--hidden", settings.hidden, "size of the hidden layer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the data")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  run(settings);
} catch (const c10::Error& error) {
  std::cerr << "accumulation: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "accumulation: " << error.what() << std::endl;
  return 1;
}
