// DataParallel (one process, replicas in threads) beside DistributedDataParallel (a process for each part of
// the batch): the same training with both and with the module alone, its final losses and speeds.
//
//     ./data_parallel --replicas 2
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/parallel/data_parallel/data_parallel.h>

namespace {

namespace nn = torch::nn;

struct Settings {
  int replicas = 2;
  int64_t steps = 40;
  int64_t batch_size = 128;
  int64_t hidden = 512;
  int64_t seed = 0;
};

constexpr int64_t kInputs = 784;
constexpr int64_t kClasses = 10;

/// DataParallel clones its module, so all that belongs to it is made in reset().
struct Net : nn::Cloneable<Net> {
  explicit Net(int64_t hidden_size) : size(hidden_size) { reset(); }
  void reset() override {
    first = register_module("first", nn::Linear(kInputs, size));
    hidden = register_module("hidden", nn::Linear(size, size));
    last = register_module("last", nn::Linear(size, kClasses));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(hidden(torch::relu(first(x))))); }
  int64_t size;
  nn::Linear first{nullptr}, hidden{nullptr}, last{nullptr};
};

struct Batch {
  torch::Tensor data, target;
};

/// The whole job's batches, the same wherever they are made: points about ten centres.
std::vector<Batch> make_batches(const Settings& settings) {
  torch::manual_seed(settings.seed);
  const auto centres = torch::randn({kClasses, kInputs});
  std::vector<Batch> batches;
  for (int64_t step = 0; step < settings.steps; ++step) {
    const auto target = torch::randint(kClasses, {settings.batch_size});
    batches.push_back(
        {centres.index_select(0, target) + 4 * torch::randn({settings.batch_size, kInputs}), target});
  }
  return batches;
}

std::shared_ptr<Net> make_net(const Settings& settings) {
  torch::manual_seed(settings.seed);
  return std::make_shared<Net>(settings.hidden);
}

struct Outcome {
  double samples_per_second = 0;  // of the whole job
  double loss = 0;                // the last batch's, of this process's part
};

/// Trains on part `part` of `parts` of each batch. The first steps, which warm up, don't count for the speed.
template <class Model>
Outcome train(Model& model, const std::vector<Batch>& batches, int part = 0, int parts = 1) {
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  const size_t warm_up = std::min<size_t>(3, batches.size() - 1);
  auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  for (size_t step = 0; step < batches.size(); ++step) {
    if (step == warm_up) start = std::chrono::steady_clock::now();
    const auto data = batches[step].data.chunk(parts)[static_cast<size_t>(part)];
    const auto target = batches[step].target.chunk(parts)[static_cast<size_t>(part)];
    optimizer.zero_grad();
    const auto loss = nn::functional::cross_entropy(model.forward(data), target);
    loss.backward();
    optimizer.step();
    outcome.loss = loss.template item<double>();
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  outcome.samples_per_second = static_cast<double>(batches.size() - warm_up) *
                               static_cast<double>(batches[0].data.size(0)) / seconds.count();
  return outcome;
}

void print(const std::string& what, const Outcome& outcome) {
  std::printf("%-42s %8.0f samples/s, loss %.6f\n", what.c_str(), outcome.samples_per_second, outcome.loss);
}

/// All ranks train with DistributedDataParallel; then rank 0 goes on alone with DataParallel in as many
/// threads as there were processes, and with the module itself in one.
void compare(int rank, const Settings& settings) {
  at::set_num_threads(1);
  const auto batches = make_batches(settings);
  Outcome distributed;
  {
    auto world = lockstep::init_process_group();
    auto net = make_net(settings);
    lockstep::DistributedDataParallel<Net> model(net);
    distributed = train(model, batches, rank, settings.replicas);
    auto loss = torch::tensor(distributed.loss, torch::kDouble);
    lockstep::all_reduce(loss, lockstep::ReduceOp::AVG);
    distributed.loss = loss.item<double>();
  }
  if (rank != 0) return;

  auto net = make_net(settings);
  lockstep::DataParallel model(net, {.num_replicas = settings.replicas});
  const auto threads = train(model, batches);
  const auto alone = train(*make_net(settings), batches);
  const auto count = std::to_string(settings.replicas);
  print("DistributedDataParallel, " + count + " processes:", distributed);
  print("DataParallel, " + count + " replicas in threads:", threads);
  print("the module alone, one thread:", alone);
  std::printf("DistributedDataParallel is %.2f times as fast as DataParallel\n",
              distributed.samples_per_second / threads.samples_per_second);
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app("Compares DataParallel with DistributedDataParallel on one training.");
  app.add_option("--replicas", settings.replicas, "processes of the one, threads of the other")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--steps", settings.steps, "batches to train on")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "samples a step, all replicas together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--hidden", settings.hidden, "size of the hidden layers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the data")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  TORCH_CHECK(settings.batch_size % settings.replicas == 0, "--batch-size ", settings.batch_size,
              " must be a multiple of --replicas ", settings.replicas, ", for means over ranks to be means");
  lockstep::spawn(compare, settings.replicas, settings);
} catch (const c10::Error& error) {
  std::cerr << "data_parallel: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "data_parallel: " << error.what() << std::endl;
  return 1;
}
