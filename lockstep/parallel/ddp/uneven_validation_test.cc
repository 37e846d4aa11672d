#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/multi_rank.h>

// Validation with unequal numbers of batches per rank, as docs/distributed_data_parallel.md tells to do it.
namespace lockstep::uneven_validation_test {
namespace {

namespace nn = torch::nn;
using testing::run_ranks;

constexpr int64_t kImages = 10'000;
constexpr int64_t kBatch = 100;
constexpr int64_t kClasses = 10;

/// A convolution with batch normalisation, whose running statistics differ by rank after each step.
struct Classifier : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) {
    return fc(torch::avg_pool2d(torch::relu(norm(conv(x))), 2).flatten(1));
  }
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 6, 3).padding(1).bias(false)));
  nn::BatchNorm2d norm = register_module("norm", nn::BatchNorm2d(6));
  nn::Linear fc = register_module("fc", nn::Linear(6 * 4 * 4, kClasses));
};

struct Images {
  torch::Tensor data;    // N×1×8×8
  torch::Tensor labels;  // N
};

/// Noise around the picture of each class; the pictures overlap enough that some are taken for others.
Images make_images(int64_t count, uint64_t seed) {
  const auto pictures = at::randn({kClasses, 1, 8, 8}, at::make_generator<at::CPUGeneratorImpl>(uint64_t{1}));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto labels = at::randint(kClasses, {count}, generator, at::kLong);
  return {pictures.index_select(0, labels) + 2.5 * at::randn({count, 1, 8, 8}, generator), labels};
}

/// The images [begin, end), each time batch by batch: how many the module classifies right, and how often
/// each image was seen.
std::pair<int64_t, torch::Tensor> validate(Classifier& module, const Images& images, int64_t begin,
                                           int64_t end) {
  torch::NoGradGuard no_grad;
  module.eval();
  int64_t right = 0;
  auto seen = torch::zeros({kImages}, torch::kLong);
  for (int64_t first = begin; first < end; first += kBatch) {
    const int64_t count = std::min(kBatch, end - first);
    const auto labels = images.labels.narrow(0, first, count);
    right += module.forward(images.data.narrow(0, first, count)).argmax(1).eq(labels).sum().item<int64_t>();
    seen.narrow(0, first, count) += 1;
  }
  module.train();
  return {right, seen};
}

TEST(UnevenValidation, CountsEachImageOnceWithBatchNormOnThreeRanks) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    DistributedDataParallel<Classifier> model(std::make_shared<Classifier>());
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
    const Images training = make_images(3 * 40 * 32, 2);
    int64_t next = rank;
    const auto train = [&](int64_t steps) {
      for (int64_t step = 0; step < steps; ++step, next += 3) {
        optimizer.zero_grad();
        const auto x = training.data.narrow(0, next * 32, 32);
        nn::functional::cross_entropy(model(x), training.labels.narrow(0, next * 32, 32)).backward();
        optimizer.step();
      }
    };
    train(30);
    // Each rank's running statistics are its own since the last forward: all ranks validate rank 0's model.
    for (auto& buffer : model.module->buffers()) broadcast(buffer, 0);

    const Images images = make_images(kImages, 3);
    const auto all = validate(*model.module, images, 0, kImages);
    for (const auto& borders : {std::vector<int64_t>{0, 3334, 6667, kImages},     // 34, 34 and 34 batches
                                std::vector<int64_t>{0, 5000, 8050, kImages}}) {  // 50, 31 and 20
      const auto [right, seen] = validate(*model.module, images, borders[rank], borders[rank + 1]);
      const auto counts = torch::tensor({right, seen.sum().item<int64_t>()});
      all_reduce(counts);
      all_reduce(seen);
      EXPECT_EQ(counts[1].item<int64_t>(), kImages);
      EXPECT_TRUE(seen.eq(1).all().item<bool>()) << "each image once";
      EXPECT_EQ(counts[0].item<int64_t>(), all.first) << "as one process counts";
    }
    EXPECT_GT(all.first, kImages * 3 / 10) << "the model has learnt: chance gives a tenth";
    EXPECT_LT(all.first, kImages);

    // The ranks are still in step.
    train(10);
    for (const auto& parameter : model.parameters()) {
      auto first = parameter.detach().clone();
      broadcast(first, 0);
      EXPECT_TRUE(at::equal(parameter, first));
    }
  });
}

}  // namespace
}  // namespace lockstep::uneven_validation_test
