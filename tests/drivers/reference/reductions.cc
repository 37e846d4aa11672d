// The examples of docs/reference/reductions.md.
#include <lockstep/lockstep.h>

#include "examples.h"

namespace reference {
namespace {

void reduce_op(int rank) {
  // [ReduceOp]
  auto largest = torch::full({2}, rank, torch::kLong);
  lockstep::all_reduce(largest, lockstep::ReduceOp::MAX);  // [3, 3] on all ranks
  auto flags = torch::full({1}, 1 << rank, torch::kInt);
  lockstep::all_reduce(flags, lockstep::ReduceOp::BOR);  // [15]
  // [end]
  expect_values(largest, {3, 3});
  expect_values(flags, {15});
}

void premul_sum(int rank) {
  // [premul_sum]
  auto tensor = torch::ones({2});
  lockstep::all_reduce(tensor, lockstep::premul_sum(rank));  // 0 + 1 + 2 + 3: [6, 6]
  // [end]
  expect_values(tensor, {6, 6});
}

void all_reduce(int rank) {
  // [all_reduce]
  auto tensor = torch::full({2}, 1.0 * rank);  // [0, 0] on rank 0, [1, 1] on rank 1, …
  lockstep::all_reduce(tensor);                // [6, 6] on all ranks
  auto work = lockstep::all_reduce(tensor, lockstep::ReduceOp::AVG, /*group=*/{}, /*async_op=*/true);
  work->wait();  // the mean of four times [6, 6]
  // [end]
  expect_values(tensor, {6, 6});
}

void all_reduce_coalesced(int rank) {
  // [all_reduce_coalesced]
  auto weight = torch::ones({2, 3}), bias = torch::full({3}, 1.0 * rank);
  lockstep::all_reduce_coalesced({weight, bias});  // 4 everywhere in weight, 6 in bias
  // [end]
  expect_values(weight, {4, 4, 4, 4, 4, 4});
  expect_values(bias, {6, 6, 6});
}

void reduce(int rank) {
  // [reduce]
  auto tensor = torch::full({2}, 1.0 * rank);
  lockstep::reduce(tensor, /*dst=*/0);  // [6, 6] on rank 0; the others keep what they have
  // [end]
  expect_values(tensor, rank == 0 ? std::vector<double>{6, 6} : std::vector<double>(2, rank));
}

void reduce_scatter(int rank) {
  // [reduce_scatter]
  std::vector<torch::Tensor> inputs;  // for rank r: r + 1 elements
  for (int r = 0; r < 4; ++r) inputs.push_back(torch::full({r + 1}, 10.0 * r));
  auto output = torch::empty({rank + 1});
  lockstep::reduce_scatter(output, inputs);  // rank 0: [0], rank 1: [40, 40], …
  // [end]
  expect_values(output, std::vector<double>(rank + 1, 40.0 * rank));
}

void reduce_scatter_tensor(int rank) {
  // [reduce_scatter_tensor]
  auto input = torch::arange(8.0);  // two elements for each of four ranks
  auto output = torch::empty({2});
  lockstep::reduce_scatter_tensor(output, input);  // rank 0: [0, 4], rank 1: [8, 12], …
  // [end]
  expect_values(output, {8.0 * rank, 8.0 * rank + 4});
}

void reduce_scatter_tensor_coalesced(int rank) {
  // [reduce_scatter_tensor_coalesced]
  auto first = torch::empty({1}), second = torch::empty({2});
  lockstep::reduce_scatter_tensor_coalesced({first, second}, {torch::arange(4.0), torch::arange(8.0)});
  // rank 1: first is [4], second is [8, 12]
  // [end]
  expect_values(first, {4.0 * rank});
  expect_values(second, {8.0 * rank, 8.0 * rank + 4});
}

}  // namespace

void reductions(int rank) {
  reduce_op(rank);
  premul_sum(rank);
  all_reduce(rank);
  all_reduce_coalesced(rank);
  reduce(rank);
  reduce_scatter(rank);
  reduce_scatter_tensor(rank);
  reduce_scatter_tensor_coalesced(rank);
}

}  // namespace reference
