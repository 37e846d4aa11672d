#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include <torch/torch.h>

#include <lockstep/base/environment.h>
#include <lockstep/lockstep.h>

#include "networks.h"
#include "trainer.h"

/// Training for accuracy, where others train for time: what a lossy reduction of gradients costs.
namespace lockstep::benchmarks {

inline constexpr const char* kDataFolder = "LOCKSTEP_DATA_DIR";

/// The share of the test images that are classified right. Each rank counts every N-th image.
inline double test_accuracy(Model& net, const data::FashionMnist& test) {
  torch::NoGradGuard no_grad;
  const int64_t rank = lockstep::default_group()->getRank();
  const int64_t ranks = lockstep::default_group()->getSize();
  constexpr int64_t kBatch = 500;
  auto right = torch::zeros({1}, torch::kLong);
  std::vector<int64_t> indices;
  for (int64_t i = rank; i < test.size(); i += ranks) {
    indices.push_back(i);
    if (static_cast<int64_t>(indices.size()) < kBatch && i + ranks < test.size()) continue;
    const auto batch = test.get_batch(indices);
    right += net.forward(batch.data.flatten(1)).argmax(1).eq(batch.target).sum();
    indices.clear();
  }
  lockstep::all_reduce(right);
  return right.item<double>() / static_cast<double>(test.size());
}

/// Trains 784-256-10 from weights and an order of images that the seed decides, and returns the test
/// accuracy. `prepare` is given the model before the first step.
inline double fashion_mnist_accuracy(int64_t seed, int64_t epochs,
                                     const std::function<void(DdpModel&)>& prepare) {
  const auto folder = environment::text(kDataFolder);
  TORCH_CHECK(folder, kDataFolder, " is not set; it names the folder with Fashion-MNIST's four files");
  const data::FashionMnist train(*folder, /*train=*/true);
  const data::FashionMnist test(*folder, /*train=*/false);
  torch::manual_seed(seed);
  const auto& network = find_network("small");
  const auto net = network.make();
  DdpModel model(net);
  prepare(model);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  data::DistributedSampler sampler(train.size(), {.seed = seed, .drop_last = true});
  data::DataLoader loader(train, {.batch_size = network.batch_size, .sampler = &sampler, .drop_last = true});
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(epoch);
    for (auto& batch : loader) {
      optimizer.zero_grad();
      torch::nn::functional::cross_entropy(model(batch.data.flatten(1)), batch.target).backward();
      optimizer.step();
    }
  }
  return test_accuracy(*net, test);
}

}  // namespace lockstep::benchmarks
