#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include <lockstep/nn/gradient_list.h>
#include <lockstep/nn/wrapped_module.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/pipeline/pipeline_stage.h>
#include <lockstep/train/pipelined_model.h>
#include <lockstep/train/trainer_options.h>

namespace lockstep {

namespace train {

/// The optimizer that options are for.
template <class Options>
struct OptimizerFor;
template <>
struct OptimizerFor<torch::optim::SGDOptions> : std::type_identity<torch::optim::SGD> {};
template <>
struct OptimizerFor<torch::optim::AdamOptions> : std::type_identity<torch::optim::Adam> {};
template <>
struct OptimizerFor<torch::optim::AdamWOptions> : std::type_identity<torch::optim::AdamW> {};
template <>
struct OptimizerFor<torch::optim::RMSpropOptions> : std::type_identity<torch::optim::RMSprop> {};
template <>
struct OptimizerFor<torch::optim::AdagradOptions> : std::type_identity<torch::optim::Adagrad> {};

}  // namespace train

/// SGDOptions, AdamOptions, AdamWOptions, RMSpropOptions or AdagradOptions.
template <class T>
concept OptimizerDefaults = requires {
  typename train::OptimizerFor<T>::type;
};

/// What a Trainer makes of a plain module: wrapped as TrainerOptions::strategy says, with an optimizer of all its parameters.
/// Without a group, in a job of one process, Strategy::ddp leaves the module as it is. Used by one thread.
template <std::derived_from<torch::nn::Module> Net>
class StrategyModel {
 public:
  /// Collective. Throws c10::ValueError for a pipeline of a module that is no Sequential, which can't be cut.
  template <OptimizerDefaults Defaults>
  StrategyModel(std::shared_ptr<Net> net, const Defaults& defaults, const TrainerOptions& options) {
    using Optimizer = typename train::OptimizerFor<Defaults>::type;
    TORCH_CHECK_VALUE(net != nullptr, "Trainer: the module is empty");
    const auto of_trainer = [&options](auto of_wrapper) {
      TORCH_CHECK_VALUE(!of_wrapper.process_group || of_wrapper.process_group == options.process_group,
                        "Trainer: its model has another process_group than the Trainer; set "
                        "TrainerOptions::process_group");
      of_wrapper.process_group = options.process_group;
      return of_wrapper;
    };
    if (options.strategy == Strategy::fsdp) {
      auto model = std::make_unique<FullyShardedDataParallel<Net>>(std::move(net), of_trainer(options.fsdp));
      optimizer_ = model->template make_optimizer<Optimizer>(defaults);
      model_ = std::move(model);
      return;
    }
    if (options.strategy == Strategy::pipeline) {
      if constexpr (kIsSequential) {
        const ProcessGroup& group = options.pipeline.group ? options.pipeline.group : options.process_group;
        auto model = std::make_unique<PipelinedModel>(
            pipeline_stages(torch::nn::Sequential(std::move(net)), options.pipeline.balance, group), options);
        optimizer_ = std::make_unique<Optimizer>(model->parameters(), defaults);
        model_ = std::move(model);
        return;
      } else {
        TORCH_CHECK_VALUE(
            false,
            "Trainer: only a torch::nn::Sequential can be cut into a pipeline's stages; give it, or a "
            "std::vector<PipelineStage> with this rank's stages");
      }
    }
    // A tied parameter would be updated once for each of its names.
    optimizer_ = std::make_unique<Optimizer>(each_once(net->parameters()), defaults);
    if (options.process_group || is_initialized()) {
      model_ = std::make_unique<DistributedDataParallel<Net>>(std::move(net), of_trainer(options.ddp));
    } else {
      model_ = std::move(net);
    }
  }

  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  /// Calls `action` with the model, whichever it is.
  template <class Action>
  decltype(auto) visit(Action&& action) {
    return std::visit([&](auto& model) -> decltype(auto) { return action(*model); }, model_);
  }

 private:
  static constexpr bool kIsSequential = std::derived_from<Net, torch::nn::SequentialImpl>;
  template <class... More>
  using ModelOf = std::variant<std::shared_ptr<Net>, std::unique_ptr<DistributedDataParallel<Net>>,
                               std::unique_ptr<FullyShardedDataParallel<Net>>, More...>;

  std::conditional_t<kIsSequential, ModelOf<std::unique_ptr<PipelinedModel>>, ModelOf<>> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// What a Trainer makes of a pipeline's stages: a PipelinedModel, with an optimizer of this rank's parameters. Used by
/// one thread.
class StrategyStages {
 public:
  /// Throws what PipelinedModel throws.
  template <OptimizerDefaults Defaults>
  StrategyStages(std::vector<PipelineStage> stages, const Defaults& defaults, const TrainerOptions& options)
      : model_(std::move(stages), options),
        optimizer_(
            std::make_unique<typename train::OptimizerFor<Defaults>::type>(model_.parameters(), defaults)) {}

  torch::optim::Optimizer& optimizer() { return *optimizer_; }
  template <class Action>
  decltype(auto) visit(Action&& action) {
    return action(model_);
  }

 private:
  PipelinedModel model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

namespace train {

/// Stands for a model where something was given that is none.
struct NoModel {};

/// What a Trainer makes of `Given`, which comes with an optimizer's options.
template <class Given>
struct StrategyFor : std::type_identity<NoModel> {};
template <class Given>
requires std::derived_from<ContainedModule<Given>, torch::nn::Module>
struct StrategyFor<Given> : std::type_identity<StrategyModel<ContainedModule<Given>>> {
};

template <class T>
inline constexpr bool kIsStrategyModel = false;
template <class Net>
inline constexpr bool kIsStrategyModel<StrategyModel<Net>> = true;
template <>
inline constexpr bool kIsStrategyModel<StrategyStages> = true;

}  // namespace train

}  // namespace lockstep
