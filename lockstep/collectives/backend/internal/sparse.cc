#include <utility>
#include <vector>

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/collectives/algorithms/segments.h>
#include <lockstep/collectives/backend/internal/below_autograd.h>
#include <lockstep/collectives/backend/internal/sparse.h>
#include <lockstep/collectives/backend/internal/tensor_check.h>

namespace lockstep::collectives::internal {

void check_sparse(const at::Tensor& tensor, const c10d::ReduceOp& operation, const char* name) {
  check_device(tensor, name);
  TORCH_CHECK_VALUE(tensor.layout() == c10::kSparse, name, ": sparse tensors must be COO, not ",
                    tensor.layout(), "; call .to_sparse()");
  TORCH_CHECK_VALUE(static_cast<c10d::ReduceOp::RedOpType>(operation) == c10d::ReduceOp::SUM, name,
                    ": sparse tensors can only be reduced with SUM; divide by the number of ranks afterwards "
                    "for the average");
  TORCH_CHECK_VALUE(tensor.scalar_type() != at::kHalf && tensor.scalar_type() != at::kBool, name,
                    ": PyTorch can't add sparse tensors of ", tensor.scalar_type(),
                    "; convert them to Float");
}

namespace {

/// Every rank's `mine`, whose first or last dimension differs by rank, as tensors of these sizes.
std::vector<at::Tensor> gather_uneven(transport::GroupChannel& channel, const algorithms::Terms& terms,
                                      const Signature& signature, const at::Tensor& mine,
                                      const std::vector<std::vector<int64_t>>& sizes) {
  algorithms::Exchange parts;
  parts.gives.push_back({mine.const_data_ptr(), mine.nbytes()});
  Segments destination(channel.size());
  std::vector<at::Tensor> all;
  for (int from = 0; from < channel.size(); ++from) {
    all.push_back(at::empty(sizes[from], mine.options()));
    parts.takes.push_back(all.back().nbytes());
    destination.add(from, all.back());
  }
  algorithms::exchange(channel, terms, signature, parts, std::move(destination).consumer());
  return all;
}

}  // namespace

at::Tensor sum_sparse(transport::GroupChannel& channel, const algorithms::Terms& terms,
                      const Signature& signature, const at::Tensor& mine) {
  const BelowAutograd guard;
  const at::Tensor indices = mine._indices().contiguous();
  const at::Tensor values = mine._values().contiguous();

  const at::Tensor count = at::empty({1}, at::kLong);
  count.mutable_data_ptr<int64_t>()[0] = mine._nnz();
  const auto counts =
      gather_uneven(channel, terms, signature, count, std::vector<std::vector<int64_t>>(channel.size(), {1}));
  std::vector<std::vector<int64_t>> index_sizes;
  std::vector<std::vector<int64_t>> value_sizes;
  for (const at::Tensor& each : counts) {
    const int64_t elements = each.const_data_ptr<int64_t>()[0];
    index_sizes.push_back({indices.size(0), elements});
    value_sizes.push_back(values.sizes().vec());
    value_sizes.back()[0] = elements;
  }
  const auto all_indices = gather_uneven(channel, terms, signature, indices, index_sizes);
  const auto all_values = gather_uneven(channel, terms, signature, values, value_sizes);

  at::Tensor sum;
  for (int rank = 0; rank < channel.size(); ++rank) {
    const at::Tensor part = at::_sparse_coo_tensor_unsafe(all_indices[rank], all_values[rank], mine.sizes(),
                                                          mine.options().requires_grad(false),
                                                          /*is_coalesced=*/true);
    sum = sum.defined() ? at::add(sum, part) : part;
  }
  return sum.coalesce();
}

void all_reduce_sparse(transport::GroupChannel& channel, const algorithms::Terms& terms,
                       const Signature& signature, const std::vector<at::Tensor>& tensors) {
  const BelowAutograd guard;
  at::Tensor mine;
  for (const at::Tensor& tensor : tensors)
    mine = mine.defined() ? at::add(mine, tensor.detach()) : tensor.detach();
  const at::Tensor sum = sum_sparse(channel, terms, signature, mine.coalesce());
  for (const at::Tensor& tensor : tensors) tensor.copy_(sum);
}

}  // namespace lockstep::collectives::internal
