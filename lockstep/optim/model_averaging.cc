#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/optim/model_averaging.h>

namespace lockstep {
namespace {

using torch::optim::OptimizerParamGroup;

void check_warmup(int64_t warmup_steps) {
  TORCH_CHECK_VALUE(warmup_steps >= 0, "Arg ``warmup_steps`` must be a non-negative number, not ",
                    warmup_steps, ".");
}

void warn_of_period_one(const char* whose) {
  LOCKSTEP_LOG(kWarning) << "When " << whose
                         << " is 1, no need to use model averaging because the communication cost of "
                            "all-reducing parameters will be no less than the cost of all-reducing gradients "
                            "by DistributedDataParallel in the backward pass. Therefore, only "
                            "DistributedDataParallel should be used for this case.";
}

ProcessGroup current_group(const ProcessGroup& given) {
  return given ? given : default_group();
}

}  // namespace

void average_parameters(const std::vector<at::Tensor>& params, const ProcessGroup& process_group) {
  if (params.empty() || !is_member(process_group)) return;
  at::NoGradGuard no_grad;
  int64_t numel = 0;
  at::ScalarType type = params.front().scalar_type();
  for (const at::Tensor& parameter : params) {
    numel += parameter.numel();
    type = c10::promoteTypes(type, parameter.scalar_type());
  }
  const at::Device device = params.front().device();
  const at::Tensor flat = device.is_cpu() ? empty_shared({numel}, at::TensorOptions(type), process_group)
                                          : at::empty({numel}, at::TensorOptions(type).device(device));
  int64_t offset = 0;
  for (const at::Tensor& parameter : params) {
    flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()).copy_(parameter);
    offset += parameter.numel();
  }
  flat.div_(get_world_size(process_group));
  all_reduce(flat, ReduceOp::SUM, process_group);
  offset = 0;
  for (const at::Tensor& parameter : params) {
    parameter.copy_(flat.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

std::vector<at::Tensor> get_params_to_average(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> filtered;
  for (const at::Tensor& parameter : params) {
    if (parameter.grad().defined()) filtered.push_back(parameter);
  }
  return filtered;
}

std::vector<at::Tensor> get_params_to_average(const std::vector<OptimizerParamGroup>& params) {
  std::vector<at::Tensor> filtered;
  for (const OptimizerParamGroup& group : params) {
    for (at::Tensor& parameter : get_params_to_average(group.params()))
      filtered.push_back(std::move(parameter));
  }
  return filtered;
}

void average_parameters_or_parameter_groups(const std::vector<at::Tensor>& params,
                                            const ProcessGroup& process_group) {
  average_parameters(get_params_to_average(params), process_group);
}

void average_parameters_or_parameter_groups(const std::vector<OptimizerParamGroup>& params,
                                            const ProcessGroup& process_group) {
  average_parameters(get_params_to_average(params), process_group);
}

ModelAverager::ModelAverager(ProcessGroup process_group) : process_group_(std::move(process_group)) {}

template <class Params>
void ModelAverager::average_if_it_is_time(const Params& params) {
  if (const auto group = group_of_step(step_)) average_parameters_or_parameter_groups(params, *group);
  ++step_;
}

void ModelAverager::average_parameters(const std::vector<at::Tensor>& params) {
  average_if_it_is_time(params);
}

void ModelAverager::average_parameters(const std::vector<OptimizerParamGroup>& params) {
  average_if_it_is_time(params);
}

PeriodicModelAverager::PeriodicModelAverager(int64_t period, int64_t warmup_steps, ProcessGroup process_group)
    : ModelAverager(std::move(process_group)), period_(period), warmup_steps_(warmup_steps) {
  check_warmup(warmup_steps);
  TORCH_CHECK_VALUE(period >= 1, "Arg ``period`` must be a positive value, not ", period, ".");
  if (period == 1) warn_of_period_one("period");
}

std::optional<ProcessGroup> PeriodicModelAverager::group_of_step(int64_t step) {
  if (step < warmup_steps_ || (step - warmup_steps_) % period_ != 0) return {};
  return process_group();
}

HierarchicalModelAverager::HierarchicalModelAverager(
    const std::vector<std::pair<int64_t, int>>& period_group_size_dict, int64_t warmup_steps,
    ProcessGroup process_group)
    : ModelAverager(std::move(process_group)), sizes_(period_group_size_dict), warmup_steps_(warmup_steps) {
  TORCH_CHECK_VALUE(!sizes_.empty(), "Arg ``period_group_size_dict`` must not be empty.");
  int64_t last = 0;
  for (const auto& [period, group_size] : sizes_) {
    TORCH_CHECK_VALUE(period > 0,
                      "The minimum period in arg ``period_group_size_dict`` must be a positive value, not ",
                      period, ".");
    TORCH_CHECK_VALUE(period > last, "The periods in arg ``period_group_size_dict`` must ascend, but ",
                      period, " follows ", last, ".");
    last = period;
  }
  if (last == 1) warn_of_period_one("the maximum period in arg ``period_group_size_dict``");
  check_warmup(warmup_steps);
  make_groups(current_group(this->process_group()));
  LOCKSTEP_LOG(kInfo) << "Model averaging hierarchy:";
  for (const auto& [period, group_size] : sizes_) {
    LOCKSTEP_LOG(kInfo) << "\tEach group that has " << group_size << " processes average parameters every "
                        << period << " iterations, if no higher-level averaging.";
  }
}

void HierarchicalModelAverager::make_groups(const ProcessGroup& parent) {
  const int overall_size = get_world_size(parent);
  TORCH_CHECK_VALUE(sizes_.back().second == overall_size, "The last value in arg ``period_group_size_dict`` ",
                    sizes_.back().second, " must be equal to the size of arg ``process_group`` ",
                    overall_size, ".");
  std::vector<std::pair<int64_t, ProcessGroup>> groups;
  for (const auto& [period, group_size] : sizes_) {
    groups.emplace_back(period,
                        group_size == overall_size ? parent : new_subgroups(group_size, parent).first);
  }
  groups_ = std::move(groups);
  parent_ = parent;
}

std::optional<ProcessGroup> HierarchicalModelAverager::group_of_step(int64_t step) {
  if (step < warmup_steps_) return {};
  for (size_t level = sizes_.size(); level-- > 0;) {
    if (step % sizes_[level].first != 0) continue;
    if (const ProcessGroup parent = current_group(process_group()); parent != parent_) {
      const int size = get_world_size(parent);
      TORCH_CHECK_VALUE(
          size == sizes_.back().second, "HierarchicalModelAverager: the default group has ", size,
          size == 1 ? " rank" : " ranks", " now, and this averager's groups are for ", sizes_.back().second,
          ", as many as there were when it was made; make another averager whose last group size is ", size,
          " and whose other sizes divide that, call its set_step(", step, "), and average by it");
      make_groups(parent);
    }
    return groups_[level].second;
  }
  return {};
}

}  // namespace lockstep
