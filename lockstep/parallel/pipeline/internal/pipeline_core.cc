#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/groups/spread_failure.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/parallel/pipeline/internal/pipeline_core.h>

namespace lockstep::pipeline::internal {
namespace {

/// Messages of users keep below.
constexpr int64_t kFirstTag = int64_t{1} << 30;
constexpr int64_t kTags = (int64_t{1} << 31) - kFirstTag;
/// That of messages from stage 0 to itself, which there are none of.
constexpr int kOrderedTag = static_cast<int>(kFirstTag);

/// What a rank tells the others of one of its stages: its index, outputs_to, and its tied weights with their kinds.
using ToldStage =
    std::tuple<int64_t, std::vector<std::vector<int64_t>>, std::vector<std::pair<std::string, std::string>>>;
/// Its fault, or ""; what must agree; its stages; the kind of device that all of them are on, one device, or "".
using Told = std::tuple<std::string, std::string, std::vector<ToldStage>, std::string>;

/// The device of all the stages; none where they are on several, or on the CPU.
std::optional<c10::Device> device_of(const std::vector<PipelineStage>& stages) {
  if (stages.empty()) return std::nullopt;
  const c10::Device first = stages.front().device();
  const bool is_one = !first.is_cpu() && std::ranges::all_of(stages, [&](const PipelineStage& stage) {
    return stage.device() == first;
  });
  return is_one ? std::optional(first) : std::nullopt;
}

std::string kind_of(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), ' ', tensor.sizes());
}

std::string describe(const PipelineOptions& options, int64_t num_stages) {
  return to_string(options.schedule) + " of " + std::to_string(num_stages) + " stages, with " +
         std::to_string(options.n_microbatches) + " micro-batches, " +
         (options.loss_fn ? "a loss" : "no loss") + ", scale_grads " +
         (options.scale_grads ? "true" : "false") + ", " + (options.scale_loss ? "a" : "no") +
         " scale_loss and " + (options.data_parallel_group ? "a" : "no") + " data_parallel_group";
}

}  // namespace

PipelineCore::PipelineCore(std::vector<PipelineStage> own_stages, PipelineOptions given)
    : stages(std::move(own_stages)), options(std::move(given)) {
  std::sort(stages.begin(), stages.end(),
            [](const PipelineStage& a, const PipelineStage& b) { return a.stage_index() < b.stage_index(); });
  group = group_of(stages);
  TORCH_CHECK_VALUE(is_member(group),
                    "this rank is not a member of the pipeline's group; leave its stages to the members");
  if (options.data_parallel_group && !*options.data_parallel_group) {
    options.data_parallel_group = default_group();
  }
  if (!stages.empty()) num_stages = stages.front().num_stages();
  rank = get_rank(group);
  ranks = get_world_size(group);
  TORCH_CHECK_VALUE(lockstep_backend_of(*group), "the pipeline's group '", group->getGroupName(),
                    "' has no Lockstep backend for CPU tensors; make it with \"lockstep\" or \"nccl\"");
  const auto device = agree_with_replicas();
  try {
    messages = std::make_unique<TensorMessages>(group, device, kOrderedTag);
    messages->connect(ranks_that_send());
    share_initial_values();
  } catch (...) {
    fail("while its pipeline was made: " + text_of(std::current_exception()));
    throw;
  }
}

/// agree(), and check_replicas() of what comes of it.
std::optional<c10::Device> PipelineCore::agree_with_replicas() {
  const bool has_replicas = options.data_parallel_group && is_member(*options.data_parallel_group);
  try {
    std::optional<c10::Device> device;
    try {
      device = agree();
    } catch (const c10::ValueError& refusal) {
      if (has_replicas) check_replicas(refusal.what_without_backtrace());
      throw;
    }
    if (has_replicas) check_replicas("");
    return device;
  } catch (...) {
    spread_failure(groups());
    throw;
  }
}

std::vector<ProcessGroup> PipelineCore::groups() const {
  std::vector<ProcessGroup> all{group};
  if (messages) {
    for (const ProcessGroup& links : messages->link_groups()) all.push_back(links);
  }
  if (options.data_parallel_group) all.push_back(*options.data_parallel_group);
  return all;
}

void PipelineCore::fail(const std::string& text) {
  failure = text;
  spread_failure(groups());
  // It has no effect on a group that has failed already.
  lockstep_backend_of(*group)->abort(text);
  if (messages) messages->abort_links();
  spread_failure(groups());
}

/// To which others.
std::set<std::pair<int, int>> PipelineCore::ranks_that_send() const {
  std::set<std::pair<int, int>> pairs;
  const auto add = [&](int64_t one, int64_t other) {
    const int a = rank_of(one), b = rank_of(other);
    if (a != b) pairs.insert({{a, b}, {b, a}});
  };
  for (size_t from = 0; from < consumers.size(); ++from) {
    for (const int64_t to : consumers[from]) add(static_cast<int64_t>(from), to);
  }
  for (const TiedWeight& weight : tied) {
    for (const int64_t one : weight.stages) {
      for (const int64_t other : weight.stages) add(one, other);
    }
  }
  return pairs;
}

/// What is wrong with what this rank was given.
std::string PipelineCore::own_fault() const {
  if (stages.empty()) return kNoStage;
  if (num_stages % ranks != 0 || num_stages / ranks != static_cast<int64_t>(stages.size())) {
    return c10::str("it has ", stages.size(), " stages of ", num_stages, ", and the group has ", ranks,
                    " ranks; all ranks have the same number of stages");
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    const PipelineStage& one = stages[i];
    const int64_t expected = static_cast<int64_t>(i) * ranks + rank;
    if (one.num_stages() != num_stages) {
      return c10::str("its stages are of ", num_stages, " and of ", one.num_stages());
    }
    if (one.stage_index() != expected) {
      return c10::str("it has stage ", one.stage_index(), " in the place of stage ", expected,
                      "; stages go round the ranks (rank_of_stage())");
    }
    if (one.options().group != stages.front().options().group) {
      return c10::str("its stages ", stages.front().stage_index(), " and ", one.stage_index(),
                      " are of different groups");
    }
  }
  try {
    pipeline_table(options.schedule, {ranks, num_stages / ranks, options.n_microbatches});
    if (options.data_parallel_group && !is_member(*options.data_parallel_group)) {
      return "it is not a member of its data_parallel_group";
    }
    for (const PipelineStage& one : stages) {
      if (std::string fault = fault_of_sync_batch_norms(one); !fault.empty()) return fault;
    }
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

/// Ranks without the stage never call its layers, and the others would wait for them.
std::string PipelineCore::fault_of_sync_batch_norms(const PipelineStage& stage) const {
  std::vector<int> have_it{get_rank()};
  if (options.data_parallel_group) have_it = get_process_group_ranks(*options.data_parallel_group);
  for (const ProcessGroup& of_norm : stage.sync_batch_norm_groups()) {
    const std::vector<int> all = get_process_group_ranks(of_norm);
    std::vector<int> without;
    std::ranges::copy_if(all, std::back_inserter(without),
                         [&](int one) { return std::ranges::find(have_it, one) == have_it.end(); });
    if (without.empty()) continue;
    return c10::str(
        "a SyncBatchNorm of its stage ", stage.stage_index(), " normalises over the ranks ",
        c10::ArrayRef<int>(all), ", of which ", c10::ArrayRef<int>(without),
        " don't have the stage and would never call it; give the layer the data_parallel_group "
        "(convert_sync_batchnorm(module, group)), or take BatchNorm, which sees a micro-batch of its rank");
  }
  return "";
}

/// This rank's device, if each rank's stages are on one, of the same kind everywhere.
std::optional<c10::Device> PipelineCore::agree() {
  std::vector<ToldStage> told_stages;
  std::set<std::pair<std::string, const at::TensorImpl*>> seen;
  for (const PipelineStage& one : stages) {
    std::vector<std::pair<std::string, std::string>> weights;
    for (const auto& [name, tensor] : one.options().tied) {
      if (seen.emplace(name, tensor.unsafeGetTensorImpl()).second)
        weights.emplace_back(name, kind_of(tensor));
    }
    told_stages.emplace_back(one.stage_index(), one.options().outputs_to, std::move(weights));
  }
  const auto device = device_of(stages);
  const Told own{own_fault(), describe(options, num_stages), std::move(told_stages),
                 device ? c10::DeviceTypeName(device->type()) : ""};
  const std::vector<Told> told = all_gather_values(own, group);
  for (size_t other = 0; other < told.size(); ++other) throw_if(std::get<0>(told[other]), other);
  for (size_t other = 0; other < told.size(); ++other) {
    const std::string& settings = std::get<1>(told[other]);
    TORCH_CHECK_VALUE(settings == std::get<1>(told[0]), "the ranks were given different pipelines: rank ",
                      get_global_rank(group, 0), " ", std::get<1>(told[0]), "; rank ",
                      get_global_rank(group, static_cast<int>(other)), " ", settings);
  }

  const auto count = static_cast<size_t>(num_stages);
  outputs_to.resize(count);
  std::map<std::string, std::pair<TiedWeight, std::string>> weights;
  for (size_t index = 0; index < count; ++index) {
    const ToldStage& one =
        std::get<2>(told[index % static_cast<size_t>(ranks)])[index / static_cast<size_t>(ranks)];
    const int64_t number = std::get<0>(one);
    outputs_to[index] = std::get<1>(one);
    for (const auto& [name, kind] : std::get<2>(one)) {
      auto& [weight, first_kind] = weights[name];
      if (weight.stages.empty()) first_kind = kind;
      TORCH_CHECK_VALUE(kind == first_kind, "the tied weight '", name, "' is ", first_kind, " on stage ",
                        weight.stages.front(), " and ", kind, " on stage ", number);
      weight.name = name;
      weight.stages.push_back(number);
      weight.local.push_back(is_here(number) ? stage(number).options().tied.at(name) : at::Tensor());
    }
  }
  for (auto& [name, one] : weights) {
    TORCH_CHECK_VALUE(one.first.stages.size() > 1, "the tied weight '", name, "' is on stage ",
                      one.first.stages.front(), " alone; give it the same name on the stages that share it");
    tied.push_back(std::move(one.first));
  }

  sources.resize(count);
  consumers.resize(count);
  for (size_t from = 0; from < count; ++from) {
    std::set<int64_t> to;
    for (const auto& output : outputs_to[from]) to.insert(output.begin(), output.end());
    if (outputs_to[from].empty() && from + 1 < count) to.insert(static_cast<int64_t>(from) + 1);
    consumers[from].assign(to.begin(), to.end());
    for (const int64_t each : to) sources[static_cast<size_t>(each)].push_back(static_cast<int64_t>(from));
  }
  for (size_t index = 1; index < count; ++index) {
    TORCH_CHECK_VALUE(!sources[index].empty(), "no stage sends anything to stage ", index,
                      "; see PipelineStageOptions::outputs_to");
  }
  TORCH_CHECK_VALUE(
      num_stages * num_stages * (options.n_microbatches + static_cast<int64_t>(tied.size())) < kTags,
      "a pipeline of ", num_stages, " stages can't have ", options.n_microbatches,
      " micro-batches: its messages would need more than 2^30 tags");
  const auto table = pipeline_table(options.schedule, {ranks, num_stages / ranks, options.n_microbatches});
  for (const auto& action : table[static_cast<size_t>(rank)]) {
    if (action) actions.push_back(*action);
  }
  const bool all_have_one = std::ranges::all_of(told, [&](const Told& one) {
    return !std::get<3>(one).empty() && std::get<3>(one) == std::get<3>(told[0]);
  });
  return all_have_one ? device : std::nullopt;
}

/// The ranks of a data_parallel_group have the same stages. When those of some rank do not, or the pipeline of one is refused, it
/// throws on all ranks of the pipelines that this concerns. `refused`: why this rank's pipeline is, "" if it is not; its ranks
/// know already, and only tell the others.
void PipelineCore::check_replicas(const std::string& refused) const {
  const ProcessGroup& replicas = *options.data_parallel_group;
  std::string fault;
  const std::tuple<int64_t, int64_t, std::string> own{rank, num_stages, refused};
  const auto places = all_gather_values(own, replicas);
  if (!refused.empty()) return;
  for (size_t other = 0; other < places.size(); ++other) {
    if (!fault.empty() || places[other] == own) continue;
    const auto& [place, stages_there, refused_there] = places[other];
    fault = c10::str("its data_parallel_group has rank ", get_global_rank(replicas, static_cast<int>(other)),
                     ", ");
    if (!refused_there.empty()) {
      fault += "whose pipeline is refused: " + refused_there;
      continue;
    }
    fault += c10::str("which is number ", place, " of a pipeline of ", stages_there,
                      " stages, and this one is number ", rank, " of one of ", num_stages,
                      "; give the ranks that have the same stages of other pipelines");
  }
  const std::vector<std::string> faults = all_gather_values(fault, group);
  for (size_t other = 0; other < faults.size(); ++other) throw_if(faults[other], other);
}

/// What a rank of the pipeline has told, where that is a fault.
void PipelineCore::throw_if(const std::string& fault, size_t of_rank) const {
  TORCH_CHECK_VALUE(fault.empty(), "the pipeline can't be made: on rank ",
                    get_global_rank(group, static_cast<int>(of_rank)), ", ", fault);
}

int PipelineCore::tag_of(int64_t from, int64_t to, int64_t micro_batch) const {
  const int64_t kinds = options.n_microbatches + static_cast<int64_t>(tied.size());
  return static_cast<int>(kFirstTag + (from * num_stages + to) * kinds + micro_batch);
}

bool PipelineCore::goes_to(int64_t from, size_t output, int64_t to) const {
  const auto& outputs = outputs_to[static_cast<size_t>(from)];
  if (outputs.empty()) return to == from + 1;
  return std::find(outputs[output].begin(), outputs[output].end(), to) != outputs[output].end();
}

void PipelineCore::share_initial_values() {
  const at::NoGradGuard no_grad;
  if (options.data_parallel_group) {
    const ProcessGroup& replicas = *options.data_parallel_group;
    for (const PipelineStage& one : stages) {
      for (const auto* tensors : {&one.parameters(), &one.buffers()}) {
        for (const at::Tensor& tensor : *tensors) {
          broadcast(tensor.detach(), get_global_rank(replicas, 0), replicas);
        }
      }
    }
  }
  for (size_t index = 0; index < tied.size(); ++index) {
    const TiedWeight& weight = tied[index];
    const int64_t first = weight.stages.front();
    for (size_t i = 1; i < weight.stages.size(); ++i) {
      const int64_t to = weight.stages[i];
      if (is_here(first) && !is_here(to)) {
        messages->send({weight.local.front().detach()}, rank_of(to), tag_of_tied(first, to, index));
      } else if (is_here(first)) {
        weight.local[i].copy_(weight.local.front());
      } else if (is_here(to)) {
        const auto receipt = messages->receive(rank_of(first), tag_of_tied(first, to, index));
        weight.local[i].copy_(receipt->take(weight.local[i].device()).front());
      }
    }
  }
  messages->finish_sends();
}

// ---- gradients over several ranks

GradientAverage::GradientAverage(const std::vector<at::Tensor>& parameters, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>> by_kind;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad())
      by_kind[{parameter.scalar_type(), parameter.device().str()}].push_back(parameter);
  }
  for (const auto& [kind, members] : by_kind) {
    // A parameter may have taken no part on this rank alone: which of them have one travels with the gradients.
    Part part{.has_gradient =
                  at::ones({std::ssize(members)}, members.front().options().requires_grad(false))};
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < members.size(); ++i) {
      at::Tensor& gradient = members[i].mutable_grad();
      if (!gradient.defined()) {
        gradient = at::zeros_like(members[i]);
        part.has_gradient.select(0, static_cast<int64_t>(i)).zero_();
        part.without.emplace_back(i, members[i]);
      }
      tensors.push_back(gradient);
    }
    tensors.push_back(part.has_gradient);
    part.work = all_reduce_coalesced(tensors, ReduceOp::AVG, group, /*async_op=*/true);
    parts_.push_back(std::move(part));
  }
}

void GradientAverage::wait() {
  for (const Part& part : parts_) {
    part.work->wait();
    if (part.without.empty()) continue;
    const at::Tensor any = part.has_gradient.ne(0).to(at::kCPU);
    for (const auto& [index, parameter] : part.without) {
      if (!any.const_data_ptr<bool>()[index]) parameter.mutable_grad().reset();
    }
  }
  parts_.clear();
}

TiedGradients::TiedGradients(PipelineCore& core) : core_(core) {
  for (const TiedWeight& weight : core_.tied) {
    std::vector<at::Tensor> before(weight.local.size());
    for (size_t i = 0; i < before.size(); ++i) {
      if (weight.local[i].defined()) before[i] = std::exchange(weight.local[i].mutable_grad(), at::Tensor());
    }
    before_.push_back(std::move(before));
  }
}

void TiedGradients::sum() {
  const at::NoGradGuard no_grad;
  for (size_t index = 0; index < core_.tied.size(); ++index) {
    const TiedWeight& weight = core_.tied[index];
    const at::Tensor sum = sum_of(weight, index);
    for (size_t i = 0; i < weight.stages.size(); ++i) {
      if (weight.local[i].defined())
        put_back(weight.local[i], before_[index][i], sum.defined() ? sum.clone() : sum);
    }
  }
  core_.messages->finish_sends();
}

/// As the gradient: what it was before, and what came since.
void TiedGradients::put_back(const at::Tensor& weight, at::Tensor& before, const at::Tensor& gradient) {
  if (before.defined() && gradient.defined()) before.add_(gradient);
  weight.mutable_grad() = before.defined() ? std::exchange(before, at::Tensor()) : gradient;
}

/// After a step that threw, too, as other weights keep theirs.
TiedGradients::~TiedGradients() {
  try {
    const at::NoGradGuard no_grad;
    for (size_t index = 0; index < core_.tied.size(); ++index) {
      for (size_t i = 0; i < before_[index].size(); ++i) {
        const at::Tensor& weight = core_.tied[index].local[i];
        if (before_[index][i].defined()) put_back(weight, before_[index][i], weight.grad());
      }
    }
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "the gradients that tied weights had before this step are lost: "
                         << text_of(error);
  }
}

/// The first stage's rank adds up, in the order of the stages, so that all get the same bits. Undefined on ranks that have no
/// stage of the weight, and where no stage has a gradient.
at::Tensor TiedGradients::sum_of(const TiedWeight& weight, size_t index) {
  const int64_t first = weight.stages.front();
  const int collector = core_.rank_of(first);
  at::Tensor result;
  if (core_.rank == collector) result = weight.local.front().grad();
  for (size_t i = 1; i < weight.stages.size(); ++i) {
    const int64_t other = weight.stages[i];
    at::Tensor addend;
    if (core_.is_here(other)) addend = weight.local[i].grad();
    if (core_.rank_of(other) != collector) {
      const int tag = core_.tag_of_tied(other, first, index);
      if (core_.is_here(other)) core_.messages->send({addend}, collector, tag);
      if (core_.rank == collector) {
        const auto receipt = core_.messages->receive(core_.rank_of(other), tag);
        addend = receipt->take(weight.local.front().device()).front();
      }
    }
    if (core_.rank == collector && addend.defined()) result = result.defined() ? result + addend : addend;
  }
  for (size_t i = 1; i < weight.stages.size(); ++i) {
    const int64_t other = weight.stages[i];
    if (core_.rank_of(other) == collector) continue;
    const int tag = core_.tag_of_tied(first, other, index);
    if (core_.rank == collector) core_.messages->send({result}, core_.rank_of(other), tag);
    if (!core_.is_here(other)) continue;
    const auto receipt = core_.messages->receive(collector, tag);
    result = receipt->take(weight.local[i].device()).front();
  }
  return result;
}

}  // namespace lockstep::pipeline::internal
