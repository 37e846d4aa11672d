// DistributedDataParallel around a Pipe: gradients are averaged once, as around the module alone.
#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/pipeline/pipe.h>
#include <lockstep/parallel/pipeline/testing/pipe_fixtures.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::pipe_ddp_test {
namespace {

namespace nn = torch::nn;
using testing::loss_of;
using testing::random;

TEST(PipeInDdp, TrainsAsOneProcess) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto make = [](unsigned seed) {
      torch::manual_seed(seed);
      nn::Sequential net{nn::Linear(3, 4), nn::Tanh(), nn::Linear(4, 2)};
      net->to(at::kDouble);
      return net;
    };
    auto net = make(static_cast<unsigned>(rank)), alone = make(0);  // rank 0's weights everywhere
    const auto pipe = std::make_shared<Pipe>(
        net, std::vector<int64_t>{1, 2},
        PipeOptions{.devices = {at::Device(at::kCPU), at::Device(at::kCPU)}, .chunks = 3});
    DistributedDataParallel model(pipe);
    torch::optim::SGD optimizer(model.parameters(), 0.1), of_alone(alone->parameters(), 0.1);
    for (uint64_t step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      of_alone.zero_grad();
      loss_of(model(random({5, 3}, 2 * step + static_cast<uint64_t>(rank)))).backward();
      ((loss_of(alone->forward(random({5, 3}, 2 * step))) +
        loss_of(alone->forward(random({5, 3}, 2 * step + 1)))) /
       2)
          .backward();
      optimizer.step();
      of_alone.step();
    }
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_LT(testing::difference(parameters[i], alone->parameters()[i]), 1e-12) << i;
      EXPECT_TRUE(testing::same_everywhere(parameters[i])) << i;
    }
  });
}

}  // namespace
}  // namespace lockstep::pipe_ddp_test
