#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/collectives/process_group.h>

/// The collectives of torch.distributed (distributed_c10d.py), with its names, argument order and defaults.
///
/// `group`: empty means the default group. Every member must call the same operations in the same order, on
/// tensors of the same sizes and dtype, contiguous or in one and the same memory order. With async_op the
/// answer is a Work to wait() on, and tensors must be left alone until then; otherwise the call returns when
/// the operation is done, and the answer is empty. Throws c10::ValueError for bad arguments,
/// c10::DistBackendError when the group fails (a peer died, called something else or left), DistTimeoutError
/// when peers are late. Thread-safe.
namespace lockstep {

using ReduceOp = c10d::ReduceOp;
using Work = c10::intrusive_ptr<c10d::Work>;

/// Reduces `tensor` over all ranks, in rank order; everybody gets the same bits. float32/64, bfloat16,
/// float16 (folded in float32), integers, bool. In place.
Work all_reduce(const at::Tensor& tensor, const ReduceOp& op = ReduceOp::SUM, const ProcessGroup& group = {},
                bool async_op = false);

/// `src`'s tensor (a global rank) goes to everybody. In place.
Work broadcast(const at::Tensor& tensor, int src, const ProcessGroup& group = {}, bool async_op = false);

/// tensor_list[r] receives rank r's `tensor`; the list has one tensor for each rank, of the input's sizes and
/// dtype.
Work all_gather(std::vector<at::Tensor>& tensor_list, const at::Tensor& tensor,
                const ProcessGroup& group = {}, bool async_op = false);

/// Returns once all ranks have called it.
Work barrier(const ProcessGroup& group = {}, bool async_op = false);

}  // namespace lockstep
