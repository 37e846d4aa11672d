#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/module_inspection.h>
#include <lockstep/nn/named_tensor.h>
#include <lockstep/nn/wrapped_module.h>
#include <lockstep/parallel/pipeline/call_with_tensors.h>

namespace lockstep {

struct PipelineStageOptions {
  /// The pipeline's ranks; empty: the default group. Of all stages the same.
  ProcessGroup group = {};
  /// Where its inputs are put; the first parameter's device, or the CPU, if not given.
  std::optional<c10::Device> device = {};
  /// outputs_to[i]: the later stages that take output i; several, or none. Empty: all outputs go to the next stage. A stage
  /// takes what it is sent in the order of the sending stages, and of their outputs.
  std::vector<std::vector<int64_t>> outputs_to = {};
  /// Parameters that are one weight on several stages, such as an embedding that is the output layer too, by a name of the
  /// weight. They begin with the first stage's value, and all get the sum of their gradients.
  std::map<std::string, at::Tensor> tied = {};
  /// A callable that is no module names its parameters here: for clipping, data parallelism and tied weights.
  std::vector<at::Tensor> parameters = {};
};

namespace pipeline::internal {

/// Whether it is, or has within it, a DistributedDataParallel or a FullyShardedDataParallel.
bool averages_gradients(const torch::nn::Module& module);

}  // namespace pipeline::internal

/// One stage of a model that is spread over the ranks of a group: a part of its layers, and its place. PipelineRunner runs it.
///
///     lockstep::PipelineStage stage(layers, lockstep::get_rank(), lockstep::get_world_size());
///
/// Made from a module (what WrappedModule takes) or from anything that can be called. It takes up to 8 tensors, or a
/// std::vector<at::Tensor>: on stage 0 the pipeline's inputs. It returns a tensor, or several in whatever tensor_tree.h looks
/// through; Sequential and AnyModule, which are asked for their return type, one. It must neither change its inputs in place
/// nor keep its outputs. A copy leads to the same module. Which rank has which stage, rank_of_stage() says.
/// torch.distributed.pipelining.PipelineStage, but shapes need not be told: they travel with the data.
class PipelineStage {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Throws c10::ValueError for an index that is not below `num_stages`, outputs to stages that are not later ones or not
  /// there, tied tensors that are no parameters of the stage, an empty holder, and a module that is wrapped for data
  /// parallelism, or has such a one within it (PipelineOptions::data_parallel_group is the way).
  template <class Module>
  requires requires { typename ContainedModule<Module>; }
  PipelineStage(const Module& module, int64_t stage_index, int64_t num_stages,
                PipelineStageOptions options = {})
      : PipelineStage(Plain{}, from_module<ContainedModule<Module>>(module), stage_index, num_stages,
                      std::move(options)) {}

  template <class Call>
  requires(!requires { typename ContainedModule<Call>; })
      PipelineStage(Call call, int64_t stage_index, int64_t num_stages, PipelineStageOptions options = {})
      : PipelineStage(Plain{}, from_call(std::move(call)), stage_index, num_stages, std::move(options)) {}

  int64_t stage_index() const { return stage_index_; }
  int64_t num_stages() const { return num_stages_; }
  bool is_first() const { return stage_index_ == 0; }
  bool is_last() const { return stage_index_ == num_stages_ - 1; }
  c10::Device device() const { return device_; }
  const PipelineStageOptions& options() const { return options_; }
  /// The module's or the options', each once, in order.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const std::vector<at::Tensor>& buffers() const { return buffers_; }
  /// The module's by their names in it, a shared one as often as it has names; none of a callable.
  const std::vector<NamedTensor>& named_parameters() const { return content_.parameters; }
  const std::vector<NamedTensor>& named_buffers() const { return content_.buffers; }
  /// The groups of the module's SyncBatchNorms, see module_inspection.h; what a callable holds does not show.
  std::vector<ProcessGroup> sync_batch_norm_groups() const {
    return content_.sync_batch_norm_groups ? content_.sync_batch_norm_groups() : std::vector<ProcessGroup>();
  }

  /// Sets the module's mode; a callable has none.
  void train(bool on = true) const {
    if (content_.train) content_.train(on);
  }
  Tensors forward(const Tensors& inputs) const { return content_.forward(inputs); }

 private:
  struct Plain {};
  struct Content {
    std::function<Tensors(const Tensors&)> forward;
    std::vector<NamedTensor> parameters = {};
    std::vector<NamedTensor> buffers = {};
    std::function<std::vector<ProcessGroup>()> sync_batch_norm_groups = {};
    std::function<void(bool)> train = {};
    bool is_module = false;
    bool is_empty = false;
    bool is_data_parallel = false;
  };

  template <class Call>
  static Content from_call(Call call) {
    Content content;
    content.forward = [call = std::move(call)](const Tensors& inputs) mutable {
      return pipeline::internal::call_with_tensors(call, inputs);
    };
    return content;
  }

  template <class T, class Given>
  static Content from_module(const Given& given) {
    using Traits = WrappedModule<T>;
    Content content;
    content.is_module = true;
    if constexpr (requires { given.is_empty(); }) content.is_empty = given.is_empty();  // of a holder
    if (content.is_empty) return content;
    typename Traits::Handle handle = internal::handle_of(given);
    content.is_empty = Traits::is_empty(handle);
    if (content.is_empty) return content;
    constexpr bool kIsWrapper = requires(T & module) {
      module.no_sync();
    };
    if constexpr (kIsWrapper) {
      // Its members are of other types, and its forward() takes anything until it is compiled.
      content.is_data_parallel = true;
    } else {
      const auto whole = Traits::as_module(handle);
      content.is_data_parallel = pipeline::internal::averages_gradients(*whole);
      content.sync_batch_norm_groups = [handle] {  // layers may be converted until the pipeline is made
        return lockstep::sync_batch_norm_groups(*Traits::as_module(handle));
      };
      content.parameters = Traits::named_parameters(handle);
      content.buffers = Traits::named_buffers(handle);
      content.train = [handle](bool on) { Traits::train(handle, on); };
      content.forward = from_call(pipeline::internal::ModuleCall<T>{std::move(handle)}).forward;
    }
    return content;
  }

  PipelineStage(Plain tag, Content content, int64_t stage_index, int64_t num_stages,
                PipelineStageOptions options);

  Content content_;
  int64_t stage_index_;
  int64_t num_stages_;
  PipelineStageOptions options_;
  c10::Device device_ = c10::kCPU;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> buffers_;
};

namespace pipeline::internal {

/// What a rank without stages tells the others.
inline constexpr const char* kNoStage = "it has no stage; a pipeline has at least one on each rank";
/// The group of a rank's stages, never empty. A rank without stages is taken for one of the default group, to whose ranks it can
/// tell that. Where there are other groups, whose ranks may wait for it, it fails all groups, and throws c10::ValueError.
ProcessGroup group_of(const std::vector<PipelineStage>& stages);

}  // namespace pipeline::internal

/// This rank's stages of a Sequential that all ranks of the group have, `balance[i]` of its layers in stage i:
/// Sequentials whose layers have the names that they have in the whole, and draw random numbers by their numbers in it
/// (PipelineOptions::seed). A weight that is in stages of several ranks is tied. Throws c10::ValueError for a balance that
/// does not add up to the layers, with numbers below 1, or with a number of stages that is no multiple of the ranks, and for
/// a class derived from Sequential that has parameters, buffers or modules beside its layers.
std::vector<PipelineStage> pipeline_stages(const torch::nn::Sequential& module,
                                           const std::vector<int64_t>& balance,
                                           const ProcessGroup& group = {});

}  // namespace lockstep
