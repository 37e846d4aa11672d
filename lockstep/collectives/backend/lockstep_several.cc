#include <utility>

#include <lockstep/collectives/algorithms/segments.h>
#include <lockstep/collectives/backend/internal/planning.h>
#include <lockstep/collectives/backend/internal/reduce_op.h>
#include <lockstep/collectives/backend/internal/sparse.h>
#include <lockstep/collectives/backend/internal/tensor_check.h>
#include <lockstep/collectives/backend/lockstep_backend.h>

// The collectives of LockstepBackend that take several tensors a rank, as Gloo's do.
namespace lockstep {

using namespace collectives::internal;
using namespace planning;

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce_several(Tensors& tensors,
                                                                  const c10d::AllreduceOptions& options) {
  constexpr const char* kName = "all_reduce";
  const at::Tensor& first = tensors.front();
  check_one_kind(tensors, kName);
  if (first.is_sparse()) {
    for (const at::Tensor& tensor : tensors) check_sparse(tensor, options.reduceOp, kName);
    TORCH_CHECK_VALUE(first.is_cpu(), kName, ": several sparse tensors a rank must be on the CPU");
    for (const at::Tensor& tensor : tensors)
      TORCH_CHECK_VALUE(tensor.sparse_dim() == first.sparse_dim(), kName,
                        ": sparse tensors must all have one number of sparse dimensions, these have ",
                        first.sparse_dim(), " and ", tensor.sparse_dim());
    const Signature signature = Signature::of(CollectiveKind::kAllReduce, first).with(ReduceOperation::kSum);
    return submit({.signature = signature,
                   .type = c10d::OpType::ALLREDUCE,
                   .inputs = tensors,
                   .outputs = tensors,
                   .timeout = options.timeout,
                   .asynchronous = options.asyncOp,
                   .body = [channel = channel_, signature, tensors](const Terms& terms) {
                     all_reduce_sparse(*channel, terms, signature, tensors);
                   }});
  }
  for (const at::Tensor& tensor : tensors) check_output(tensor, kName);
  const Reducing reducing = reducing_of(options.reduceOp, first, kName);
  const bool average = reducing.operation == ReduceOperation::kAverage;
  const ReduceKernels& kernels =
      average ? reduce_kernels(c10::toRealValueType(first.scalar_type()), ReduceOperation::kSum)
              : reducing.kernels;
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  const at::Tensor all = operands->flattened(tensors);
  if (reducing.factor.defined()) operands->scale(all, reducing.factor);
  const at::Tensor buffer = all.narrow(0, 0, first.numel());
  for (const at::Tensor& tensor : tensors) operands->copy_back(tensor, buffer);
  const Signature signature =
      Signature::of(CollectiveKind::kAllReduce, first).with(reducing.operation, reducing.factor.defined());
  auto plan =
      plan_reduction(channel_, options, signature, c10d::OpType::ALLREDUCE, tensors, operands, buffer);
  plan.body = [all, count = tensors.size(), &kernels, reduce = std::move(plan.body)](const Terms& terms) {
    std::vector<const void*> parts;
    for (size_t i = 0; i < count; ++i)
      parts.push_back(part_of(all, static_cast<int>(count), static_cast<int>(i)).data);
    void* to = bytes_of(all);
    const size_t elements = all.nbytes() / count / kernels.element_size;
    if (elements > 0) kernels.reduce(&to, 1, parts.data(), count, elements);
    reduce(terms);
  };
  return submit(std::move(plan));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::broadcast_several(Tensors& tensors,
                                                                  const c10d::BroadcastOptions& options) {
  constexpr const char* kName = "broadcast";
  const int root = checked_root(options.rootRank, kName, "source");
  for (const at::Tensor& tensor : tensors) check_output(tensor, kName);
  check_one_kind(tensors, kName);
  const auto root_tensor = static_cast<size_t>(options.rootTensor);
  const at::Tensor& tensor = tensors[root_tensor];
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  Exchange exchange;
  exchange.takes.assign(size_, 0);
  Segments destination(size_);
  const at::Tensor data = root == rank_ ? operands->input(tensor) : operands->output(tensor);
  if (root == rank_) {
    exchange.gives.push_back(piece_of(data));
  } else {
    exchange.takes[root] = tensor.nbytes();
    destination.add(root, data);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (i != root_tensor) operands->copy_back(tensors[i], data);
  }
  const Signature signature = Signature::of(CollectiveKind::kBroadcast, tensor, root);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::BROADCAST, tensors, tensors,
                              operands, std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allgather_several(std::vector<Tensors>& outputs,
                                                                  Tensors& inputs,
                                                                  const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather";
  for (const at::Tensor& input : inputs) check_input(input, kName);
  check_one_kind(inputs, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  const at::Tensor source = operands->flattened(inputs);
  Segments destination(size_);
  Tensors buffers;  // those of the first list
  Tensors all_outputs;
  for (const Tensors& list : outputs) {
    check_same_kind(inputs.front(), list, kName);
    for (size_t i = 0; i < list.size(); ++i) {
      check_output(list[i], kName);
      if (&list != &outputs.front()) {
        operands->copy_back(list[i], buffers[i]);
        continue;
      }
      buffers.push_back(operands->output(list[i]));
      destination.add(static_cast<int>(i / inputs.size()), buffers.back());
    }
    all_outputs.insert(all_outputs.end(), list.begin(), list.end());
  }
  Exchange exchange;
  exchange.gives.push_back(piece_of(source));
  exchange.takes.assign(size_, source.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kAllGather, inputs);
  auto plan =
      plan_exchange(channel_, options, signature, c10d::OpType::ALLGATHER, inputs, std::move(all_outputs),
                    operands, std::move(exchange), std::move(destination).consumer());
  plan.future_form.lists = outputs.size();
  return submit(std::move(plan));
}

}  // namespace lockstep
