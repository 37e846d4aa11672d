// The smallest DDP program: a linear model, five samples a rank, one step; prints the loss.
//
//     lockstep run --nproc-per-node 2 ./one_step
#include <iostream>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

int main() try {
  auto world = lockstep::init_process_group();
  torch::manual_seed(world.rank());  // each rank has its own data

  auto linear = torch::nn::Linear(10, 1);
  lockstep::DistributedDataParallel<torch::nn::LinearImpl> model(
      linear.ptr());  // rank 0's weights everywhere
  torch::optim::SGD optimizer(model.parameters(), /*lr=*/0.001);

  const auto inputs = torch::randn({5, 10});
  const auto targets = torch::randn({5, 1});
  optimizer.zero_grad();
  const auto loss = torch::mse_loss(model(inputs), targets);
  loss.backward();  // gradients are averaged over the ranks while it runs
  optimizer.step();
  std::cout << "rank " << world.rank() << " loss: " << loss.item<float>() << std::endl;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
