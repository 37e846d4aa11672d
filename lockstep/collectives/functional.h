#pragma once

#include <chrono>
#include <optional>
#include <source_location>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/collectives/process_group.h>

/// The collectives of torch.distributed (distributed_c10d.py), with its names, argument order and defaults.
///
/// `group`: empty means the default group. Every member must call the same operations in the same order, on
/// tensors of one dtype and number of elements unless said otherwise (of one shape, with
/// TORCH_DISTRIBUTED_DEBUG=DETAIL). Ranks in arguments (src, dst) are global ranks.
/// With async_op the answer is a Work to wait() on, and tensors must be left alone until then; otherwise the
/// call returns when the operation is done, and the answer is empty. `caller` is for the flight recorder:
/// leave it out.
///
/// Tensors are on the CPU and may lie in memory in any way: those that are not contiguous are copied on the
/// way in and out, except that all_to_all_single, send and recv want contiguous ones, as PyTorch does.
/// Results can't go to tensors whose elements share memory. Complex tensors are reduced as pairs of real
/// numbers by SUM, AVG and PREMUL_SUM, and refused for the other operations. Throws c10::ValueError for bad
/// arguments, before any rank is waited for; c10::DistBackendError when the group fails (a peer died, called
/// something else or left); DistTimeoutError when peers are late. Thread-safe.
namespace lockstep {

/// SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, and what premul_sum() makes. AVG of integers is truncated toward
/// zero, as NCCL's; there is none of bool.
using ReduceOp = c10d::ReduceOp;
using Work = c10::intrusive_ptr<c10d::Work>;
using Caller = std::source_location;

/// PREMUL_SUM: each rank's tensor times `factor` (its own: it may differ by rank), then the sum.
/// torch.distributed._make_nccl_premul_sum.
ReduceOp premul_sum(double factor);
/// The same with a tensor of one element.
ReduceOp premul_sum(const at::Tensor& factor);

/// Reduces `tensor` over all ranks, in rank order; all ranks get the same bits. float32/64, bfloat16, float16
/// (folded in float32), integers, bool; sparse COO tensors with SUM, whose indices may differ by rank (the
/// result is coalesced). In place.
Work all_reduce(const at::Tensor& tensor, const ReduceOp& op = ReduceOp::SUM, const ProcessGroup& group = {},
                bool async_op = false, const Caller& caller = Caller::current());

/// all_reduce of several tensors of one dtype as one operation.
Work all_reduce_coalesced(const std::vector<at::Tensor>& tensors, const ReduceOp& op = ReduceOp::SUM,
                          const ProcessGroup& group = {}, bool async_op = false,
                          const Caller& caller = Caller::current());

/// Reduces `tensor` over all ranks into `dst`'s tensor. The others' stay as they are (PyTorch leaves them
/// unspecified).
Work reduce(const at::Tensor& tensor, int dst, const ReduceOp& op = ReduceOp::SUM,
            const ProcessGroup& group = {}, bool async_op = false, const Caller& caller = Caller::current());

/// `src`'s tensor goes to all ranks. In place.
Work broadcast(const at::Tensor& tensor, int src, const ProcessGroup& group = {}, bool async_op = false,
               const Caller& caller = Caller::current());

/// tensor_list[r] receives rank r's `tensor`; the list has one tensor for each rank, of the input's sizes and
/// dtype.
Work all_gather(const std::vector<at::Tensor>& tensor_list, const at::Tensor& tensor,
                const ProcessGroup& group = {}, bool async_op = false,
                const Caller& caller = Caller::current());

/// output_tensor receives all ranks' input_tensor one after the other; it has world size times the input's
/// elements, as concatenation or as stack.
Work all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                            const ProcessGroup& group = {}, bool async_op = false,
                            const Caller& caller = Caller::current());

/// all_gather of several inputs of one dtype as one operation: output_tensor_lists[r][i] receives rank r's
/// input_tensor_list[i].
Work all_gather_coalesced(const std::vector<std::vector<at::Tensor>>& output_tensor_lists,
                          const std::vector<at::Tensor>& input_tensor_list, const ProcessGroup& group = {},
                          bool async_op = false, const Caller& caller = Caller::current());

/// all_gather_into_tensor of several pairs as one operation.
Work all_gather_into_tensor_coalesced(const std::vector<at::Tensor>& output_tensors,
                                      const std::vector<at::Tensor>& input_tensors,
                                      const ProcessGroup& group = {}, bool async_op = false,
                                      const Caller& caller = Caller::current());

/// On `dst`, gather_list[r] receives rank r's `tensor`; elsewhere gather_list stays empty.
Work gather(const at::Tensor& tensor, const std::vector<at::Tensor>& gather_list = {}, int dst = 0,
            const ProcessGroup& group = {}, bool async_op = false, const Caller& caller = Caller::current());

/// `tensor` on rank r receives `src`'s scatter_list[r]; elsewhere scatter_list stays empty.
Work scatter(const at::Tensor& tensor, const std::vector<at::Tensor>& scatter_list = {}, int src = 0,
             const ProcessGroup& group = {}, bool async_op = false, const Caller& caller = Caller::current());

/// `output` on rank r receives the reduction of all ranks' input_list[r]. Sizes may differ by r.
Work reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& input_list,
                    const ReduceOp& op = ReduceOp::SUM, const ProcessGroup& group = {}, bool async_op = false,
                    const Caller& caller = Caller::current());

/// `output` on rank r receives the reduction of all ranks' r-th part of `input`, which has world size times
/// the output's elements.
Work reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceOp& op = ReduceOp::SUM, const ProcessGroup& group = {},
                           bool async_op = false, const Caller& caller = Caller::current());

/// reduce_scatter_tensor of several pairs as one operation.
Work reduce_scatter_tensor_coalesced(const std::vector<at::Tensor>& outputs,
                                     const std::vector<at::Tensor>& inputs,
                                     const ReduceOp& op = ReduceOp::SUM, const ProcessGroup& group = {},
                                     bool async_op = false, const Caller& caller = Caller::current());

/// output_tensor_list[r] receives rank r's input_tensor_list[this rank]. Sizes may differ by pair of ranks,
/// as long as both of a pair agree.
Work all_to_all(const std::vector<at::Tensor>& output_tensor_list,
                const std::vector<at::Tensor>& input_tensor_list, const ProcessGroup& group = {},
                bool async_op = false, const Caller& caller = Caller::current());

/// The same for parts of single tensors along dimension 0: input_split_sizes[r] rows go to rank r,
/// output_split_sizes[r] rows come from it. Without split sizes the parts are equal. Both contiguous.
Work all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<int64_t>& output_split_sizes = {},
                       const std::vector<int64_t>& input_split_sizes = {}, const ProcessGroup& group = {},
                       bool async_op = false, const Caller& caller = Caller::current());

/// Sends `tensor` to `dst`, which must call recv() or irecv() with the same tag, number of elements and
/// dtype. Messages between two ranks with one tag arrive in the order in which they were sent. Returns when
/// the tensor may be used again; small messages don't wait for the receiver. Sends and receives take no part
/// in the order of the group's other operations.
void send(const at::Tensor& tensor, int dst, const ProcessGroup& group = {}, int tag = 0,
          const Caller& caller = Caller::current());
/// Receives into `tensor` from `src`, or from the rank that sends first. Returns the sender's global rank.
int recv(const at::Tensor& tensor, std::optional<int> src = {}, const ProcessGroup& group = {}, int tag = 0,
         const Caller& caller = Caller::current());
/// send() that returns at once; the tensor must be left alone until wait().
Work isend(const at::Tensor& tensor, int dst, const ProcessGroup& group = {}, int tag = 0,
           const Caller& caller = Caller::current());
/// recv() that returns at once; after wait(), sourceRank() is the sender's rank within the group.
Work irecv(const at::Tensor& tensor, std::optional<int> src = {}, const ProcessGroup& group = {}, int tag = 0,
           const Caller& caller = Caller::current());

/// One element of batch_isend_irecv(). torch.distributed.P2POp.
struct P2POp {
  enum class Kind { kSend, kReceive };
  Kind op;
  at::Tensor tensor;
  int peer;  ///< global rank
  ProcessGroup group = {};
  int tag = 0;
};
/// Starts all sends and receives, in any order and with any peers, and returns a Work for each, or with NCCL
/// one for all. All have one group, and tensors of one kind of device.
std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list,
                                    const Caller& caller = Caller::current());

/// Returns once all ranks have called it.
Work barrier(const ProcessGroup& group = {}, bool async_op = false, const Caller& caller = Caller::current());

/// A barrier that says which ranks are missing: after `timeout` (the group's, if not given) rank 0 throws
/// DistTimeoutError with the first rank that did not come, or with wait_all_ranks all of them; the ranks that
/// came throw the same. The group remains usable.
void monitored_barrier(const ProcessGroup& group = {}, std::optional<std::chrono::milliseconds> timeout = {},
                       bool wait_all_ranks = false, const Caller& caller = Caller::current());

/// Fails the group on all ranks, from any thread: all operations in progress throw at once, later ones too.
/// The default group takes all others with it.
void abort(const ProcessGroup& group = {});

}  // namespace lockstep
