#include "gloo_stand_in.h"

#include <functional>
#include <string>
#include <utility>

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <lockstep/base/errors.h>

// The checks are those of torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, in its order, made of c10d's
// functions where torch 2.11, the oldest that we build with, has them.
namespace lockstep::python {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Refusal = std::function<void(const std::string&)>;

/// What c10d's checks call to refuse a call of `operation`.
Refusal refusal_of(const char* operation) {
  return
      [operation](const std::string& why) { TORCH_CHECK(false, "ProcessGroupGloo::", operation, ": ", why); };
}

/// The engine's own refusals are ValueErrors; Gloo's are RuntimeErrors in Python, all of them.
template <class Call>
auto as_runtime_error(const Call& call) {
  try {
    return call();
  } catch (const c10::ValueError& error) {
    TORCH_CHECK(false, error.what_without_backtrace());
  }
}

/// Gloo averages no integers, so a program that asks for it may count on the error.
void check_average(const Refusal& refuse, const c10d::ReduceOp& operation, at::TensorList tensors) {
  if (static_cast<c10d::ReduceOp::RedOpType>(operation) != c10d::ReduceOp::AVG) return;
  for (const at::Tensor& tensor : tensors) {
    if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true))
      refuse(c10::str("no ReduceOp.AVG of ", c10::toString(tensor.scalar_type()),
                      " tensors; use SUM and divide, or the backend \"lockstep\", which averages integers"));
  }
}

void check_single(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "ProcessGroupGloo::send takes a single tensor");
  TORCH_CHECK(tensors.front().layout() == at::kStrided && tensors.front().is_contiguous(),
              "input tensor has to be contiguous");
}

void check_tag(int tag) {
  TORCH_CHECK(tag >= 0, "Tag must be nonnegative");
}

// The checks of lists that torch/csrc/distributed/c10d/Utils.hpp has since torch 2.13, in its words.

void check_not_empty(const Refusal& refuse, const Tensors& inputs) {
  if (inputs.empty()) refuse("requires non-empty input tensor list");
}

void check_as_many(const Refusal& refuse, size_t outputs, size_t inputs) {
  if (outputs != inputs) refuse("requires input/output tensor lists to have the same length");
}

/// Of gather's outputs and scatter's inputs on the root. `kind`: "output" or "input".
void check_list_of_root(const Refusal& refuse, const std::vector<Tensors>& lists, int size,
                        const std::string& kind) {
  if (lists.size() != 1) {
    refuse(c10::str("requires a single-element ", kind, " list containing a list with ", size, " tensors."));
  } else if (lists.front().size() != static_cast<size_t>(size)) {
    refuse(c10::str("Incorrect ", kind, " list size ", lists.front().size(), ". ",
                    kind == "output" ? "Output" : "Input", " list size should be ", size,
                    ", same as size of the process group."));
  }
}

/// Of the same on other ranks.
void check_none(const Refusal& refuse, const std::vector<Tensors>& lists, const char* kind) {
  if (!lists.empty()) refuse(c10::str("requires empty ", kind, " on non-root"));
}

void check_reduce_scatter_inputs(const Refusal& refuse, size_t inputs, int size) {
  if (inputs != static_cast<size_t>(size)) refuse("invalid input tensor list size, must be world size");
}

void check_allgather_coalesced_outputs(const Refusal& refuse, const std::vector<Tensors>& output_lists,
                                       size_t inputs, int size) {
  if (output_lists.size() != static_cast<size_t>(size)) refuse("output lists should be equal to world size");
  for (const Tensors& list : output_lists) {
    if (list.size() != inputs)
      refuse(c10::str("invalid output size: (expected length ", inputs, ", got ", list.size(), ")"));
  }
}

void check_alltoall_list(const Refusal& refuse, const Tensors& tensors, int size, const char* kind) {
  if (tensors.size() != static_cast<size_t>(size))
    refuse(c10::str(kind, " tensor list size ", tensors.size(), " does not match world size ", size));
}

LockstepBackend::Settings as_gloo(LockstepBackend::Settings settings) {
  settings.stands_in_for_gloo = true;
  settings.make_subclass = &GlooStandIn::make;
  return settings;
}

}  // namespace

GlooStandIn::GlooStandIn(std::shared_ptr<transport::GroupChannel> channel, Settings settings)
    : LockstepBackend(std::move(channel), as_gloo(std::move(settings))) {}

c10::intrusive_ptr<LockstepBackend> GlooStandIn::make(std::shared_ptr<transport::GroupChannel> channel,
                                                      Settings settings) {
  return c10::make_intrusive<GlooStandIn>(std::move(channel), std::move(settings));
}

// ---- reductions

WorkPointer GlooStandIn::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const auto refuse = refusal_of("allreduce");
  c10d::assertNonEmpty(refuse, tensors);
  c10d::assertLayoutMatch(refuse, tensors);
  c10d::assertTypeAndSizesMatch(refuse, tensors);
  const auto layout = tensors.front().layout();
  const auto operation = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp);
  if (layout == at::kSparse && operation != c10d::ReduceOp::SUM)
    refuse("unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
  if (layout != at::kSparse && layout != at::kStrided) refuse("unsupported layout");
  check_average(refuse, options.reduceOp, tensors);
  return as_runtime_error([&] {
    return tensors.size() == 1 ? LockstepBackend::allreduce(tensors, options)
                               : allreduce_several(tensors, options);
  });
}

WorkPointer GlooStandIn::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& options) {
  const auto refuse = refusal_of("allreduce_coalesced");
  c10d::assertNonEmpty(refuse, tensors);
  c10d::assertLayoutMatch(refuse, tensors);
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.options().type_equal(tensors.front().options()))
      refuse("tensors must all have the same type");
    if (tensor.device() != tensors.front().device()) refuse("tensors must all be on the same device");
  }
  if (tensors.front().layout() != at::kStrided) refuse("unsupported layout");
  check_average(refuse, options.reduceOp, tensors);
  return as_runtime_error([&] { return LockstepBackend::allreduce_coalesced(tensors, options); });
}

WorkPointer GlooStandIn::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto refuse = refusal_of("reduce");
  c10d::assertRootRank(refuse, options.rootRank, size_);
  c10d::assertRootTensor(refuse, options.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(refuse, tensors);
  c10d::assertDense(refuse, tensors);
  check_average(refuse, options.reduceOp, tensors);
  return as_runtime_error([&] { return LockstepBackend::reduce(tensors, options); });
}

WorkPointer GlooStandIn::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == 1, "reduce_scatter only supports 1 output");
  const auto refuse = [](const std::string& why) { TORCH_CHECK(false, why); };
  check_reduce_scatter_inputs(refuse, inputs.empty() ? 0 : inputs.front().size(), size_);
  check_average(refuse, options.reduceOp, outputs);
  return as_runtime_error([&] { return LockstepBackend::reduce_scatter(outputs, inputs, options); });
}

WorkPointer GlooStandIn::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& options) {
  check_average(refusal_of("reduce_scatter"), options.reduceOp, output);
  return as_runtime_error([&] { return LockstepBackend::_reduce_scatter_base(output, input, options); });
}

WorkPointer GlooStandIn::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& options) {
  const auto refuse = [](const std::string& why) { TORCH_CHECK(false, why); };
  check_as_many(refuse, outputs.size(), inputs.size());
  check_average(refuse, options.reduceOp, outputs);
  return as_runtime_error(
      [&] { return LockstepBackend::reduce_scatter_tensor_coalesced(outputs, inputs, options); });
}

// ---- one to all, all to one

WorkPointer GlooStandIn::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto refuse = refusal_of("broadcast");
  c10d::assertRootRank(refuse, options.rootRank, size_);
  c10d::assertRootTensor(refuse, options.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertDense(refuse, tensors);
  c10d::assertTypeAndSizesMatch(refuse, tensors);
  return as_runtime_error([&] {
    return tensors.size() == 1 ? LockstepBackend::broadcast(tensors, options)
                               : broadcast_several(tensors, options);
  });
}

WorkPointer GlooStandIn::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::GatherOptions& options) {
  const auto refuse = refusal_of("gather");
  c10d::assertRootRank(refuse, options.rootRank, size_);
  c10d::assertSingleElementInput(refuse, inputs);
  c10d::assertDense(refuse, inputs);
  if (options.rootRank == rank_) {
    check_list_of_root(refuse, outputs, size_, "output");
    c10d::assertTypeAndSizesMatch(refuse, outputs.front(), inputs.front().options(), inputs.front().sizes());
  } else {
    check_none(refuse, outputs, "output");
  }
  return as_runtime_error([&] { return LockstepBackend::gather(outputs, inputs, options); });
}

WorkPointer GlooStandIn::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                 const c10d::ScatterOptions& options) {
  const auto refuse = refusal_of("scatter");
  c10d::assertRootRank(refuse, options.rootRank, size_);
  c10d::assertSingleElementOutput(refuse, outputs);
  c10d::assertDense(refuse, outputs);
  if (options.rootRank == rank_) {
    check_list_of_root(refuse, inputs, size_, "input");
    c10d::assertTypeAndSizesMatch(refuse, inputs.front(), outputs.front().options(), outputs.front().sizes());
  } else {
    check_none(refuse, inputs, "input");
  }
  return as_runtime_error([&] { return LockstepBackend::scatter(outputs, inputs, options); });
}

// ---- all to all

WorkPointer GlooStandIn::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& options) {
  const auto refuse = refusal_of("allgather");
  check_not_empty(refuse, inputs);
  check_as_many(refuse, outputs.size(), inputs.size());
  const size_t expected = inputs.size() * size_;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t actual = outputs[i].size();
    if (actual != expected)
      refuse(c10::str("invalid output tensor list at index ", i, " (expected length ", expected, ", got ",
                      actual, ")"));
  }
  c10d::assertDense(refuse, inputs);
  const auto options_of_first = inputs.front().options();
  const auto sizes = inputs.front().sizes();
  c10d::assertTypeAndSizesMatch(refuse, inputs, options_of_first, sizes);
  for (const Tensors& list : outputs) c10d::assertTypeAndSizesMatch(refuse, list, options_of_first, sizes);
  return as_runtime_error([&] {
    return inputs.size() == 1 ? LockstepBackend::allgather(outputs, inputs, options)
                              : allgather_several(outputs, inputs, options);
  });
}

WorkPointer GlooStandIn::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& options) {
  return as_runtime_error([&] { return LockstepBackend::_allgather_base(output, input, options); });
}

WorkPointer GlooStandIn::allgather_coalesced(std::vector<Tensors>& output_lists, Tensors& inputs,
                                             const c10d::AllgatherOptions& options) {
  const auto refuse = refusal_of("allgather_coalesced");
  check_not_empty(refuse, inputs);
  check_allgather_coalesced_outputs(refuse, output_lists, inputs.size(), size_);
  c10d::assertSameDevice(refuse, inputs);
  for (const Tensors& list : output_lists) {
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].sizes() != inputs[i].sizes())
        refuse(c10::str("invalid size of output tensor at index ", i, " (expected length ",
                        c10d::toString(inputs[i].sizes()), ", got ", c10d::toString(list[i].sizes()), ")"));
      if (!inputs[i].options().type_equal(list[i].options()))
        refuse(c10::str("invalid tensor type at index ", i, " (expected ", inputs[i].toString(), ", got ",
                        list[i].toString(), ")"));
    }
  }
  c10d::assertDense(refuse, inputs);
  return as_runtime_error(
      [&] { return LockstepBackend::allgather_coalesced(output_lists, inputs, options); });
}

WorkPointer GlooStandIn::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& options) {
  return as_runtime_error(
      [&] { return LockstepBackend::allgather_into_tensor_coalesced(outputs, inputs, options); });
}

WorkPointer GlooStandIn::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& options) {
  return as_runtime_error(
      [&] { return LockstepBackend::alltoall_base(output, input, output_splits, input_splits, options); });
}

WorkPointer GlooStandIn::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  const auto refuse = refusal_of("alltoall");
  check_alltoall_list(refuse, inputs, size_, "input");
  check_alltoall_list(refuse, outputs, size_, "output");
  return as_runtime_error([&] { return LockstepBackend::alltoall(outputs, inputs, options); });
}

// ---- point to point

WorkPointer GlooStandIn::send(Tensors& tensors, int to, int tag) {
  check_single(tensors);
  check_tag(tag);
  return as_runtime_error([&] { return LockstepBackend::send(tensors, to, tag); });
}

WorkPointer GlooStandIn::recv(Tensors& tensors, int from, int tag) {
  check_single(tensors);
  check_tag(tag);
  return as_runtime_error([&] { return LockstepBackend::recv(tensors, from, tag); });
}

WorkPointer GlooStandIn::recvAnysource(Tensors& tensors, int tag) {
  check_single(tensors);
  check_tag(tag);
  return as_runtime_error([&] { return LockstepBackend::recvAnysource(tensors, tag); });
}

void GlooStandIn::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  try {
    LockstepBackend::monitoredBarrier(options, wait_all_ranks);
  } catch (const DistTimeoutError& error) {
    if (rank_ == 0) throw;
    LOCKSTEP_THROW_TIMEOUT(
        c10::str(error.what_without_backtrace(), ". Please check rank 0 logs for faulty rank."));
  }
}

}  // namespace lockstep::python
