// Trains a regression on the rows of a Parquet file (or of a folder of them), data-parallel, row group by row
// group.
//
//     lockstep run --nproc-per-node 2 ./parquet --data houses.parquet --target price
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/lockstep.h>
#include <lockstep/parquet/parquet_batches.h>

namespace {

namespace nn = torch::nn;
using lockstep::data::ParquetBatches;
using lockstep::data::ParquetDataset;
using lockstep::data::RowGroupSampler;
using lockstep::data::Table;

struct Settings {
  std::string data;
  std::string target = "target";
  std::vector<std::string> features;
  int64_t epochs = 10;
  int64_t batch_size = 64;
  int64_t seed = 0;
  double learning_rate = 1e-2;
};

/// k features, 32 hidden units, one number.
struct Net : nn::Module {
  explicit Net(int64_t features)
      : hidden(register_module("hidden", nn::Linear(features, 32))),
        output(register_module("output", nn::Linear(32, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::relu(hidden(x))).squeeze(1); }
  nn::Linear hidden, output;
};

/// All columns but the target.
std::vector<std::string> features_of(const Settings& settings) {
  if (!settings.features.empty()) return settings.features;
  const ParquetDataset data(settings.data);
  std::vector<std::string> names;
  for (const auto& field : data.schema()) {
    if (field.name != settings.target) names.push_back(field.name);
  }
  return names;
}

void train(const Settings& settings) {
  auto world = lockstep::init_process_group();
  const auto features = features_of(settings);
  auto columns = features;
  columns.push_back(settings.target);
  const ParquetDataset data(settings.data, {.columns = columns});
  // The ranks' shares differ in rows; even_batches lets all make equally many steps.
  RowGroupSampler sampler(data, {.seed = settings.seed});
  ParquetBatches batches(data,
                         {.batch_size = settings.batch_size, .sampler = &sampler, .even_batches = true});

  torch::manual_seed(settings.seed);
  auto width = data.get(0).matrix(features).size(1);  // lists of a fixed size count as several
  lockstep::DistributedDataParallel<Net> model(std::make_shared<Net>(width));
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(settings.learning_rate));
  if (world.rank() == 0) {
    std::printf("%lld rows in %lld row groups, %lld features\n", static_cast<long long>(data.num_rows()),
                static_cast<long long>(data.size()), static_cast<long long>(width));
  }
  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    auto sums = torch::zeros({2}, torch::kDouble);  // squared errors, rows
    for (Table& batch : batches) {
      optimizer.zero_grad();
      auto target = batch.tensor(settings.target).to(torch::kFloat);
      auto loss = nn::functional::mse_loss(model(batch.matrix(features)), target);
      loss.backward();
      optimizer.step();
      sums[0] += loss.item<double>() * static_cast<double>(batch.rows());
      sums[1] += batch.rows();
    }
    lockstep::all_reduce(sums);
    if (world.rank() == 0) {
      std::printf("epoch %lld: mean squared error %.6f\n", static_cast<long long>(epoch + 1),
                  sums[0].item<double>() / sums[1].item<double>());
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a regression on a Parquet file. Start it with: lockstep run --nproc-per-node N parquet --data "
      "FILE …");
  app.add_option("--data", settings.data, "Parquet file, or folder of them")->required();
  app.add_option("--target", settings.target, "column to predict")->capture_default_str();
  app.add_option("--features", settings.features, "columns to predict it from (all others)");
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "rows a step of each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights and the shuffle")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.learning_rate, "Adam's")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "parquet: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "parquet: " << error.what() << std::endl;
  return 1;
}
