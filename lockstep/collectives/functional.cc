#include <algorithm>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

/// One call on its way: the group's backend, and where the call came from. The backend is called directly,
/// for c10d's dispatcher costs more than a small operation.
class Call {
 public:
  Call(const ProcessGroup& group, const Caller& caller, c10::DeviceType device = c10::kCPU)
      : site_({}, caller) {
    TORCH_CHECK_VALUE(is_member(group),
                      "this rank is not a member of the group; leave the call to its members");
    group_ = group ? group : default_group();
    if (device != c10::kCPU) check_serves(device);
    backend_ = group_->getBackend(device);
  }

  c10d::Backend& backend() const { return *backend_; }
  LockstepBackend* lockstep_backend() const { return dynamic_cast<LockstepBackend*>(backend_.get()); }
  int group_rank(int global_rank) const { return get_group_rank(group_, global_rank); }
  int global_rank(int group_rank) const { return get_global_rank(group_, group_rank); }
  bool is_self(int group_rank) const { return group_rank == group_->getRank(); }

 private:
  void check_serves(c10::DeviceType device) const {
    const auto served = group_->getDeviceTypes();
    TORCH_CHECK_VALUE(std::find(served.begin(), served.end(), c10::Device(device)) != served.end(),
                      "process group '", group_->getGroupName(), "' has no backend for ",
                      c10::DeviceTypeName(device, /*lower_case=*/true), " tensors, only ",
                      get_backend_config(group_),
                      "; move the tensor, or make the group with a backend for it");
  }

  CallSite site_;
  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
};

/// The kind of device whose backend takes the tensor; an undefined one goes to the CPU's, which says what is
/// wrong.
c10::DeviceType device_type_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.device().type() : c10::kCPU;
}
c10::DeviceType device_type_of(const Tensors& tensors) {
  return tensors.empty() ? c10::kCPU : device_type_of(tensors.front());
}

template <class Options>
Options with_async(bool async_op) {
  Options options;
  options.asyncOp = async_op;
  return options;
}

template <class Options>
Options with_operation(const ReduceOp& op, bool async_op) {
  Options options = with_async<Options>(async_op);
  options.reduceOp = op;
  return options;
}

template <class Options>
Options with_root(int root, bool async_op) {
  Options options = with_async<Options>(async_op);
  options.rootRank = root;
  return options;
}

Work finish(Work work, bool async_op) {
  if (async_op) return work;
  work->wait();
  return {};
}

template <class Factor>
ReduceOp make_premul_sum(const Factor& factor) {
  ReduceOp op;
  op.op_ = ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return op;
}

void check_not_self(const Call& call, int group_rank, const char* role) {
  TORCH_CHECK_VALUE(!call.is_self(group_rank), "Invalid ", role, " rank: ", role,
                    " rank should not be the same as the rank of the current process.");
}

/// Starts a message; `background`: no thread is about to wait for it.
Work start_message(const Call& call, bool is_send, const at::Tensor& tensor, std::optional<int> peer, int tag,
                   bool background) {
  if (auto* ours = call.lockstep_backend()) {
    return ours->message(is_send, tensor, peer.value_or(transport::MessageChannel::kAnySource), tag,
                         background);
  }
  Tensors tensors{tensor};
  if (is_send) return call.backend().send(tensors, *peer, tag);
  return peer ? call.backend().recv(tensors, *peer, tag) : call.backend().recvAnysource(tensors, tag);
}

std::optional<int> group_source(const Call& call, std::optional<int> src) {
  return src ? std::optional<int>(call.group_rank(*src)) : std::nullopt;
}

}  // namespace

ReduceOp premul_sum(double factor) {
  return make_premul_sum(factor);
}
ReduceOp premul_sum(const at::Tensor& factor) {
  TORCH_CHECK_VALUE(factor.defined() && factor.numel() == 1,
                    "premul_sum: the factor must be a tensor of one element");
  return make_premul_sum(factor);
}

// ---- reductions

Work all_reduce(const at::Tensor& tensor, const ReduceOp& op, const ProcessGroup& group, bool async_op,
                const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  Tensors tensors{tensor};
  return finish(call.backend().allreduce(tensors, with_operation<c10d::AllreduceOptions>(op, async_op)),
                async_op);
}

Work all_reduce_coalesced(const Tensors& tensors, const ReduceOp& op, const ProcessGroup& group,
                          bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(tensors));
  Tensors list = tensors;
  return finish(
      call.backend().allreduce_coalesced(list, with_operation<c10d::AllreduceCoalescedOptions>(op, async_op)),
      async_op);
}

Work reduce(const at::Tensor& tensor, int dst, const ReduceOp& op, const ProcessGroup& group, bool async_op,
            const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  auto options = with_operation<c10d::ReduceOptions>(op, async_op);
  options.rootRank = call.group_rank(dst);
  Tensors tensors{tensor};
  return finish(call.backend().reduce(tensors, options), async_op);
}

Work reduce_scatter(const at::Tensor& output, const Tensors& input_list, const ReduceOp& op,
                    const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(output));
  Tensors outputs{output};
  std::vector<Tensors> inputs{input_list};
  return finish(call.backend().reduce_scatter(outputs, inputs,
                                              with_operation<c10d::ReduceScatterOptions>(op, async_op)),
                async_op);
}

Work reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op,
                           const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(output));
  at::Tensor to = output;
  at::Tensor from = input;
  return finish(
      call.backend()._reduce_scatter_base(to, from, with_operation<c10d::ReduceScatterOptions>(op, async_op)),
      async_op);
}

Work reduce_scatter_tensor_coalesced(const Tensors& outputs, const Tensors& inputs, const ReduceOp& op,
                                     const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(outputs));
  Tensors to = outputs;
  Tensors from = inputs;
  return finish(call.backend().reduce_scatter_tensor_coalesced(
                    to, from, with_operation<c10d::ReduceScatterOptions>(op, async_op)),
                async_op);
}

// ---- one to all, all to one

Work broadcast(const at::Tensor& tensor, int src, const ProcessGroup& group, bool async_op,
               const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  Tensors tensors{tensor};
  return finish(
      call.backend().broadcast(tensors, with_root<c10d::BroadcastOptions>(call.group_rank(src), async_op)),
      async_op);
}

Work gather(const at::Tensor& tensor, const Tensors& gather_list, int dst, const ProcessGroup& group,
            bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  const int root = call.group_rank(dst);
  TORCH_CHECK_VALUE(!call.is_self(root) || !gather_list.empty(),
                    "gather: gather_list must be specified on the destination rank, ", dst);
  TORCH_CHECK_VALUE(call.is_self(root) || gather_list.empty(),
                    "gather: gather_list must NOT be specified on ranks other than the destination, ", dst);
  std::vector<Tensors> outputs;
  if (call.is_self(root)) outputs.push_back(gather_list);
  Tensors inputs{tensor};
  return finish(call.backend().gather(outputs, inputs, with_root<c10d::GatherOptions>(root, async_op)),
                async_op);
}

Work scatter(const at::Tensor& tensor, const Tensors& scatter_list, int src, const ProcessGroup& group,
             bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  const int root = call.group_rank(src);
  TORCH_CHECK_VALUE(!call.is_self(root) || !scatter_list.empty(),
                    "scatter: scatter_list must be specified on the source rank, ", src);
  TORCH_CHECK_VALUE(call.is_self(root) || scatter_list.empty(),
                    "scatter: scatter_list must NOT be specified on ranks other than the source, ", src);
  std::vector<Tensors> inputs;
  if (call.is_self(root)) inputs.push_back(scatter_list);
  Tensors outputs{tensor};
  return finish(call.backend().scatter(outputs, inputs, with_root<c10d::ScatterOptions>(root, async_op)),
                async_op);
}

// ---- all to all

Work all_gather(const Tensors& tensor_list, const at::Tensor& tensor, const ProcessGroup& group,
                bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  std::vector<Tensors> outputs{tensor_list};
  Tensors inputs{tensor};
  return finish(call.backend().allgather(outputs, inputs, with_async<c10d::AllgatherOptions>(async_op)),
                async_op);
}

Work all_gather_into_tensor(const at::Tensor& output_tensor, const at::Tensor& input_tensor,
                            const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(output_tensor));
  at::Tensor to = output_tensor;
  at::Tensor from = input_tensor;
  return finish(call.backend()._allgather_base(to, from, with_async<c10d::AllgatherOptions>(async_op)),
                async_op);
}

Work all_gather_coalesced(const std::vector<Tensors>& output_tensor_lists, const Tensors& input_tensor_list,
                          const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(input_tensor_list));
  std::vector<Tensors> to = output_tensor_lists;
  Tensors from = input_tensor_list;
  return finish(call.backend().allgather_coalesced(to, from, with_async<c10d::AllgatherOptions>(async_op)),
                async_op);
}

Work all_gather_into_tensor_coalesced(const Tensors& output_tensors, const Tensors& input_tensors,
                                      const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(output_tensors));
  Tensors to = output_tensors;
  Tensors from = input_tensors;
  return finish(
      call.backend().allgather_into_tensor_coalesced(to, from, with_async<c10d::AllgatherOptions>(async_op)),
      async_op);
}

Work all_to_all(const Tensors& output_tensor_list, const Tensors& input_tensor_list,
                const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(output_tensor_list));
  Tensors to = output_tensor_list;
  Tensors from = input_tensor_list;
  return finish(call.backend().alltoall(to, from, with_async<c10d::AllToAllOptions>(async_op)), async_op);
}

Work all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const std::vector<int64_t>& output_split_sizes,
                       const std::vector<int64_t>& input_split_sizes, const ProcessGroup& group,
                       bool async_op, const Caller& caller) {
  const Call call(group, caller, device_type_of(output));
  at::Tensor to = output;
  at::Tensor from = input;
  std::vector<int64_t> output_splits = output_split_sizes;
  std::vector<int64_t> input_splits = input_split_sizes;
  return finish(call.backend().alltoall_base(to, from, output_splits, input_splits,
                                             with_async<c10d::AllToAllOptions>(async_op)),
                async_op);
}

// ---- point to point

void send(const at::Tensor& tensor, int dst, const ProcessGroup& group, int tag, const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  const int to = call.group_rank(dst);
  check_not_self(call, to, "destination");
  start_message(call, /*is_send=*/true, tensor, to, tag, /*background=*/false)->wait();
}

int recv(const at::Tensor& tensor, std::optional<int> src, const ProcessGroup& group, int tag,
         const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  const auto from = group_source(call, src);
  if (from) check_not_self(call, *from, "source");
  const Work work = start_message(call, /*is_send=*/false, tensor, from, tag, /*background=*/false);
  work->wait();
  return src ? *src : call.global_rank(work->sourceRank());
}

Work isend(const at::Tensor& tensor, int dst, const ProcessGroup& group, int tag, const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  return start_message(call, /*is_send=*/true, tensor, call.group_rank(dst), tag, /*background=*/true);
}

Work irecv(const at::Tensor& tensor, std::optional<int> src, const ProcessGroup& group, int tag,
           const Caller& caller) {
  const Call call(group, caller, device_type_of(tensor));
  return start_message(call, /*is_send=*/false, tensor, group_source(call, src), tag, /*background=*/true);
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& p2p_op_list, const Caller& caller) {
  TORCH_CHECK_VALUE(!p2p_op_list.empty(), "batch_isend_irecv: the list is empty");
  std::vector<Work> works;
  for (const P2POp& op : p2p_op_list) {
    TORCH_CHECK_VALUE(op.group == p2p_op_list.front().group, "All ops need to use the same group.");
    TORCH_CHECK_VALUE(device_type_of(op.tensor) == device_type_of(p2p_op_list.front().tensor),
                      "batch_isend_irecv: all tensors must be on one kind of device, these are on ",
                      p2p_op_list.front().tensor.device(), " and ", op.tensor.device(),
                      "; make a batch of each");
  }
  // NCCL must get them as one, or two ranks that both begin with a send would wait for each other.
  const Call call(p2p_op_list.front().group, caller, device_type_of(p2p_op_list.front().tensor));
  const bool as_one = call.backend().supportsCoalescing();
  if (as_one) call.backend().startCoalescing();
  try {
    for (const P2POp& op : p2p_op_list) {
      works.push_back(op.op == P2POp::Kind::kSend ? isend(op.tensor, op.peer, op.group, op.tag, caller)
                                                  : irecv(op.tensor, op.peer, op.group, op.tag, caller));
    }
  } catch (...) {
    try {
      if (as_one) call.backend().endCoalescing();
    } catch (const c10::Error&) {  // the first error says more
    }
    throw;
  }
  if (as_one) works = {call.backend().endCoalescing()};
  return works;
}

// ---- barriers

Work barrier(const ProcessGroup& group, bool async_op, const Caller& caller) {
  const Call call(group, caller);
  return finish(call.backend().barrier(with_async<c10d::BarrierOptions>(async_op)), async_op);
}

void monitored_barrier(const ProcessGroup& group, std::optional<std::chrono::milliseconds> timeout,
                       bool wait_all_ranks, const Caller& caller) {
  TORCH_CHECK_VALUE(!timeout || timeout->count() > 0, "monitored_barrier: the timeout is ",
                    timeout.value_or(std::chrono::milliseconds(0)).count(), " ms; it must be more than 0");
  const Call call(group, caller);
  c10d::BarrierOptions options;
  if (timeout) options.timeout = *timeout;
  call.backend().monitoredBarrier(options, wait_all_ranks);
}

}  // namespace lockstep
