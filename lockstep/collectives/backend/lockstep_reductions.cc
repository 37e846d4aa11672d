#include <utility>

#include <lockstep/collectives/backend/internal/planning.h>
#include <lockstep/collectives/backend/internal/reduce_op.h>
#include <lockstep/collectives/backend/internal/sparse.h>
#include <lockstep/collectives/backend/internal/tensor_check.h>
#include <lockstep/collectives/backend/lockstep_backend.h>

// The reductions of LockstepBackend: each checks its arguments, says what must agree on all ranks, and
// describes the work as a reduction, or as an exchange whose pieces are reduced.
namespace lockstep {

using namespace collectives::internal;
using namespace planning;

Signature LockstepBackend::reducing_signature(const Signature& signature, const Reducing& reducing) const {
  return signature.with(reducing.operation, reducing.factor.defined(),
                        BetweenHosts::compression().value_or(settings_.between_hosts));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce(Tensors& tensors,
                                                          const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  if (tensor.defined() && tensor.is_sparse()) return allreduce_sparse(tensors, options);
  check_output(tensor, "all_reduce");
  const Reducing reducing = reducing_of(options.reduceOp, tensor, "all_reduce");
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  const at::Tensor buffer =
      reducing.factor.defined() ? operands->scaled(tensor, reducing.factor) : operands->in_out(tensor);
  if (reducing.factor.defined()) operands->copy_back(tensor, buffer);
  const Signature signature = reducing_signature(Signature::of(CollectiveKind::kAllReduce, tensor), reducing);
  return submit(
      plan_reduction(channel_, options, signature, c10d::OpType::ALLREDUCE, tensors, operands, buffer));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce_sparse(Tensors& tensors,
                                                                 const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  check_sparse(tensor, options.reduceOp, "all_reduce");
  const Signature signature = Signature::of(CollectiveKind::kAllReduce, tensor).with(ReduceOperation::kSum);
  PlannedOperation plan{.signature = signature,
                        .type = c10d::OpType::ALLREDUCE,
                        .inputs = tensors,
                        .outputs = tensors,
                        .timeout = options.timeout,
                        .asynchronous = options.asyncOp};
  if (tensor.is_cpu()) {
    plan.body = [channel = channel_, signature, tensor](const Terms& terms) {
      all_reduce_sparse(*channel, terms, signature, {tensor});
    };
  } else {
    plan.operands = std::make_shared<Operands>(*channel_, staging_);
    auto* copies = &plan.operands->on_device(tensor.device());  // as long as the operands
    plan.body = [channel = channel_, signature, tensor, copies](const Terms& terms) {
      const at::Tensor mine = copies->fetch_sparse(tensor, *channel, terms.deadline);
      if (!mine.defined()) return algorithms::barrier(*channel, terms);  // throws why the group has failed
      copies->bring_sparse(tensor, sum_sparse(*channel, terms, signature, mine));
    };
  }
  return submit(std::move(plan));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce_coalesced: the list of tensors is empty");
  for (const at::Tensor& tensor : tensors) check_output(tensor, "all_reduce_coalesced");
  check_one_kind(tensors, "all_reduce_coalesced");
  const Reducing reducing = reducing_of(options.reduceOp, tensors.front(), "all_reduce_coalesced");
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  const at::Tensor buffer = operands->flattened(tensors);
  operands->unflatten(buffer, tensors);
  if (reducing.factor.defined()) operands->scale(buffer, reducing.factor);
  const Signature signature =
      reducing_signature(Signature::of(CollectiveKind::kAllReduceCoalesced, tensors), reducing);
  return submit(plan_reduction(channel_, options, signature, c10d::OpType::ALLREDUCE_COALESCED, tensors,
                               operands, buffer));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = checked_root(options.rootRank, "reduce", "destination");
  check_output(tensor, "reduce");
  const Reducing reducing = reducing_of(options.reduceOp, tensor, "reduce");
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  at::Tensor buffer;
  if (reducing.factor.defined()) {
    buffer = operands->scaled(tensor, reducing.factor);
    if (root == rank_) operands->copy_back(tensor, buffer);
  } else {
    buffer = root == rank_ ? operands->in_out(tensor) : operands->input(tensor);
  }
  const Signature signature =
      reducing_signature(Signature::of(CollectiveKind::kReduce, tensor, root), reducing);
  return submit(
      plan_reduction(channel_, options, signature, c10d::OpType::REDUCE, tensors, operands, buffer));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                               const c10d::ReduceScatterOptions& options) {
  const at::Tensor& output = only_tensor(outputs, "reduce_scatter");
  const Tensors& list = only_list(inputs, "reduce_scatter");
  check_output(output, "reduce_scatter");
  check_list_size(list, size_, "reduce_scatter", "input_list");
  for (const at::Tensor& input : list) check_input(input, "reduce_scatter");
  // The parts for other ranks may have other sizes, as long as those ranks' outputs have them too.
  for (const at::Tensor& input : list) check_same_kind(output, {input}, "reduce_scatter");
  check_like(list[rank_], output, "reduce_scatter", "input_list[" + std::to_string(rank_) + ']');
  const Reducing reducing = reducing_of(options.reduceOp, output, "reduce_scatter");
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  Exchange exchange;
  for (int to = 0; to < size_; ++to) {
    const bool overwritten = is_overwritten(list[to], output, to == rank_);
    exchange.gives.push_back(piece_of(reducing.factor.defined() ? operands->scaled(list[to], reducing.factor)
                                      : overwritten             ? operands->copy(list[to])
                                                                : operands->input(list[to])));
  }
  exchange.takes.assign(size_, output.nbytes());
  exchange.compare_sizes = true;
  const Signature signature = Signature::of_dtype(CollectiveKind::kReduceScatter, output.scalar_type())
                                  .with(reducing.operation, reducing.factor.defined());
  const at::Tensor result = operands->output(output);
  return submit(plan_reduce_scatter(channel_, options, signature, c10d::OpType::REDUCE_SCATTER, list, outputs,
                                    operands, std::move(exchange), result));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  constexpr const char* kName = "reduce_scatter_tensor";
  check_parts(input, "the input", output, "the output", size_, kName);
  check_output(output, kName);
  const Reducing reducing = reducing_of(options.reduceOp, output, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  const bool own_part = is_part(output, input, size_, rank_);
  const at::Tensor& source = reducing.factor.defined() ? operands->scaled(input, reducing.factor)
                             : !own_part && memory_overlaps(input, output) ? operands->copy(input)
                                                                           : operands->input(input);
  Exchange exchange;
  for (int to = 0; to < size_; ++to) exchange.gives.push_back(part_of(source, size_, to));
  exchange.takes.assign(size_, output.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kReduceScatterTensor, output)
                                  .with(reducing.operation, reducing.factor.defined());
  const at::Tensor result = operands->output(output);
  return submit(plan_reduce_scatter(channel_, options, signature, c10d::OpType::_REDUCE_SCATTER_BASE, {input},
                                    {output}, operands, std::move(exchange), result));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr const char* kName = "reduce_scatter_tensor_coalesced";
  TORCH_CHECK_VALUE(!outputs.empty() && outputs.size() == inputs.size(), kName, ": ", outputs.size(),
                    " outputs and ", inputs.size(),
                    " inputs; one output is needed for each input, one at least");
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_parts(inputs[i], "an input", outputs[i], "its output", size_, kName);
    check_output(outputs[i], kName);
  }
  check_one_kind(outputs, kName);
  check_one_kind(inputs, kName);
  const Reducing reducing = reducing_of(options.reduceOp, outputs.front(), kName);
  // What goes to one rank lies together.
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  Tensors parts;
  for (int to = 0; to < size_; ++to) {
    for (const at::Tensor& input : inputs)
      parts.push_back(input.detach().reshape({size_, input.numel() / size_}).select(0, to));
  }
  const at::Tensor source = operands->flattened(parts);
  if (reducing.factor.defined()) operands->scale(source, reducing.factor);
  const at::Tensor result = operands->shared(source.numel() / size_, source.scalar_type());
  operands->unflatten(result, outputs);
  Exchange exchange;
  for (int to = 0; to < size_; ++to) exchange.gives.push_back(part_of(source, size_, to));
  exchange.takes.assign(size_, result.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kReduceScatterCoalesced, outputs)
                                  .with(reducing.operation, reducing.factor.defined());
  return submit(plan_reduce_scatter(channel_, options, signature, c10d::OpType::REDUCE_SCATTER, inputs,
                                    outputs, operands, std::move(exchange), result));
}

}  // namespace lockstep
