// The examples of docs/reference/moving_data.md.
#include <lockstep/lockstep.h>

#include "examples.h"

namespace reference {
namespace {

void broadcast(int rank) {
  // [broadcast]
  auto tensor = rank == 0 ? torch::arange(3.0) : torch::empty({3});
  lockstep::broadcast(tensor, /*src=*/0);  // [0, 1, 2] on all ranks
  // [end]
  expect_values(tensor, {0, 1, 2});
}

void all_gather(int rank) {
  // [all_gather]
  auto tensor = torch::full({2}, 1.0 * rank);
  std::vector<torch::Tensor> list;
  for (int r = 0; r < 4; ++r) list.push_back(torch::empty({2}));
  lockstep::all_gather(list, tensor);  // list[3] is [3, 3] on all ranks
  // [end]
  for (int r = 0; r < 4; ++r) expect_values(list[r], {1.0 * r, 1.0 * r});
}

void all_gather_into_tensor(int rank) {
  // [all_gather_into_tensor]
  auto input = torch::full({2}, 1.0 * rank);
  auto row = torch::empty({8}), stack = torch::empty({4, 2});
  lockstep::all_gather_into_tensor(row, input);    // [0, 0, 1, 1, 2, 2, 3, 3]
  lockstep::all_gather_into_tensor(stack, input);  // the same, by rank: stack[3] is [3, 3]
  // [end]
  expect_values(row, {0, 0, 1, 1, 2, 2, 3, 3});
  expect_values(stack[3], {3, 3});
}

void all_gather_coalesced(int rank) {
  // [all_gather_coalesced]
  std::vector<torch::Tensor> inputs{torch::full({1}, 1.0 * rank), torch::full({2}, 10.0 * rank)};
  std::vector<std::vector<torch::Tensor>> lists;
  for (int r = 0; r < 4; ++r) lists.push_back({torch::empty({1}), torch::empty({2})});
  lockstep::all_gather_coalesced(lists, inputs);  // lists[3] is [3] and [30, 30]
  // [end]
  expect_values(lists[3][0], {3});
  expect_values(lists[3][1], {30, 30});
}

void all_gather_into_tensor_coalesced(int rank) {
  // [all_gather_into_tensor_coalesced]
  auto ranks = torch::empty({4}), tens = torch::empty({4});
  lockstep::all_gather_into_tensor_coalesced({ranks, tens},
                                             {torch::full({1}, 1.0 * rank), torch::full({1}, 10.0 * rank)});
  // ranks is [0, 1, 2, 3], tens is [0, 10, 20, 30]
  // [end]
  expect_values(ranks, {0, 1, 2, 3});
  expect_values(tens, {0, 10, 20, 30});
}

void gather(int rank) {
  // [gather]
  auto tensor = torch::full({1}, 1.0 * rank);
  std::vector<torch::Tensor> list;  // stays empty on the other ranks
  if (rank == 0) {
    for (int r = 0; r < 4; ++r) list.push_back(torch::empty({1}));
  }
  lockstep::gather(tensor, list, /*dst=*/0);  // list[3] is [3] on rank 0
  // [end]
  if (rank == 0) expect_values(list[3], {3});
}

void scatter(int rank) {
  // [scatter]
  auto tensor = torch::empty({1});
  std::vector<torch::Tensor> list;  // stays empty on the other ranks
  if (rank == 0) list = torch::arange(4.0).split(1);
  lockstep::scatter(tensor, list, /*src=*/0);  // [3] on rank 3
  // [end]
  expect_values(tensor, {1.0 * rank});
}

void all_to_all(int rank) {
  // [all_to_all]
  std::vector<torch::Tensor> inputs, outputs;
  for (int r = 0; r < 4; ++r) {
    inputs.push_back(torch::full({1}, 10.0 * rank + r));  // from this rank to rank r
    outputs.push_back(torch::empty({1}));
  }
  lockstep::all_to_all(outputs, inputs);  // rank 1: [1], [11], [21], [31]
  // [end]
  expect_values(torch::cat(outputs), {0.0 + rank, 10.0 + rank, 20.0 + rank, 30.0 + rank});
}

void all_to_all_single(int rank) {
  // [all_to_all_single]
  auto input = torch::full({4}, 1.0 * rank), output = torch::empty({4});
  lockstep::all_to_all_single(output, input);  // one element from each rank: [0, 1, 2, 3]

  // Rank r sends r + 1 rows to each rank, so each gets one row of rank 0, two of rank 1, …
  auto rows = torch::full({4 * (rank + 1), 2}, 1.0 * rank), received = torch::empty({10, 2});
  const std::vector<int64_t> given(4, rank + 1);
  lockstep::all_to_all_single(received, rows, /*output_split_sizes=*/{1, 2, 3, 4},
                              /*input_split_sizes=*/given);
  // [end]
  expect_values(output, {0, 1, 2, 3});
  expect_values(received.select(1, 0), {0, 1, 1, 2, 2, 2, 3, 3, 3, 3});
}

}  // namespace

void moving_data(int rank) {
  broadcast(rank);
  all_gather(rank);
  all_gather_into_tensor(rank);
  all_gather_coalesced(rank);
  all_gather_into_tensor_coalesced(rank);
  gather(rank);
  scatter(rank);
  all_to_all(rank);
  all_to_all_single(rank);
}

}  // namespace reference
