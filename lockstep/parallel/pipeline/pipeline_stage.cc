#include <algorithm>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/parallel/pipeline/pipeline_random.h>
#include <lockstep/parallel/pipeline/pipeline_stage.h>

namespace lockstep {
namespace {

std::vector<at::Tensor> without_names(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

/// Some layers of a Sequential, each of which draws random numbers by its number in the whole.
class LayersOfWhole : public torch::nn::SequentialImpl {
 public:
  explicit LayersOfWhole(int64_t first) : first_(first) {}

  template <class ReturnType = at::Tensor, class... Inputs>
  ReturnType forward(Inputs&&... inputs) {
    int64_t number = first_;
    auto layer = begin();
    seed_pipeline_layer(number);
    torch::nn::AnyValue value = layer->any_forward(std::forward<Inputs>(inputs)...);
    for (++layer; layer != end(); ++layer) {
      seed_pipeline_layer(++number);
      value = layer->any_forward(std::move(value));
    }
    return value.get<ReturnType>();
  }

 private:
  int64_t first_;
};

}  // namespace

bool pipeline::internal::averages_gradients(const torch::nn::Module& module) {
  const auto modules = module.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& one) {
    // By the names that they give themselves, for they are templates.
    return one->name() == "DistributedDataParallel" || one->name() == "FullyShardedDataParallel";
  });
}

ProcessGroup pipeline::internal::group_of(const std::vector<PipelineStage>& stages) {
  if (!stages.empty() && stages.front().options().group) return stages.front().options().group;
  if (stages.empty() && get_pg_count() > 1) {
    lockstep::abort();
    TORCH_CHECK_VALUE(
        false,
        "a pipeline has at least one stage on each rank, and this one gave none, which does not "
        "show in which group the others wait for it; so all groups have failed");
  }
  return default_group();
}

PipelineStage::PipelineStage(Plain /*tag*/, Content content, int64_t stage_index, int64_t num_stages,
                             PipelineStageOptions options)
    : content_(std::move(content)),
      stage_index_(stage_index),
      num_stages_(num_stages),
      options_(std::move(options)) {
  TORCH_CHECK_VALUE(num_stages >= 1 && stage_index >= 0 && stage_index < num_stages, "Stage index ",
                    stage_index, " is out of range of ", num_stages);
  const std::string who = "stage " + std::to_string(stage_index) + ": ";
  TORCH_CHECK_VALUE(!content_.is_empty, who, "there is no module in the holder");
  TORCH_CHECK_VALUE(
      !content_.is_data_parallel, who,
      "the module, or one within it, is wrapped for data parallelism, and would average its gradients in the "
      "midst of the schedule; give the module itself, and the ranks that have the same stage as "
      "PipelineOptions::data_parallel_group");
  TORCH_CHECK_VALUE(!content_.is_module || options_.parameters.empty(), who,
                    "a module knows its parameters; leave out PipelineStageOptions::parameters");
  TORCH_CHECK_VALUE(options_.outputs_to.empty() || !is_last(), who,
                    "outputs of the last stage go to the caller, not to other stages");
  for (size_t output = 0; output < options_.outputs_to.size(); ++output) {
    for (const int64_t to : options_.outputs_to[output]) {
      TORCH_CHECK_VALUE(to > stage_index && to < num_stages, who, "output ", output, " shall go to stage ",
                        to, "; it can go to the stages from ", stage_index + 1, " to ", num_stages - 1);
    }
  }
  parameters_ = each_once(content_.is_module ? without_names(content_.parameters) : options_.parameters);
  buffers_ = each_once(without_names(content_.buffers));
  for (const auto& [name, tied] : options_.tied) {
    const bool is_own = std::any_of(parameters_.begin(), parameters_.end(),
                                    [&, &tied = tied](const at::Tensor& own) { return own.is_same(tied); });
    TORCH_CHECK_VALUE(is_own, who, "the tied weight '", name, "' is not among its parameters");
  }
  if (options_.device) {
    device_ = *options_.device;
  } else if (!parameters_.empty()) {
    device_ = parameters_.front().device();
  }
}

std::vector<PipelineStage> pipeline_stages(const torch::nn::Sequential& module,
                                           const std::vector<int64_t>& balance, const ProcessGroup& group) {
  TORCH_CHECK_VALUE(!module.is_empty() && !module->is_empty(), "a pipeline's module has no layers");
  const auto names = module->named_children().keys();
  TORCH_CHECK_VALUE(
      names.size() == module->size() && module->named_parameters(/*recurse=*/false).is_empty() &&
          module->named_buffers(/*recurse=*/false).is_empty(),
      "the Sequential has parameters, buffers or modules of its own beside its layers, which would be on no "
      "stage; cut it by hand, into a PipelineStage for each part");
  const auto layers = static_cast<int64_t>(module->size());
  const auto count = static_cast<int64_t>(balance.size());
  const bool is_positive =
      std::all_of(balance.begin(), balance.end(), [](int64_t number) { return number >= 1; });
  const int64_t sum = std::accumulate(balance.begin(), balance.end(), int64_t{0});
  TORCH_CHECK_VALUE(is_positive && sum == layers, "the balance [", at::IntArrayRef(balance),
                    "] says how many layers each stage has: numbers from 1 that add up to the module's ",
                    layers, "; these add up to ", sum);
  const int64_t rank = get_rank(group), ranks = get_world_size(group);
  TORCH_CHECK_VALUE(rank >= 0, "this rank is not a member of the pipeline's group");
  TORCH_CHECK_VALUE(count % ranks == 0, "the balance makes ", count, " stages, and the group has ", ranks,
                    " ranks; all ranks have the same number of stages");

  std::vector<std::shared_ptr<LayersOfWhole>> parts;
  auto layer = module->begin();
  size_t number = 0;
  for (const int64_t length : balance) {
    const auto& part = parts.emplace_back(std::make_shared<LayersOfWhole>(static_cast<int64_t>(number)));
    for (int64_t i = 0; i < length; ++i, ++layer) part->push_back(std::string(names[number++]), *layer);
  }
  std::unordered_map<const at::TensorImpl*, std::set<size_t>> stages_of, ranks_of;
  for (size_t i = 0; i < parts.size(); ++i) {
    for (const at::Tensor& parameter : parts[i]->parameters()) {
      stages_of[parameter.unsafeGetTensorImpl()].insert(i);
      ranks_of[parameter.unsafeGetTensorImpl()].insert(i % static_cast<size_t>(ranks));
    }
  }
  std::map<std::string, at::Tensor> shared;  // between ranks, by their first names
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module->named_parameters()) {
    const at::TensorImpl* key = item.value().unsafeGetTensorImpl();
    if (ranks_of.at(key).size() > 1 && seen.insert(key).second) shared.emplace(item.key(), item.value());
  }
  std::vector<PipelineStage> own;
  for (int64_t index = rank; index < count; index += ranks) {
    PipelineStageOptions options{.group = group};
    for (const auto& [name, weight] : shared) {
      if (stages_of.at(weight.unsafeGetTensorImpl()).contains(static_cast<size_t>(index))) {
        options.tied.emplace(name, weight);
      }
    }
    own.emplace_back(parts[static_cast<size_t>(index)], index, count, std::move(options));
  }
  return own;
}

}  // namespace lockstep
