#include <utility>

#include <lockstep/collectives/algorithms/segments.h>
#include <lockstep/collectives/backend/internal/planning.h>
#include <lockstep/collectives/backend/internal/tensor_check.h>
#include <lockstep/collectives/backend/lockstep_backend.h>

// The collectives of LockstepBackend that only move data: each checks its arguments, says what must agree on
// all ranks, and describes the work as an exchange.
namespace lockstep {

using namespace collectives::internal;
using namespace planning;

// ---- one to all, all to one

c10::intrusive_ptr<c10d::Work> LockstepBackend::broadcast(Tensors& tensors,
                                                          const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  const int root = checked_root(options.rootRank, "broadcast", "source");
  const bool is_root = root == rank_;
  is_root ? check_input(tensor, "broadcast") : check_output(tensor, "broadcast");
  auto operands = std::make_shared<Operands>(*channel_, staging_);
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
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  Exchange exchange;
  bool overwritten = false;
  Segments destination(size_);
  for (int from = 0; from < static_cast<int>(list.size()); ++from) {
    overwritten |= is_overwritten(input, list[from], from == rank_);
    destination.add(from, operands->output(list[from]));
  }
  exchange.gives.push_back(piece_of(overwritten ? operands->copy(input) : operands->input(input)));
  exchange.takes.assign(size_, root == rank_ ? input.nbytes() : 0);
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
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  Exchange exchange;
  if (root == rank_) {
    check_list_size(list, size_, "scatter", "scatter_list");
    for (const at::Tensor& input : list) check_input(input, "scatter");
    check_list_like(list, output, "scatter", "scatter_list");
    for (int to = 0; to < size_; ++to) {
      const bool overwritten = is_overwritten(list[to], output, to == rank_);
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
  auto operands = std::make_shared<Operands>(*channel_, staging_);
  bool overwritten = false;
  Segments destination(size_);
  for (int from = 0; from < size_; ++from) {
    overwritten |= is_overwritten(input, list[from], from == rank_);
    destination.add(from, operands->output(list[from]));
  }
  Exchange exchange;
  exchange.gives.push_back(piece_of(overwritten ? operands->copy(input) : operands->input(input)));
  exchange.takes.assign(size_, input.nbytes());
  const Signature signature = Signature::of(CollectiveKind::kAllGather, input);
  auto plan = plan_exchange(channel_, options, signature, c10d::OpType::ALLGATHER, inputs, list, operands,
                            std::move(exchange), std::move(destination).consumer());
  plan.future_form.stacked = !settings_.stands_in_for_gloo;
  return submit(std::move(plan));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor";
  check_parts(output, "the output", input, "the input", size_, kName);
  check_output(output, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
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
  check_one_kind(inputs, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
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
  auto plan =
      plan_exchange(channel_, options, signature, c10d::OpType::ALLGATHER_COALESCED, inputs,
                    std::move(outputs), operands, std::move(exchange), std::move(destination).consumer());
  if (settings_.stands_in_for_gloo) plan.future_form.lists = size_;
  return submit(std::move(plan));
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr const char* kName = "all_gather_into_tensor_coalesced";
  TORCH_CHECK_VALUE(!inputs.empty() && outputs.size() == inputs.size(), kName, ": ", outputs.size(),
                    " outputs and ", inputs.size(),
                    " inputs; one output is needed for each input, one at least");
  check_one_kind(inputs, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
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
  check_same_kind(input, {output}, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
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
  check_same_kind(inputs.front(), inputs, kName);
  check_same_kind(inputs.front(), outputs, kName);
  auto operands = std::make_shared<Operands>(*channel_, staging_);
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
  return submit({.signature = Signature::barrier(),
                 .type = c10d::OpType::BARRIER,
                 .timeout = options.timeout,
                 .asynchronous = options.asyncOp,
                 .body = [channel = channel_](const Terms& terms) { algorithms::barrier(*channel, terms); }});
}

}  // namespace lockstep
