#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <lockstep/collectives/internal/exchange.h>
#include <lockstep/collectives/internal/planned_operation.h>
#include <lockstep/collectives/internal/reduce_op.h>
#include <lockstep/collectives/internal/segments.h>
#include <lockstep/collectives/internal/sparse.h>
#include <lockstep/collectives/internal/tensor_check.h>
#include <lockstep/collectives/lockstep_backend.h>

// The collectives of LockstepBackend: each checks its arguments, says what must agree on all ranks, and
// describes the work as a reduction or an exchange.
namespace lockstep {
namespace {

using algorithms::Consume;
using algorithms::Exchange;
using algorithms::Piece;
using algorithms::Terms;
using Tensors = std::vector<at::Tensor>;

const at::Tensor& only_tensor(const Tensors& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, " takes one tensor a rank, not ", tensors.size());
  return tensors.front();
}

/// The one list of a c10d call that takes lists by device; empty on ranks that give none.
const Tensors& only_list(const std::vector<Tensors>& lists, const char* operation) {
  static const Tensors none;
  if (lists.empty()) return none;
  TORCH_CHECK_VALUE(lists.size() == 1, operation, " takes one list of tensors a rank, not ", lists.size());
  return lists.front();
}

Piece piece_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.nbytes()};
}
/// Part `index` of a contiguous tensor in equal parts.
Piece part_of(const at::Tensor& tensor, int parts, int index) {
  const size_t bytes = tensor.nbytes() / parts;
  return {static_cast<const std::byte*>(tensor.const_data_ptr()) + index * bytes, bytes};
}
std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

/// `other` must have `tensor`'s dtype and sizes; complex numbers and pairs of real ones may stand for each
/// other.
void check_like(const at::Tensor& other, const at::Tensor& tensor, const char* operation,
                const std::string& name) {
  check_same_dtype(tensor, {other}, operation);
  const bool same = other.scalar_type() == tensor.scalar_type() ? other.sizes() == tensor.sizes()
                                                                : other.nbytes() == tensor.nbytes();
  TORCH_CHECK_VALUE(same, operation, ": ", name, " is ", other.scalar_type(), ' ', other.sizes(),
                    ", but it must be like the other tensor, ", tensor.scalar_type(), ' ', tensor.sizes());
}
void check_list_like(const Tensors& list, const at::Tensor& tensor, const char* operation, const char* name) {
  for (size_t i = 0; i < list.size(); ++i)
    check_like(list[i], tensor, operation, name + ('[' + std::to_string(i) + ']'));
}

/// `whole` must have `parts` times the elements of `part`.
void check_parts(const at::Tensor& whole, const char* whole_name, const at::Tensor& part,
                 const char* part_name, int parts, const char* operation) {
  check_input(whole, operation);
  check_input(part, operation);
  check_same_dtype(whole, {part}, operation);
  TORCH_CHECK_VALUE(whole.nbytes() == part.nbytes() * parts, operation, ": ", whole_name, " of sizes ",
                    whole.sizes(), " must have ", parts, " times the elements of ", part_name, " of sizes ",
                    part.sizes(), ", one part for each rank");
}

/// What a rank gives to itself must be what it takes from itself: known before anybody is waited for.
void check_own_part(size_t given, size_t taken, const char* operation) {
  TORCH_CHECK_VALUE(given == taken, operation, ": this rank's part of the input has ", given,
                    " bytes, its part of the output has ", taken);
}

/// Whether `part` is this very part of `whole`, so that neither need be copied.
bool is_part(const at::Tensor& part, const at::Tensor& whole, int parts, int index) {
  return part.is_contiguous() && whole.is_contiguous() &&
         part.const_data_ptr() == part_of(whole, parts, index).data;
}

/// Where a reduction or exchange of these operands stands in the queue. `Options`: any of c10d's.
template <class Options>
PlannedOperation plan_reduction(const std::shared_ptr<transport::GroupChannel>& channel,
                                const Options& options, const Signature& signature, c10d::OpType type,
                                const Tensors& tensors, std::shared_ptr<Operands> operands,
                                const at::Tensor& buffer) {
  // Of a reduction to one rank, the others' data are only read.
  auto* data = const_cast<void*>(buffer.const_data_ptr());
  return {signature,
          type,
          tensors,
          tensors,
          operands,
          options.timeout,
          options.asyncOp,
          [channel, signature, data](const Terms& terms) {
            algorithms::reduce(*channel, terms, signature, data);
          }};
}

template <class Options>
PlannedOperation plan_exchange(const std::shared_ptr<transport::GroupChannel>& channel,
                               const Options& options, const Signature& signature, c10d::OpType type,
                               Tensors inputs, Tensors outputs, std::shared_ptr<Operands> operands,
                               Exchange exchange, Consume consume) {
  return {signature,
          type,
          std::move(inputs),
          std::move(outputs),
          std::move(operands),
          options.timeout,
          options.asyncOp,
          [channel, signature, exchange = std::move(exchange), consume = std::move(consume)](
              const Terms& terms) { algorithms::exchange(*channel, terms, signature, exchange, consume); }};
}

/// Folds windows of all ranks into `output`, in rank order.
Consume reduce_to(const ReduceKernels& kernels, std::byte* output) {
  return [&kernels, output](const std::vector<algorithms::Window>& windows) {
    std::vector<const void*> inputs;
    for (const auto& window : windows) inputs.push_back(window.data);
    void* to = output + windows.front().offset;
    const size_t count = windows.front().bytes / kernels.element_size;
    if (count > 0) kernels.reduce(&to, 1, inputs.data(), inputs.size(), count);
  };
}

}  // namespace

// ---- reductions

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce(Tensors& tensors,
                                                          const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  if (tensor.defined() && tensor.is_sparse()) return allreduce_sparse(tensors, options);
  check_output(tensor, "all_reduce");
  const Reducing reducing = reducing_of(options.reduceOp, tensor.scalar_type(), "all_reduce");
  auto operands = std::make_shared<Operands>(*channel_);
  const at::Tensor buffer =
      reducing.factor.defined() ? operands->scaled(tensor, reducing.factor) : operands->in_out(tensor);
  if (reducing.factor.defined()) operands->copy_back(tensor, buffer);
  const Signature signature =
      Signature::of(CollectiveKind::kAllReduce, tensor).with(reducing.operation, reducing.factor.defined());
  return submit(
      plan_reduction(channel_, options, signature, c10d::OpType::ALLREDUCE, tensors, operands, buffer));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce_sparse(Tensors& tensors,
                                                                 const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  check_sparse(tensor, options.reduceOp, "all_reduce");
  const Signature signature = Signature::of(CollectiveKind::kAllReduce, tensor).with(ReduceOperation::kSum);
  return submit({signature, c10d::OpType::ALLREDUCE, tensors, tensors, nullptr, options.timeout,
                 options.asyncOp, [channel = channel_, signature, tensor](const Terms& terms) {
                   algorithms::all_reduce_sparse(*channel, terms, signature, tensor);
                 }});
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce_coalesced: the list of tensors is empty");
  for (const at::Tensor& tensor : tensors) check_output(tensor, "all_reduce_coalesced");
  check_one_dtype(tensors, "all_reduce_coalesced");
  const Reducing reducing =
      reducing_of(options.reduceOp, tensors.front().scalar_type(), "all_reduce_coalesced");
  auto operands = std::make_shared<Operands>(*channel_);
  const at::Tensor buffer = operands->flattened(tensors);
  operands->unflatten(buffer, tensors);
  if (reducing.factor.defined()) Operands::scale(buffer, reducing.factor);
  const Signature signature = Signature::of(CollectiveKind::kAllReduceCoalesced, tensors)
                                  .with(reducing.operation, reducing.factor.defined());
  return submit(plan_reduction(channel_, options, signature, c10d::OpType::ALLREDUCE_COALESCED, tensors,
                               operands, buffer));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "reduce");
  const int root = checked_root(options.rootRank, "reduce", "destination");
  check_output(tensor, "reduce");
  const Reducing reducing = reducing_of(options.reduceOp, tensor.scalar_type(), "reduce");
  auto operands = std::make_shared<Operands>(*channel_);
  at::Tensor buffer;
  if (reducing.factor.defined()) {
    buffer = operands->scaled(tensor, reducing.factor);
    if (root == rank_) operands->copy_back(tensor, buffer);
  } else {
    buffer = root == rank_ ? operands->in_out(tensor) : operands->input(tensor);
  }
  const Signature signature = Signature::of(CollectiveKind::kReduce, tensor, root)
                                  .with(reducing.operation, reducing.factor.defined());
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
  for (const at::Tensor& input : list) check_same_dtype(output, {input}, "reduce_scatter");
  check_like(list[rank_], output, "reduce_scatter", "input_list[" + std::to_string(rank_) + ']');
  const Reducing reducing = reducing_of(options.reduceOp, output.scalar_type(), "reduce_scatter");
  auto operands = std::make_shared<Operands>(*channel_);
  Exchange exchange;
  for (int to = 0; to < size_; ++to) {
    const bool overwritten = to != rank_ && memory_overlaps(list[to], output);
    exchange.gives.push_back(piece_of(reducing.factor.defined() ? operands->scaled(list[to], reducing.factor)
                                      : overwritten             ? operands->copy(list[to])
                                                                : operands->input(list[to])));
  }
  exchange.takes.assign(size_, output.nbytes());
  exchange.compare_sizes = true;
  const Signature signature = Signature::of_dtype(CollectiveKind::kReduceScatter, output.scalar_type())
                                  .with(reducing.operation, reducing.factor.defined());
  auto consume = reduce_to(reducing.kernels, bytes_of(operands->output(output)));
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::REDUCE_SCATTER, list, outputs,
                              operands, std::move(exchange), consume));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  constexpr const char* kName = "reduce_scatter_tensor";
  check_parts(input, "the input", output, "the output", size_, kName);
  check_output(output, kName);
  const Reducing reducing = reducing_of(options.reduceOp, output.scalar_type(), kName);
  auto operands = std::make_shared<Operands>(*channel_);
  const bool own_part = is_part(output, input, size_, rank_);
  const at::Tensor& source = reducing.factor.defined() ? operands->scaled(input, reducing.factor)
                             : !own_part && memory_overlaps(input, output) ? operands->copy(input)
                                                                           : operands->input(input);
  Exchange exchange;
  for (int to = 0; to < size_; ++to) exchange.gives.push_back(part_of(source, size_, to));
  exchange.takes.assign(size_, output.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kReduceScatterTensor, output)
                                  .with(reducing.operation, reducing.factor.defined());
  auto consume = reduce_to(reducing.kernels, bytes_of(operands->output(output)));
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::_REDUCE_SCATTER_BASE, {input},
                              {output}, operands, std::move(exchange), consume));
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
  check_one_dtype(outputs, kName);
  const Reducing reducing = reducing_of(options.reduceOp, outputs.front().scalar_type(), kName);
  // What goes to one rank lies together.
  auto operands = std::make_shared<Operands>(*channel_);
  Tensors parts;
  for (int to = 0; to < size_; ++to) {
    for (const at::Tensor& input : inputs)
      parts.push_back(input.detach().reshape({size_, input.numel() / size_}).select(0, to));
  }
  const at::Tensor source = operands->flattened(parts);
  if (reducing.factor.defined()) Operands::scale(source, reducing.factor);
  const at::Tensor result = operands->shared(source.numel() / size_, source.scalar_type());
  operands->unflatten(result, outputs);
  Exchange exchange;
  for (int to = 0; to < size_; ++to) exchange.gives.push_back(part_of(source, size_, to));
  exchange.takes.assign(size_, result.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kReduceScatterCoalesced, outputs)
                                  .with(reducing.operation, reducing.factor.defined());
  auto consume = reduce_to(reducing.kernels, bytes_of(result));
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::REDUCE_SCATTER, inputs, outputs,
                              operands, std::move(exchange), consume));
}

// ---- one to all, all to one

c10::intrusive_ptr<c10d::Work> LockstepBackend::broadcast(Tensors& tensors,
                                                          const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  const int root = checked_root(options.rootRank, "broadcast", "source");
  const bool is_root = root == rank_;
  is_root ? check_input(tensor, "broadcast") : check_output(tensor, "broadcast");
  auto operands = std::make_shared<Operands>(*channel_);
  Exchange exchange;
  exchange.takes.assign(size_, 0);
  Segments destination(size_);
  if (is_root) {
    exchange.gives.push_back(piece_of(operands->input(tensor)));
  } else {
    exchange.takes[root] = tensor.nbytes();
    destination.add(root, operands->output(tensor));
  }
  const Signature signature = Signature::of(CollectiveKind::kBroadcast, tensor, root);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::BROADCAST, tensors, tensors,
                              operands, std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                       const c10d::GatherOptions& options) {
  const at::Tensor& input = only_tensor(inputs, "gather");
  const int root = checked_root(options.rootRank, "gather", "destination");
  const Tensors& list = only_list(outputs, "gather");
  check_input(input, "gather");
  if (root == rank_) {
    check_list_size(list, size_, "gather", "gather_list");
    for (const at::Tensor& output : list) check_output(output, "gather");
    check_list_like(list, input, "gather", "gather_list");
  } else {
    TORCH_CHECK_VALUE(list.empty(), "gather: gather_list must be empty on ranks other than the destination");
  }
  auto operands = std::make_shared<Operands>(*channel_);
  Exchange exchange;
  exchange.gives.push_back(piece_of(operands->input(input)));
  exchange.takes.assign(size_, root == rank_ ? input.nbytes() : 0);
  Segments destination(size_);
  for (size_t from = 0; from < list.size(); ++from)
    destination.add(static_cast<int>(from), operands->output(list[from]));
  const Signature signature = Signature::of(CollectiveKind::kGather, input, root);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::GATHER, inputs, list, operands,
                              std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                        const c10d::ScatterOptions& options) {
  const at::Tensor& output = only_tensor(outputs, "scatter");
  const int root = checked_root(options.rootRank, "scatter", "source");
  const Tensors& list = only_list(inputs, "scatter");
  check_output(output, "scatter");
  auto operands = std::make_shared<Operands>(*channel_);
  Exchange exchange;
  if (root == rank_) {
    check_list_size(list, size_, "scatter", "scatter_list");
    for (const at::Tensor& input : list) check_input(input, "scatter");
    check_list_like(list, output, "scatter", "scatter_list");
    for (int to = 0; to < size_; ++to) {
      const bool overwritten = to != rank_ && memory_overlaps(list[to], output);
      exchange.gives.push_back(piece_of(overwritten ? operands->copy(list[to]) : operands->input(list[to])));
    }
  } else {
    TORCH_CHECK_VALUE(list.empty(), "scatter: scatter_list must be empty on ranks other than the source");
  }
  exchange.takes.assign(size_, 0);
  exchange.takes[root] = output.nbytes();
  Segments destination(size_);
  destination.add(root, operands->output(output));
  const Signature signature = Signature::of(CollectiveKind::kScatter, output, root);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::SCATTER, list, outputs, operands,
                              std::move(exchange), std::move(destination).consumer()));
}

// ---- all to all

c10::intrusive_ptr<c10d::Work> LockstepBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only_tensor(inputs, "all_gather");
  const Tensors& list = only_list(outputs, "all_gather");
  check_input(input, "all_gather");
  check_list_size(list, size_, "all_gather", "tensor_list");
  for (const at::Tensor& output : list) check_output(output, "all_gather");
  check_list_like(list, input, "all_gather", "tensor_list");
  auto operands = std::make_shared<Operands>(*channel_);
  bool overwritten = false;
  Segments destination(size_);
  for (int from = 0; from < size_; ++from) {
    overwritten |= from != rank_ && memory_overlaps(list[from], input);
    destination.add(from, operands->output(list[from]));
  }
  Exchange exchange;
  exchange.gives.push_back(piece_of(overwritten ? operands->copy(input) : operands->input(input)));
  exchange.takes.assign(size_, input.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kAllGather, input);
  auto plan = plan_exchange(channel_, options, signature, c10d::OpType::ALLGATHER, inputs, list, operands,
                            std::move(exchange), std::move(destination).consumer());
  plan.outputs_are_one = true;
  return submit(std::move(plan));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor";
  check_parts(output, "the output", input, "the input", size_, kName);
  check_output(output, kName);
  auto operands = std::make_shared<Operands>(*channel_);
  const bool own_part = is_part(input, output, size_, rank_);
  Exchange exchange;
  exchange.gives.push_back(
      piece_of(!own_part && memory_overlaps(output, input) ? operands->copy(input) : operands->input(input)));
  exchange.takes.assign(size_, input.nbytes());
  Segments destination(size_);
  std::byte* parts = bytes_of(operands->output(output));
  for (int from = 0; from < size_; ++from)
    destination.add(from, parts + from * input.nbytes(), input.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kAllGatherIntoTensor, input);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::_ALLGATHER_BASE, {input}, {output},
                              operands, std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allgather_coalesced(std::vector<Tensors>& output_lists,
                                                                    Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty(), kName, ": the list of inputs is empty");
  TORCH_CHECK_VALUE(output_lists.size() == static_cast<size_t>(size_), kName, ": ", output_lists.size(),
                    " lists of outputs; one is needed for each of the ", size_, " ranks");
  for (const at::Tensor& input : inputs) check_input(input, kName);
  check_one_dtype(inputs, kName);
  auto operands = std::make_shared<Operands>(*channel_);
  const at::Tensor source = operands->flattened(inputs);
  Segments destination(size_);
  Tensors outputs;
  for (int from = 0; from < size_; ++from) {
    const Tensors& list = output_lists[from];
    TORCH_CHECK_VALUE(list.size() == inputs.size(), kName, ": the list for rank ", from, " has ", list.size(),
                      " tensors, there are ", inputs.size(), " inputs");
    for (size_t i = 0; i < list.size(); ++i) {
      check_output(list[i], kName);
      check_like(list[i], inputs[i], kName, "an output");
      destination.add(from, operands->output(list[i]));
    }
    outputs.insert(outputs.end(), list.begin(), list.end());
  }
  Exchange exchange;
  exchange.gives.push_back(piece_of(source));
  exchange.takes.assign(size_, source.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kAllGatherCoalesced, inputs);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::ALLGATHER_COALESCED, inputs,
                              std::move(outputs), operands, std::move(exchange),
                              std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), kName, ": ", outputs.size(),
                    " outputs and ", inputs.size(),
                    " inputs; one output is needed for each input, one at least");
  check_one_dtype(inputs, kName);
  auto operands = std::make_shared<Operands>(*channel_);
  const at::Tensor source = operands->flattened(inputs);
  Segments destination(size_);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_parts(outputs[i], "an output", inputs[i], "its input", size_, kName);
    check_output(outputs[i], kName);
    std::byte* parts = bytes_of(operands->output(outputs[i]));
    for (int from = 0; from < size_; ++from)
      destination.add(from, parts + from * inputs[i].nbytes(), inputs[i].nbytes());
  }
  Exchange exchange;
  exchange.gives.push_back(piece_of(source));
  exchange.takes.assign(size_, source.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kAllGatherIntoTensorCoalesced, inputs);
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::ALLGATHER_COALESCED, inputs,
                              outputs, operands, std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all_single";
  check_contiguous(output, kName, "the output");
  check_contiguous(input, kName, "the input");
  check_output(output, kName);
  check_same_dtype(input, {output}, kName);
  auto operands = std::make_shared<Operands>(*channel_);
  const at::Tensor& source = memory_overlaps(output, input) ? operands->copy(input) : operands->input(input);
  const auto give = split_bytes(input, input_splits, size_, "input");
  const auto take = split_bytes(output, output_splits, size_, "output");
  check_own_part(give[rank_], take[rank_], kName);
  Exchange exchange{.gives = {}, .takes = take, .compare_sizes = true};
  Segments destination(size_);
  const auto* from_data = static_cast<const std::byte*>(source.const_data_ptr());
  std::byte* to_data = bytes_of(operands->output(output));
  for (int rank = 0; rank < size_; ++rank) {
    exchange.gives.push_back({from_data, give[rank]});
    destination.add(rank, to_data, take[rank]);
    from_data += give[rank];
    to_data += take[rank];
  }
  const Signature signature = Signature::of_dtype(CollectiveKind::kAllToAllSingle, input.scalar_type());
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::ALLTOALL_BASE, {input}, {output},
                              operands, std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& options) {
  constexpr const char* kName = "all_to_all";
  check_list_size(outputs, size_, kName, "output_tensor_list");
  check_list_size(inputs, size_, kName, "input_tensor_list");
  for (const at::Tensor& output : outputs) check_output(output, kName);
  for (const at::Tensor& input : inputs) check_input(input, kName);
  check_same_dtype(inputs.front(), inputs, kName);
  check_same_dtype(inputs.front(), outputs, kName);
  auto operands = std::make_shared<Operands>(*channel_);
  Exchange exchange{.gives = {}, .takes = {}, .compare_sizes = true};
  check_own_part(inputs[rank_].nbytes(), outputs[rank_].nbytes(), kName);
  Segments destination(size_);
  for (int rank = 0; rank < size_; ++rank) {
    bool overwritten = false;
    for (const at::Tensor& output : outputs) overwritten |= memory_overlaps(output, inputs[rank]);
    exchange.gives.push_back(
        piece_of(overwritten ? operands->copy(inputs[rank]) : operands->input(inputs[rank])));
    exchange.takes.push_back(outputs[rank].nbytes());
    destination.add(rank, operands->output(outputs[rank]));
  }
  const Signature signature = Signature::of_dtype(CollectiveKind::kAllToAll, inputs.front().scalar_type());
  return submit(plan_exchange(channel_, options, signature, c10d::OpType::ALLTOALL, inputs, outputs, operands,
                              std::move(exchange), std::move(destination).consumer()));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::barrier(const c10d::BarrierOptions& options) {
  return submit({Signature::barrier(),
                 c10d::OpType::BARRIER,
                 {},
                 {},
                 nullptr,
                 options.timeout,
                 options.asyncOp,
                 [channel = channel_](const Terms& terms) { algorithms::barrier(*channel, terms); }});
}

}  // namespace lockstep
