#pragma once

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/parallel/pipeline/internal/pipe_core.h>
#include <lockstep/parallel/pipeline/pipe_options.h>

namespace lockstep {

/// A Sequential cut into partitions, each on a device and in a thread of its own, in one process. A batch
/// goes through them in micro-batches, so that the partitions compute at once, in forward and in backward.
///
///     torch::nn::Sequential net(…);                                    // of 7 layers
///     lockstep::Pipe model(net, {4, 3}, {.devices = {{at::kCUDA, 0}, {at::kCUDA, 1}}, .chunks = 8});
///     torch::optim::SGD optimizer(model.parameters(), 0.1);
///     loss(model(batch.data.to(…)), batch.target).backward();          // output and target are on the last device
///
/// Computes what the module computes on the micro-batches one after the other, with their outputs put
/// together; outputs, gradients and buffers have the same bits, on CPUs where the module has as many intra-op
/// threads as a partition, the caller's number divided by the partitions. (Where a parameter is in several
/// partitions, and several times in one of them, they are rounded otherwise.) So BatchNorm sees
/// micro-batches, one after the other.
///
/// Arguments are what the first layer takes. Tensors in them (tensor_tree.h) are split along their first
/// dimension, as torch::chunk does, and go to the first device; the rest goes to all micro-batches. Between
/// partitions go tensors, pairs, tuples of up to four, and vectors of tensors, and what torch::nn::LSTM
/// returns. Outputs are put together along the first dimension, on the last partition's device; what is no
/// tensor in them is the first micro-batch's.
///
/// The layers are the module's own, moved to their devices, and so parameters() and states have the
/// Sequential's names. What is added to the Sequential later is not seen. to() to another device afterwards
/// is refused by the next forward. train(), eval() and requires_grad_() act as ever. In gradients take part:
/// the tensors among the arguments, and the layers' parameters; not other tensors that a layer holds. A
/// parameter's hooks of register_hook() are called by Pipe's backward for each micro-batch, too, and so
/// refused there. Gradients of gradients are refused.
///
/// Several partitions on the CPU draw from one random generator, and which draws first is open: dropout on
/// the CPU does not repeat bit for bit, and together with `checkpoint` it is refused. Devices have generators
/// of their own. What a layer changes in itself, as BatchNorm its running statistics, it changes a second
/// time when a checkpointed micro-batch is computed again, as under PyTorch's checkpoint.
///
/// Called from one thread at a time; backward may run in any thread, also when this object is gone. An error
/// in a layer keeps its type and says in which partition and micro-batch.
/// torch/distributed/pipeline/sync/pipe.py of PyTorch 2.3 and before, which came from torchgpipe.
class Pipe : public torch::nn::Module {
 public:
  /// `balance`: how many layers each partition has; balance_by_time() and balance_by_size() find it
  /// (balance.h). Throws c10::ValueError, which names all that is wrong at once: for a balance that does not
  /// add up to the layers, that has more partitions than there are devices, or numbers below 1; for devices
  /// that are not there or of several kinds; for layers that share a parameter on two devices, or a buffer in
  /// two partitions.
  Pipe(const torch::nn::Sequential& module, const std::vector<int64_t>& balance, PipeOptions options = {});

  /// The last layer's output; ReturnType is its type, as with torch::nn::Sequential.
  template <class ReturnType = at::Tensor, class... Arguments>
  ReturnType forward(Arguments&&... arguments) {
    RECORD_USER_SCOPE("Pipe.forward");
    static_assert((can_replace_tensors<Arguments> && ...),
                  "Pipe can't split this argument: tensors in it can't be found, or not be replaced "
                  "(lockstep/base/tensor_tree.h)");
    using Kept = std::tuple<std::decay_t<Arguments>...>;
    Kept kept(std::forward<Arguments>(arguments)...);
    std::vector<at::Tensor> tensors;
    for_each_owned_tensor(std::as_const(kept), [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    const auto run = core_.forward(
        [kept = std::move(kept)](torch::nn::AnyModule& first, const std::vector<at::Tensor>& own) {
          Kept copy = kept;
          auto next = own.begin();
          for_each_owned_tensor(copy, [&](at::Tensor& tensor) { tensor = *next++; });
          return std::apply([&](auto&... argument) { return first.any_forward(std::move(argument)...); },
                            copy);
        },
        tensors);
    return output_of<ReturnType>(run);
  }
  template <class... Arguments>
  at::Tensor operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// The partitions' devices, in order.
  const std::vector<at::Device>& devices() const { return core_.options().devices; }
  int64_t chunks() const { return core_.options().chunks; }

 private:
  template <class Output>
  static Output output_of(const pipeline::internal::PipeRun& run) {
    static_assert(
        can_replace_tensors<Output>,
        "Pipe can't put this output together: its tensors can't be found (lockstep/base/tensor_tree.h)");
    std::vector<Output> outputs;
    std::vector<std::vector<at::Tensor>> tensors;
    for (auto value : run.outputs) {
      auto* output = value.template try_get<Output>();
      TORCH_CHECK(output != nullptr, "The type of the return value is ",
                  c10::demangle(value.type_info().name()), ", but you asked for type ",
                  c10::demangle(typeid(Output).name()));
      outputs.push_back(std::move(*output));
      auto& own = tensors.emplace_back();
      for_each_owned_tensor(std::as_const(outputs.back()),
                            [&](const at::Tensor& tensor) { own.push_back(tensor); });
    }
    const auto gathered = pipeline::internal::PipeCore::gather(run, std::move(tensors));
    auto next = gathered.begin();
    for_each_owned_tensor(outputs[0], [&](at::Tensor& tensor) { tensor = *next++; });
    return std::move(outputs[0]);
  }

  pipeline::internal::PipeCore core_;
};

}  // namespace lockstep
