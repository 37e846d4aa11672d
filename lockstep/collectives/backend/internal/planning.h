#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/collectives/backend/internal/planned_operation.h>

/// What the collectives of LockstepBackend have in common: how they see their arguments as bytes, and where
/// they stand in the queue.
namespace lockstep::collectives::internal::planning {

using algorithms::Consume;
using algorithms::Exchange;
using algorithms::Piece;
using algorithms::Terms;
using Tensors = std::vector<at::Tensor>;

inline const at::Tensor& only_tensor(const Tensors& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, " takes one tensor a rank, not ", tensors.size());
  return tensors.front();
}

/// The one list of a c10d call that takes lists by device; empty on ranks that give none.
inline const Tensors& only_list(const std::vector<Tensors>& lists, const char* operation) {
  static const Tensors none;
  if (lists.empty()) return none;
  TORCH_CHECK_VALUE(lists.size() == 1, operation, " takes one list of tensors a rank, not ", lists.size());
  return lists.front();
}

inline Piece piece_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.nbytes()};
}
/// Part `index` of a contiguous tensor in equal parts.
inline Piece part_of(const at::Tensor& tensor, int parts, int index) {
  const size_t bytes = tensor.nbytes() / parts;
  return {static_cast<const std::byte*>(tensor.const_data_ptr()) + index * bytes, bytes};
}
inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// Whether `part` is this very part of `whole`, so that neither need be copied.
inline bool is_part(const at::Tensor& part, const at::Tensor& whole, int parts, int index) {
  return part.is_contiguous() && whole.is_contiguous() &&
         part.const_data_ptr() == part_of(whole, parts, index).data;
}

/// Whether an operation that writes `output` may change `input` before it has been read. `own`: the input is what this rank
/// gives to itself, of the output's size, so that the output may lie in its very place.
inline bool is_overwritten(const at::Tensor& input, const at::Tensor& output, bool own) {
  return memory_overlaps(input, output) && !(own && is_part(output, input, 1, 0));
}

/// An exchange of these operands. `Options`: any of c10d's.
template <class Options>
PlannedOperation plan_exchange(const std::shared_ptr<transport::GroupChannel>& channel,
                               const Options& options, const Signature& signature, c10d::OpType type,
                               Tensors inputs, Tensors outputs, std::shared_ptr<Operands> operands,
                               Exchange exchange, Consume consume) {
  return {.signature = signature,
          .type = type,
          .inputs = std::move(inputs),
          .outputs = std::move(outputs),
          .operands = std::move(operands),
          .timeout = options.timeout,
          .asynchronous = options.asyncOp,
          .body = [channel, signature, exchange = std::move(exchange),
                   consume = std::move(consume)](const Terms& terms) {
            algorithms::exchange(*channel, terms, signature, exchange, consume);
          }};
}

/// The same for pieces of all ranks that are reduced into `output`, which is the operands'. `Options`: any of c10d's.
template <class Options>
PlannedOperation plan_reduce_scatter(const std::shared_ptr<transport::GroupChannel>& channel,
                                     const Options& options, const Signature& signature, c10d::OpType type,
                                     const Tensors& inputs, const Tensors& outputs,
                                     std::shared_ptr<Operands> operands, Exchange exchange,
                                     const at::Tensor& output) {
  return {.signature = signature,
          .type = type,
          .inputs = inputs,
          .outputs = outputs,
          .operands = std::move(operands),
          .timeout = options.timeout,
          .asynchronous = options.asyncOp,
          .body = [channel, signature, exchange = std::move(exchange),
                   data = output.mutable_data_ptr()](const Terms& terms) {
            algorithms::reduce_scatter(*channel, terms, signature, exchange, data);
          }};
}

/// A reduction of `buffer` in place. `Options`: any of c10d's.
template <class Options>
PlannedOperation plan_reduction(const std::shared_ptr<transport::GroupChannel>& channel,
                                const Options& options, const Signature& signature, c10d::OpType type,
                                const Tensors& tensors, std::shared_ptr<Operands> operands,
                                const at::Tensor& buffer) {
  // Of a reduction to one rank, the others' data are only read.
  auto* data = const_cast<void*>(buffer.const_data_ptr());
  const bool users = std::any_of(tensors.begin(), tensors.end(),
                                 [&](const at::Tensor& tensor) { return tensor.is_alias_of(buffer); });
  const auto owner = users ? algorithms::BufferOwner::kUser : algorithms::BufferOwner::kOperation;
  return {.signature = signature,
          .type = type,
          .inputs = tensors,
          .outputs = tensors,
          .operands = std::move(operands),
          .timeout = options.timeout,
          .asynchronous = options.asyncOp,
          .body = [channel, signature, data, owner](const Terms& terms) {
            algorithms::reduce(*channel, terms, signature, data, owner);
          }};
}

}  // namespace lockstep::collectives::internal::planning
