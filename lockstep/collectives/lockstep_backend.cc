#include <sstream>
#include <utility>

#include <ATen/ops/from_blob.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/fork_guard.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/internal/algorithms.h>
#include <lockstep/collectives/internal/signature.h>
#include <lockstep/collectives/internal/tensor_check.h>
#include <lockstep/collectives/lockstep_backend.h>

namespace lockstep {
namespace {

using transport::ChannelError;
using transport::FailureKind;
using transport::GroupChannel;

ReduceOperation to_reduce_operation(const c10d::ReduceOp& operation) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(operation)) {
    case c10d::ReduceOp::SUM:
      return ReduceOperation::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOperation::kAverage;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOperation::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOperation::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOperation::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOperation::kBitAnd;
    case c10d::ReduceOp::BOR:
      return ReduceOperation::kBitOr;
    case c10d::ReduceOp::BXOR:
      return ReduceOperation::kBitXor;
    default:
      TORCH_CHECK_VALUE(false,
                        "this reduce operation is not supported by the lockstep backend; it takes SUM, AVG, "
                        "PRODUCT, MIN, MAX, BAND, BOR and BXOR");
  }
}

const at::Tensor& only_tensor(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, " takes one tensor a rank, not ", tensors.size());
  return tensors.front();
}

/// The group's error in the terms of the operation that met it.
[[noreturn]] void throw_for_user(const ChannelError& error, const GroupChannel& channel,
                                 const Signature& signature, const std::string& group, bool earlier) {
  std::ostringstream text;
  text << to_string(signature.kind) << " (sequence " << channel.sequence() + (earlier ? 1 : 0) << ", "
       << signature.describe() << ") failed on rank " << channel.transport_rank(channel.rank())
       << " of group '" << group << "': ";
  if (earlier) text << "the group had failed before: ";
  text << error.what();
  if (error.kind() == FailureKind::kMismatch && !earlier) text << ": " << describe_announcements(channel);
  if (error.kind() == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text.str());
  C10_THROW_ERROR(DistBackendError, text.str());
}

}  // namespace

LockstepBackend::LockstepBackend(std::shared_ptr<GroupChannel> channel, Settings settings)
    : Backend(channel->rank(), channel->size()),
      channel_(std::move(channel)),
      settings_(std::move(settings)),
      timeout_ms_(settings_.timeout.count()),
      queue_(std::make_shared<OperationQueue>()) {}

LockstepBackend::~LockstepBackend() {
  shutdown();
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::submit(const Signature& signature, c10d::OpType type,
                                                       const char* title, std::vector<at::Tensor> inputs,
                                                       std::vector<at::Tensor> outputs,
                                                       std::chrono::milliseconds timeout, bool asynchronous,
                                                       std::function<void(const algorithms::Terms&)> body) {
  if (timeout <= std::chrono::milliseconds(0))
    timeout = std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  auto keep_alive = outputs;
  auto run = [channel = channel_, group = settings_.name, signature, timeout,
              keep_alive = std::move(keep_alive), kept_inputs = inputs,
              body = std::move(body)](bool background) {
    const uint64_t before = channel->sequence();
    try {
      body({Deadline::after(timeout), background});
    } catch (const ChannelError& error) {
      const bool earlier = channel->sequence() == before;
      // A peer that is only late may still write into these tensors' memory: nobody else may get it.
      if (!earlier) channel->release_after_close([keep_alive, kept_inputs] {});
      throw_for_user(error, *channel, signature, group, earlier);
    } catch (...) {
      // Not the group's failure but this rank's (no memory, say). Half-way through an operation it becomes
      // the group's, or the others would wait for the rest of it.
      if (channel->sequence() != before) channel->abort();
      throw;
    }
  };
  auto work = c10::make_intrusive<OperationWork>(queue_, rank_, type, title, std::move(inputs),
                                                 std::move(outputs), std::move(run));
  queue_->submit(work, asynchronous);
  return work;
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allreduce(std::vector<at::Tensor>& tensors,
                                                          const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "all_reduce");
  check_tensor(tensor, "all_reduce");
  const ReduceOperation operation = to_reduce_operation(options.reduceOp);
  reduce_kernels(tensor.scalar_type(),
                 operation);  // refuses unsupported combinations here, before anybody is waited for
  const Signature signature = Signature::of(CollectiveKind::kAllReduce, tensor, operation);
  return submit(signature, c10d::OpType::ALLREDUCE, "lockstep:all_reduce", tensors, tensors, options.timeout,
                options.asyncOp,
                [channel = channel_, signature, data = tensor.mutable_data_ptr()](const auto& terms) {
                  algorithms::all_reduce(*channel, terms, signature, data);
                });
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::broadcast(std::vector<at::Tensor>& tensors,
                                                          const c10d::BroadcastOptions& options) {
  const at::Tensor& tensor = only_tensor(tensors, "broadcast");
  check_tensor(tensor, "broadcast");
  TORCH_CHECK_VALUE(options.rootRank >= 0 && options.rootRank < size_, "broadcast: source rank ",
                    options.rootRank, " is not in the group, which has ", size_, " ranks");
  const Signature signature = Signature::of(CollectiveKind::kBroadcast, tensor, ReduceOperation::kSum,
                                            static_cast<int>(options.rootRank));
  return submit(signature, c10d::OpType::BROADCAST, "lockstep:broadcast", tensors, tensors, options.timeout,
                options.asyncOp,
                [channel = channel_, signature, data = tensor.mutable_data_ptr(), bytes = tensor.nbytes()](
                    const auto& terms) { algorithms::broadcast(*channel, terms, signature, data, bytes); });
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                                          std::vector<at::Tensor>& inputs,
                                                          const c10d::AllgatherOptions& options) {
  const at::Tensor& input = only_tensor(inputs, "all_gather");
  check_tensor(input, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1 && outputs[0].size() == static_cast<size_t>(size_),
                    "all_gather: the output list has ", outputs.empty() ? 0 : outputs[0].size(),
                    " tensors; it needs one for each of the ", size_, " ranks");
  const Signature signature = Signature::of(CollectiveKind::kAllGather, input);
  std::vector<void*> addresses;
  for (const at::Tensor& output : outputs[0]) {
    check_tensor(output, "all_gather");
    TORCH_CHECK_VALUE(output.sizes() == input.sizes() && output.scalar_type() == input.scalar_type() &&
                          Signature::of(CollectiveKind::kAllGather, output).layout == signature.layout,
                      "all_gather: output ", addresses.size(), " is ", output.scalar_type(), " ",
                      output.sizes(), ", the input is ", input.scalar_type(), " ", input.sizes(),
                      "; type, sizes and memory order must be the same");
    addresses.push_back(output.mutable_data_ptr());
  }
  return submit(signature, c10d::OpType::ALLGATHER, "lockstep:all_gather", inputs, outputs[0],
                options.timeout, options.asyncOp,
                [channel = channel_, signature, data = input.const_data_ptr(),
                 addresses = std::move(addresses), bytes = input.nbytes()](const auto& terms) {
                  algorithms::all_gather(*channel, terms, signature, data, addresses, bytes);
                });
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::barrier(const c10d::BarrierOptions& options) {
  return submit(Signature::barrier(), c10d::OpType::BARRIER, "lockstep:barrier", {}, {}, options.timeout,
                options.asyncOp,
                [channel = channel_](const auto& terms) { algorithms::barrier(*channel, terms); });
}

at::Tensor LockstepBackend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "allocateTensor: ", size, " elements");
  TORCH_CHECK_VALUE(options.device().is_cpu(), "allocateTensor: the lockstep backend has CPU memory, not ",
                    options.device());
  auto arena = channel_->transport().shared_arena();
  void* memory = arena->allocate(static_cast<size_t>(size) * options.dtype().itemsize());
  // The memory keeps its arena alive, not the transport, which itself keeps the tensors of failed operations.
  return at::from_blob(
      memory, {size},
      [arena, guard = ForkGuard()](void* data) {
        if (!guard.in_forked_child()) arena->deallocate(data);
      },
      options);
}

void LockstepBackend::abort() {
  channel_->abort();
}

void LockstepBackend::shutdown() {
  if (channel_->transport().in_forked_child()) return;
  queue_->stop();
  channel_->leave();
}

}  // namespace lockstep
