#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/internal/tensor_check.h>

namespace lockstep {
namespace {

ProcessGroup or_default(const ProcessGroup& group) {
  TORCH_CHECK_VALUE(is_member(group),
                    "this rank is not a member of the group; leave the call to its members");
  return group ? group : default_group();
}

Work finish(const Work& work, bool async_op) {
  if (async_op) return work;
  work->wait();
  return {};
}

}  // namespace

Work all_reduce(const at::Tensor& tensor, const ReduceOp& op, const ProcessGroup& group, bool async_op) {
  check_tensor(tensor, "all_reduce");  // here, for the dispatcher's own words are no help
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.asyncOp = async_op;
  std::vector<at::Tensor> tensors{tensor};
  return finish(or_default(group)->allreduce(tensors, options), async_op);
}

Work broadcast(const at::Tensor& tensor, int src, const ProcessGroup& group, bool async_op) {
  check_tensor(tensor, "broadcast");
  c10d::BroadcastOptions options;
  const ProcessGroup members = or_default(group);
  options.rootRank = get_group_rank(members, src);
  options.asyncOp = async_op;
  std::vector<at::Tensor> tensors{tensor};
  return finish(members->broadcast(tensors, options), async_op);
}

Work all_gather(std::vector<at::Tensor>& tensor_list, const at::Tensor& tensor, const ProcessGroup& group,
                bool async_op) {
  check_tensor(tensor, "all_gather");
  for (const at::Tensor& output : tensor_list) check_tensor(output, "all_gather");
  c10d::AllgatherOptions options;
  options.asyncOp = async_op;
  std::vector<std::vector<at::Tensor>> outputs{tensor_list};
  std::vector<at::Tensor> inputs{tensor};
  return finish(or_default(group)->allgather(outputs, inputs, options), async_op);
}

Work barrier(const ProcessGroup& group, bool async_op) {
  c10d::BarrierOptions options;
  options.asyncOp = async_op;
  return finish(or_default(group)->barrier(options), async_op);
}

}  // namespace lockstep
