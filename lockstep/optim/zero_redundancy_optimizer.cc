#include <sstream>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/optim/internal/optimizer_formats.h>
#include <lockstep/optim/internal/parameter_broadcast.h>
#include <lockstep/optim/internal/sync_options.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>

namespace lockstep {

using internal::format_of;
using internal::ParameterBroadcast;
using internal::sync_options;

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamGroup;

/// Calls `visit(parameter)` for all parameters of all groups.
template <class Visit>
void for_each_parameter(const std::vector<OptimizerParamGroup>& groups, Visit visit) {
  for (const auto& group : groups) {
    for (const at::Tensor& parameter : group.params()) visit(parameter);
  }
}

OptimizerParamGroup group_like(const OptimizerParamGroup& group, std::vector<at::Tensor> parameters) {
  if (!group.has_options()) return OptimizerParamGroup(std::move(parameters));
  return OptimizerParamGroup(std::move(parameters), group.options().clone());
}

std::vector<bool> trainable(const std::vector<OptimizerParamGroup>& groups) {
  std::vector<bool> answer;
  for_each_parameter(groups,
                     [&](const at::Tensor& parameter) { answer.push_back(parameter.requires_grad()); });
  return answer;
}

at::Tensor serialised(const Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  const std::string bytes = std::move(stream).str();
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), tensor.mutable_data_ptr<uint8_t>());
  return tensor;
}

/// Moves each parameter's state to the parameter's device.
void move_state(Optimizer& optimizer) {
  const OptimizerFormat& format = format_of(optimizer);
  if (!format.has_state_per_parameter()) return;
  for (const auto& group : std::as_const(optimizer).param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) continue;
      auto moved = format.make_state(format.get_state(*state->second), parameter, group.options());
      if (moved) state->second = std::move(moved);
    }
  }
}

/// Another rank's state, on the devices of this rank's parameters: they may have other numbers there.
void deserialise(const at::Tensor& bytes, Optimizer& optimizer) {
  torch::serialize::InputArchive archive;
  std::optional<at::Device> device;
  bool several = false;
  for_each_parameter(optimizer.param_groups(), [&](const at::Tensor& parameter) {
    several = several || (device && *device != parameter.device());
    device = parameter.device();
  });
  if (several) device = at::Device(at::kCPU);
  archive.load_from(reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()), bytes.nbytes(), device);
  optimizer.load(archive);
  if (several) move_state(optimizer);
}

class ZeroJoinHook : public JoinHook {
 public:
  explicit ZeroJoinHook(ZeroRedundancyOptimizer& zero) : zero_(zero) {}
  void main_hook() override { zero_.step(); }

 private:
  ZeroRedundancyOptimizer& zero_;
};

}  // namespace

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<at::Tensor> params,
                                                 OptimizerFactory optimizer_class,
                                                 const ZeroRedundancyOptions& options)
    : ZeroRedundancyOptimizer(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(params))},
                              std::move(optimizer_class), options) {}

ZeroRedundancyOptimizer::ZeroRedundancyOptimizer(std::vector<OptimizerParamGroup> params,
                                                 OptimizerFactory optimizer_class,
                                                 const ZeroRedundancyOptions& options)
    : Optimizer(std::vector<OptimizerParamGroup>{}, nullptr),
      factory_(std::move(optimizer_class)),
      options_(options) {
  TORCH_CHECK_VALUE(factory_, "ZeroRedundancyOptimizer: there is no optimizer_class");
  TORCH_CHECK_VALUE(is_member(options_.process_group),
                    "ZeroRedundancyOptimizer: this rank is not in the process group");
  if (!options_.process_group) options_.process_group = default_group();
  check_groups(params);
  rank_ = options_.process_group->getRank();
  broadcast_ = std::make_unique<ParameterBroadcast>(options_.process_group);
  if (options_.overlap_with_ddp && options_.parameters_as_bucket_view) {
    LOCKSTEP_LOG(kWarning) << "`parameters_as_bucket_view=True` will be ignored since "
                              "`overlap_with_ddp=True`; instead, a different bucketing strategy will be used";
    options_.parameters_as_bucket_view = false;
  }
  param_groups_ = std::move(params);
  assign();
  local_ = factory_(groups_of_rank(rank_));
  TORCH_CHECK_VALUE(local_ && local_->param_groups().size() == param_groups_.size(),
                    "ZeroRedundancyOptimizer: the optimizer_class must make an optimizer of the ",
                    param_groups_.size(), " parameter groups it is given");
  TORCH_CHECK_VALUE(!options_.overlap_with_ddp || !dynamic_cast<torch::optim::LBFGS*>(local_.get()),
                    "ZeroRedundancyOptimizer with `overlap_with_ddp=True` can't step LBFGS, which needs all "
                    "gradients at once; use another optimizer, or none of the overlap hooks");
  defaults_ = local_->defaults().clone();
  sync_options(*local_, *this);
  trainable_ = trainable(param_groups_);
  build_buckets();
}

ZeroRedundancyOptimizer::~ZeroRedundancyOptimizer() = default;

void ZeroRedundancyOptimizer::check_groups(const std::vector<OptimizerParamGroup>& groups) const {
  std::unordered_set<const c10::TensorImpl*> seen;
  const at::Tensor* first = nullptr;
  for_each_parameter(param_groups_, [&](const at::Tensor& parameter) {
    seen.insert(parameter.unsafeGetTensorImpl());
    if (!first) first = &parameter;
  });
  for_each_parameter(groups, [&](const at::Tensor& parameter) {
    TORCH_CHECK_VALUE(parameter.defined(), "ZeroRedundancyOptimizer got an undefined tensor as parameter");
    TORCH_CHECK_VALUE(parameter.is_leaf(), "can't optimize a non-leaf Tensor");
    TORCH_CHECK_VALUE(seen.insert(parameter.unsafeGetTensorImpl()).second,
                      "some parameters appear in more than one parameter group");
    TORCH_CHECK_VALUE(
        parameter.layout() == c10::kStrided,
        "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but "
        "got ",
        parameter.toString());
    if (!first) first = &parameter;
    TORCH_CHECK_VALUE(
        parameter.scalar_type() == first->scalar_type(),
        "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but "
        "got both ",
        first->toString(), " and ", parameter.toString());
    // A bucket is one tensor.
    TORCH_CHECK_VALUE(!options_.parameters_as_bucket_view || options_.overlap_with_ddp ||
                          parameter.device() == first->device(),
                      "ZeroRedundancyOptimizer: with parameters_as_bucket_view all parameters must be on one "
                      "device, but they are on ",
                      first->device(), " and ", parameter.device(), "; leave parameters_as_bucket_view out");
  });
  TORCH_CHECK_VALUE(first, "ZeroRedundancyOptimizer got an empty parameter list");
}

/// Shares out all parameters of param_groups_.
void ZeroRedundancyOptimizer::assign() {
  std::vector<std::vector<int64_t>> numels;
  for (const auto& group : param_groups_) {
    auto& sizes = numels.emplace_back();
    for (const at::Tensor& parameter : group.params()) sizes.push_back(parameter.numel());
  }
  partition_ = partition_parameters(numels, options_.process_group->getSize());
  for (size_t rank = 0; rank < partition_.size(); ++rank) {
    for (size_t group = 0; group < param_groups_.size(); ++group) {
      for (const size_t index : partition_[rank][group]) {
        const at::Tensor& parameter = param_groups_[group].params()[index];
        owners_[parameter.unsafeGetTensorImpl()] = static_cast<int>(rank);
        if (options_.overlap_with_ddp && static_cast<int>(rank) == rank_) {
          // detach() shares the version counter, so that a graph which still needs the old value notices.
          aliases_.try_emplace(parameter.unsafeGetTensorImpl(), parameter.detach());
        }
      }
    }
  }
}

/// The groups of a rank's optimizer: its parameters, with the options of now.
std::vector<OptimizerParamGroup> ZeroRedundancyOptimizer::groups_of_rank(int rank) const {
  std::vector<OptimizerParamGroup> groups;
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    std::vector<at::Tensor> parameters;
    for (const size_t index : partition_[static_cast<size_t>(rank)][group]) {
      const at::Tensor& parameter = param_groups_[group].params()[index];
      parameters.push_back(rank == rank_ ? local_parameter(parameter) : parameter);
    }
    groups.push_back(group_like(param_groups_[group], std::move(parameters)));
  }
  return groups;
}

/// The tensor that the local optimizer knows as this parameter.
const at::Tensor& ZeroRedundancyOptimizer::local_parameter(const at::Tensor& parameter) const {
  const auto alias = aliases_.find(parameter.unsafeGetTensorImpl());
  return alias == aliases_.end() ? parameter : alias->second;
}

void ZeroRedundancyOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  check_groups_are_known();
  check_groups({param_group});
  sync_options(*this, *local_);
  param_groups_.push_back(param_group);
  assign();
  local_->add_param_group(groups_of_rank(rank_).back());
  sync_options(*local_, *this);
  consolidated_.reset();
  trainable_ = trainable(param_groups_);
  build_buckets();
}

void ZeroRedundancyOptimizer::check_groups_are_known() const {
  size_t parameters = 0;
  bool known = local_->param_groups().size() == param_groups_.size();
  for_each_parameter(param_groups_, [&](const at::Tensor& parameter) {
    ++parameters;
    known = known && owners_.contains(parameter.unsafeGetTensorImpl());
  });
  TORCH_CHECK(known && parameters == owners_.size(),
              "ZeroRedundancyOptimizer: parameters were added or removed behind its back; add them by "
              "ZeroRedundancyOptimizer::add_param_group()");
}

/// Moves the trainable parameters of each rank into one tensor.
void ZeroRedundancyOptimizer::build_buckets() {
  if (!options_.parameters_as_bucket_view) return;
  at::NoGradGuard no_grad;
  buckets_.clear();
  for (const auto& groups : partition_) {
    std::vector<at::Tensor> members;
    int64_t numel = 0;
    for (size_t group = 0; group < groups.size(); ++group) {
      for (const size_t index : groups[group]) {
        at::Tensor parameter = param_groups_[group].params()[index];
        if (parameter.requires_grad()) {
          members.push_back(parameter);
          numel += parameter.numel();
        } else {
          parameter.set_data(parameter.detach().clone());  // it may be part of an old bucket
        }
      }
    }
    at::Tensor& bucket = buckets_.emplace_back();
    if (numel == 0) continue;
    const auto layout = members.front().options().requires_grad(false);
    bucket = layout.device().is_cpu() ? empty_shared({numel}, layout, options_.process_group)
                                      : at::empty({numel}, layout);
    int64_t offset = 0;
    for (at::Tensor& parameter : members) {
      const at::Tensor place = parameter.is_non_overlapping_and_dense()
                                   ? bucket.as_strided(parameter.sizes(), parameter.strides(), offset)
                                   : bucket.narrow(0, offset, parameter.numel()).view(parameter.sizes());
      place.copy_(parameter);
      parameter.set_data(place);
      offset += parameter.numel();
    }
  }
}

void ZeroRedundancyOptimizer::follow_trainability() {
  auto now = trainable(param_groups_);
  if (now == trainable_) return;
  TORCH_CHECK(!options_.overlap_with_ddp,
              "ZeroRedundancyOptimizer with `overlap_with_ddp=True` does not support changing parameter "
              "trainability at run time");
  LOCKSTEP_LOG(kWarning) << "ZeroRedundancyOptimizer detected that the trainable parameters changed; "
                            "rebuilding the parameter buckets if enabled";
  trainable_ = std::move(now);
  build_buckets();
}

at::Tensor ZeroRedundancyOptimizer::step(LossClosure closure) {
  if (options_.overlap_with_ddp) {
    LOCKSTEP_LOG(kWarning)
        << "`step()` should not be included in the training loop when `overlap_with_ddp=True`";
    return {};
  }
  Join::notify_join_context(*this);
  at::Tensor loss = local_step(closure);
  exchange();
  return loss;
}

at::Tensor ZeroRedundancyOptimizer::local_step(const LossClosure& closure) {
  check_groups_are_known();
  follow_trainability();
  sync_options(*this, *local_);
  at::Tensor loss = local_->step(closure);
  sync_options(*local_, *this);
  return loss;
}

/// Brings every rank's parameters to all others.
void ZeroRedundancyOptimizer::exchange() {
  for (size_t rank = 0; rank < partition_.size(); ++rank) {
    if (options_.parameters_as_bucket_view) {
      if (buckets_[rank].defined()) broadcast_->start(static_cast<int>(rank), {buckets_[rank]});
      continue;
    }
    std::vector<at::Tensor> parameters;
    for (size_t group = 0; group < param_groups_.size(); ++group) {
      for (const size_t index : partition_[rank][group])
        parameters.push_back(param_groups_[group].params()[index]);
    }
    broadcast_->start(static_cast<int>(rank), parameters);
  }
  broadcast_->finish();
}

void ZeroRedundancyOptimizer::start_step(const std::vector<at::Tensor>& parameters,
                                         const std::vector<at::Tensor>& gradients) {
  TORCH_CHECK(options_.overlap_with_ddp,
              "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook "
              "properly");
  TORCH_CHECK_VALUE(parameters.size() == gradients.size(), "there are ", gradients.size(), " gradients for ",
                    parameters.size(), " parameters");
  std::vector<std::vector<at::Tensor>> by_owner(partition_.size());
  std::vector<at::Tensor> stepped;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto owner = owners_.find(parameters[i].unsafeGetTensorImpl());
    if (owner == owners_.end()) continue;
    by_owner[static_cast<size_t>(owner->second)].push_back(parameters[i]);
    if (owner->second != rank_) continue;
    at::Tensor alias = aliases_.at(parameters[i].unsafeGetTensorImpl());
    if (alias.data_ptr() != parameters[i].data_ptr()) alias.set_data(parameters[i].detach());
    alias.mutable_grad() = gradients[i];
    stepped.push_back(std::move(alias));
  }
  // The optimizer leaves out parameters without a gradient, that is, all but those.
  try {
    if (!stepped.empty()) local_step({});
  } catch (...) {
    for (at::Tensor& alias : stepped) alias.mutable_grad().reset();
    throw;
  }
  for (at::Tensor& alias : stepped) alias.mutable_grad().reset();
  for (size_t rank = 0; rank < by_owner.size(); ++rank) {
    broadcast_->start(static_cast<int>(rank), by_owner[rank]);
  }
}

void ZeroRedundancyOptimizer::finish_step() {
  broadcast_->finish();
}

void ZeroRedundancyOptimizer::consolidate_state_dict(int to) {
  const ProcessGroup& group = options_.process_group;
  TORCH_CHECK_VALUE(to >= 0 && to < group->getSize(), "consolidate_state_dict: there is no rank ", to,
                    " in a group of ", group->getSize());
  check_groups_are_known();
  sync_options(*this, *local_);
  consolidated_.reset();

  // Each rank tells how many bytes and states it has; no bytes mean that it failed.
  at::Tensor mine;
  std::exception_ptr error;
  try {
    mine = serialised(*local_);
  } catch (...) {
    error = std::current_exception();
  }
  at::Tensor header = at::empty({2}, at::kLong);
  header.mutable_data_ptr<int64_t>()[0] = error ? 0 : mine.numel();
  header.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(local_->state().size());
  at::Tensor headers = at::empty({group->getSize(), 2}, at::kLong);
  all_gather_into_tensor(headers, header, group);
  if (error) std::rethrow_exception(error);
  const auto* told = headers.const_data_ptr<int64_t>();
  for (int rank = 0; rank < group->getSize(); ++rank) {
    TORCH_CHECK(told[2 * rank] > 0, "consolidate_state_dict: rank ", rank, " could not write its state");
  }

  // Everything is received before it is read, so that the others are not kept waiting by an error here.
  std::vector<at::Tensor> parts(static_cast<size_t>(group->getSize()));
  if (rank_ != to) {
    send(mine, get_global_rank(group, to), group);
    return;
  }
  for (int rank = 0; rank < group->getSize(); ++rank) {
    auto& part = parts[static_cast<size_t>(rank)];
    part = rank == rank_ ? mine : at::empty({told[2 * rank]}, at::kByte);
    if (rank != rank_) recv(part, get_global_rank(group, rank), group);
  }
  auto whole = factory_(param_groups_);
  for (int rank = 0; rank < group->getSize(); ++rank) {
    auto groups = groups_of_rank(rank);
    auto optimizer = factory_(groups);
    deserialise(parts[static_cast<size_t>(rank)], *optimizer);
    TORCH_CHECK(static_cast<int64_t>(optimizer->state().size()) == told[2 * rank + 1],
                "consolidate_state_dict: the optimizer's save() and load() do not keep its state: ",
                told[2 * rank + 1], " states of rank ", rank, " became ", optimizer->state().size());
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].params().size(); ++i) {
        const auto state = optimizer->state().find(groups[g].params()[i].unsafeGetTensorImpl());
        if (state == optimizer->state().end()) continue;
        const size_t index = partition_[static_cast<size_t>(rank)][g][i];
        whole->state()[param_groups_[g].params()[index].unsafeGetTensorImpl()] = std::move(state->second);
      }
    }
  }
  consolidated_ = std::move(whole);
}

void ZeroRedundancyOptimizer::save(torch::serialize::OutputArchive& archive) const {
  TORCH_CHECK(consolidated_,
              "Optimizer state has not been consolidated on this rank. Please call "
              "`consolidate_state_dict(to=",
              rank_, ")` on all ranks beforehand if you meant to save the global state.");
  sync_options(*this, *consolidated_);
  consolidated_->save(archive);
}

void ZeroRedundancyOptimizer::load(torch::serialize::InputArchive& archive) {
  check_groups_are_known();
  auto whole = factory_(param_groups_);
  whole->load(archive);
  for (size_t group = 0; group < param_groups_.size(); ++group) {
    for (const size_t index : partition_[static_cast<size_t>(rank_)][group]) {
      const at::Tensor& parameter = param_groups_[group].params()[index];
      void* key = local_parameter(parameter).unsafeGetTensorImpl();
      const auto state = whole->state().find(parameter.unsafeGetTensorImpl());
      if (state == whole->state().end()) {
        local_->state().erase(key);
      } else {
        local_->state()[key] = std::move(state->second);
      }
    }
  }
  sync_options(*whole, *this);
  sync_options(*this, *local_);
  consolidated_.reset();
}

std::unique_ptr<JoinHook> ZeroRedundancyOptimizer::join_hook(const JoinOptions&) {
  TORCH_CHECK(
      !options_.overlap_with_ddp,
      "ZeroRedundancyOptimizer with `overlap_with_ddp=True` can't be in a Join: a rank without inputs "
      "has no backward() to overlap with");
  return std::make_unique<ZeroJoinHook>(*this);
}

at::Device ZeroRedundancyOptimizer::join_device() const {
  return owners_.empty() ? at::Device(at::kCPU) : owners_.begin()->first->device();
}

}  // namespace lockstep
