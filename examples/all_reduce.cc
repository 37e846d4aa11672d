// Sums a tensor over all ranks and prints it before and after: with 4 ranks, [6, 6] everywhere.
//
//     lockstep run --nproc-per-node 4 ./all_reduce
#include <iostream>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

namespace {

std::string show(const torch::Tensor& tensor) {
  return "[" + std::to_string(tensor[0].item<int64_t>()) + ", " + std::to_string(tensor[1].item<int64_t>()) +
         "]";
}

}  // namespace

int main() try {
  auto world = lockstep::init_process_group();
  auto tensor = torch::full({2}, world.rank(), torch::kLong);
  std::cout << "rank " << world.rank() << " has " << show(tensor) << std::endl;
  auto work = lockstep::all_reduce(tensor, lockstep::ReduceOp::SUM, /*group=*/{}, /*async_op=*/true);
  work->wait();  // before this, the tensor's contents are undefined
  std::cout << "rank " << world.rank() << " now has " << show(tensor) << std::endl;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << std::endl;
  return 1;
}
