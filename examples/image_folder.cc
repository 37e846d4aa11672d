// Trains a small CNN on folders of JPEG and PNG images, data-parallel, with an accuracy after each epoch.
//
//     lockstep run --nproc-per-node 2 ./image_folder --data DIR
//
// DIR/train/CLASS/*.jpg are the images to train on, DIR/val/CLASS/*.jpg those to test with.
#include <cstdio>
#include <iostream>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <lockstep/image/image_folder.h>
#include <lockstep/image/random_transforms.h>
#include <lockstep/lockstep.h>

namespace {

namespace nn = torch::nn;
namespace image = lockstep::image;

struct Settings {
  std::string data;
  int64_t epochs = 5;
  int64_t batch_size = 64;
  int64_t size = 64;
  int64_t seed = 0;
  double learning_rate = 3e-3;
};

/// Three convolutions, each halving the image, then the mean over what is left of it.
struct Net : nn::Module {
  explicit Net(int64_t classes) {
    int64_t channels = 3;
    for (const int64_t next : {16, 32, 64}) {
      layers->push_back(nn::Conv2d(nn::Conv2dOptions(channels, next, 3).stride(2).padding(1).bias(false)));
      layers->push_back(nn::BatchNorm2d(next));
      layers->push_back(nn::ReLU());
      channels = next;
    }
    layers->push_back(nn::AdaptiveAvgPool2d(1));
    layers->push_back(nn::Flatten());
    layers->push_back(nn::Linear(channels, classes));
    register_module("layers", layers);
  }
  torch::Tensor forward(const torch::Tensor& images) { return layers->forward(images); }
  nn::Sequential layers;
};

/// The share of all images that are classified right. Each rank takes every N-th image, so that each counts
/// exactly once; the counts are summed over the ranks.
double accuracy(Net& net, const image::ImageFolder& images, int rank, int world_size) {
  torch::NoGradGuard no_grad;
  net.eval();
  auto counts = torch::zeros({2}, torch::kLong);  // right, seen
  for (int64_t index = rank; index < images.size(); index += world_size) {
    const auto sample = images.get(index);
    counts[0] += net.forward(sample.data.unsqueeze(0)).argmax(1).eq(sample.target).sum();
    counts[1] += 1;
  }
  net.train();
  lockstep::all_reduce(counts);
  return counts[0].item<double>() / counts[1].item<double>();
}

void train(const Settings& settings) {
  auto world = lockstep::init_process_group();
  const int rank = world.rank();
  const int world_size = world.size();
  TORCH_CHECK(settings.batch_size % world_size == 0, "--batch-size ", settings.batch_size,
              " is for the whole job and must be a multiple of its ", world_size, " ranks");

  const std::vector<double> mean = {0.485, 0.456, 0.406};
  const std::vector<double> deviation = {0.229, 0.224, 0.225};
  const image::Normalize normalize(mean, deviation);
  image::ImageFolder train_set(
      settings.data + "/train",
      {.transform = image::Compose({image::RandomResizedCrop(settings.size, {.scale = {0.5, 1.0}}),
                                    image::RandomHorizontalFlip(), image::ToTensor(), normalize}),
       .seed = static_cast<uint64_t>(settings.seed)});
  const image::ImageFolder test_set(
      settings.data + "/val",
      {.transform = image::Compose(
           {image::Resize(settings.size), image::CenterCrop(settings.size), image::ToTensor(), normalize})});
  TORCH_CHECK(train_set.classes() == test_set.classes(), settings.data,
              ": train and val have different classes (folders)");

  torch::manual_seed(settings.seed);
  auto net = std::make_shared<Net>(static_cast<int64_t>(train_set.classes().size()));
  lockstep::DistributedDataParallel<Net> model(net);
  torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(settings.learning_rate));
  lockstep::data::DistributedSampler sampler(train_set.size(), {.seed = settings.seed, .drop_last = true});
  lockstep::data::DataLoader loader(train_set, {.batch_size = settings.batch_size / world_size,
                                                .sampler = &sampler,
                                                .num_workers = 1,
                                                .drop_last = true});
  TORCH_CHECK(loader.size() > 0, "the ", train_set.size(), " training images don't fill one batch of ",
              settings.batch_size, "; give a smaller --batch-size");

  for (int64_t epoch = 0; epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    train_set.set_epoch(epoch);  // other crops and flips than before
    lockstep::ProgressBar bar(loader.size() * settings.batch_size, "epoch " + std::to_string(epoch + 1),
                              {.unit = "images", .quiet = rank != 0});
    for (auto& batch : loader) {
      optimizer.zero_grad();
      auto loss = nn::functional::cross_entropy(model(batch.data), batch.target);
      loss.backward();
      optimizer.step();
      bar.set_postfix("loss", loss.item<double>());
      bar.update(settings.batch_size);
    }
    const double share = accuracy(*net, test_set, rank, world_size);
    if (rank == 0) {
      std::printf("epoch %lld: test accuracy %.4f\n", static_cast<long long>(epoch + 1), share);
      std::fflush(stdout);
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  Settings settings;
  CLI::App app(
      "Trains a CNN on image folders. Start it with: lockstep run --nproc-per-node N image_folder …");
  app.add_option("--data", settings.data, "folder with train/CLASS/ and val/CLASS/")->required();
  app.add_option("--epochs", settings.epochs, "passes over the data")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--batch-size", settings.batch_size, "images a step, all ranks together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--size", settings.size, "edge of the images that the network sees")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--seed", settings.seed, "of the weights, the shuffle and the crops")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--learning-rate", settings.learning_rate, "Adam's")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  train(settings);
} catch (const c10::Error& error) {
  std::cerr << "image_folder: " << error.what_without_backtrace() << std::endl;
  return 1;
} catch (const std::exception& error) {
  std::cerr << "image_folder: " << error.what() << std::endl;
  return 1;
}
