// The examples of docs/reference/point_to_point.md.
#include <lockstep/lockstep.h>

#include "examples.h"

namespace reference {
namespace {

void send(int rank) {
  // [send]
  auto tensor = torch::empty({2});
  if (rank == 0) lockstep::send(torch::ones({2}), /*dst=*/1, /*group=*/{}, /*tag=*/7);
  if (rank == 1) lockstep::recv(tensor, /*src=*/0, /*group=*/{}, /*tag=*/7);  // [1, 1]
  // [end]
  if (rank == 1) expect_values(tensor, {1, 1});
}

void recv(int rank) {
  // [recv]
  if (rank == 0) {
    auto tensor = torch::empty({1});
    for (int i = 0; i < 3; ++i) {
      const int sender = lockstep::recv(tensor);  // from the rank that sends first
      TORCH_CHECK(tensor.item<int>() == 10 * sender);
    }
  } else {
    lockstep::send(torch::full({1}, 10.0 * rank), /*dst=*/0);
  }
  // [end]
}

void isend(int rank) {
  // [isend]
  auto received = torch::empty({1});
  auto sent = torch::full({1}, 1.0 * rank);
  auto receiving = lockstep::irecv(received, (rank + 3) % 4);
  auto sending = lockstep::isend(sent, (rank + 1) % 4);
  sending->wait();  // before this, leave `sent` alone
  receiving->wait();
  // [end]
  expect_values(received, {1.0 * ((rank + 3) % 4)});
}

void irecv(int rank) {
  // [irecv]
  auto tensor = torch::empty({1});
  if (rank == 3) lockstep::send(torch::full({1}, 5.0), /*dst=*/2);
  if (rank == 2) {
    auto work = lockstep::irecv(tensor);
    work->wait();
    TORCH_CHECK(work->sourceRank() == 3 && tensor.item<int>() == 5);
  }
  // [end]
}

void batch_isend_irecv(int rank) {
  // [batch_isend_irecv]
  using Op = lockstep::P2POp;
  auto mine = torch::full({1}, 1.0 * rank), left = torch::empty({1});
  auto works = lockstep::batch_isend_irecv(
      {{Op::Kind::kSend, mine, (rank + 1) % 4}, {Op::Kind::kReceive, left, (rank + 3) % 4}});
  for (auto& work : works) work->wait();  // left is the left neighbour's rank
  // [end]
  expect_values(left, {1.0 * ((rank + 3) % 4)});
}

}  // namespace

void point_to_point(int rank) {
  // A receive from any source must not meet a later example's message.
  for (const auto example : {send, recv, isend, irecv, batch_isend_irecv}) {
    example(rank);
    lockstep::barrier();
  }
}

}  // namespace reference
