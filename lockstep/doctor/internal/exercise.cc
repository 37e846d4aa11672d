#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/doctor/internal/exercise.h>
#include <lockstep/doctor/internal/known_values.h>

namespace lockstep::doctor::internal {
namespace {

void expect_sum(const at::Tensor& tensor, const std::vector<int>& ranks, const std::string& operation) {
  const std::string wrong = difference_from_sum(tensor, ranks);
  TORCH_CHECK_WITH(DistBackendError, wrong.empty(), operation, " of ", tensor.numel(),
                   " float32 gave wrong values: ", wrong);
}

}  // namespace

at::Tensor make_tensor(int64_t numel, TensorMemory memory, const ProcessGroup& group) {
  return memory == TensorMemory::kArena ? empty_shared({numel}, at::kFloat, group)
                                        : at::empty({numel}, at::kFloat);
}

void exercise_collectives(int64_t numel, TensorMemory memory, const std::vector<int>& members, int rank,
                          const std::vector<int>& roots, const ProcessGroup& group) {
  const at::Tensor tensor = make_tensor(numel, memory, group);
  fill_contribution(tensor, rank);
  all_reduce(tensor, ReduceOp::SUM, group);
  expect_sum(tensor, members, "all_reduce");
  for (int root : roots) {
    fill_contribution(tensor, rank);
    broadcast(tensor, root, group);
    expect_sum(tensor, {root}, "broadcast from rank " + std::to_string(root));
  }
}

void exercise_messages(int64_t numel, int rank, int peer, const ProcessGroup& group) {
  const at::Tensor mine = at::empty({numel}, at::kFloat);
  const at::Tensor theirs = at::empty({numel}, at::kFloat);
  fill_contribution(mine, rank);
  fill_contribution(theirs, rank);
  const Work sending = isend(mine, peer, group);
  recv(theirs, peer, group);
  sending->wait();
  expect_sum(theirs, {peer}, "recv from rank " + std::to_string(peer));
}

}  // namespace lockstep::doctor::internal
