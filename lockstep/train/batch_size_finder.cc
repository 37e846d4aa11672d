#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/optim/recoverable.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/train/batch_size_finder.h>
#include <lockstep/train/internal/failure_agreement.h>

namespace lockstep {

using train::internal::agree_on_failure;
using train::internal::FailureCause;
using train::internal::kind_of;

namespace train {
namespace {

void check(const BatchSizeFinderOptions& options) {
  const auto positive = [](const char* name, int64_t value) {
    TORCH_CHECK_VALUE(value >= 1, "scale_batch_size: ", name, " is ", value, "; it must be at least 1");
  };
  positive("steps_per_trial", options.steps_per_trial);
  positive("init_val", options.init_val);
  positive("max_trials", options.max_trials);
  TORCH_CHECK_VALUE(options.max_val >= options.init_val, "scale_batch_size: max_val is ", options.max_val,
                    ", below init_val, ", options.init_val);
  TORCH_CHECK_VALUE(options.memory_share > 0 && options.memory_share <= 1,
                    "scale_batch_size: memory_share is ", options.memory_share,
                    "; it must be more than 0 and at most 1");
}

/// A line of /proc/self/status in bytes; 0 if there is none.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

/// The kernel's high-water mark of this process's memory begins anew from now.
void reset_peak() {
  std::ofstream("/proc/self/clear_refs") << '5';
}

bool in_group() {
  return is_initialized() && get_world_size() > 1;
}

int64_t largest(int64_t number) {
  if (!in_group()) return number;
  at::Tensor tensor = at::empty({1}, at::kLong).fill_(number);
  all_reduce(tensor, ReduceOp::MAX);
  return tensor.item<int64_t>();
}

/// Bytes of a host.
struct Demand {
  int64_t needed = 0;  // by its ranks together
  int64_t available = 0;
};

/// Of all hosts the one that is shortest of memory. The same on all ranks.
Demand shortest(const Demand& of_this_rank, double share) {
  if (!in_group()) return of_this_rank;
  const auto host = static_cast<int64_t>(std::hash<std::string>{}(this_host().key()));
  at::Tensor mine = at::empty({3}, at::kLong);
  std::ranges::copy(std::array{host, of_this_rank.needed, of_this_rank.available},
                    mine.mutable_data_ptr<int64_t>());
  at::Tensor all = at::empty({get_world_size(), 3}, at::kLong);
  all_gather_into_tensor(all, mine);
  std::map<int64_t, Demand> hosts;
  const auto* at = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < get_world_size(); ++rank, at += 3) {
    const auto [found, is_new] = hosts.emplace(at[0], Demand{0, at[2]});
    found->second.needed += at[1];
    found->second.available = std::min(found->second.available, at[2]);
  }
  const auto lack = [share](const auto& host) {
    return static_cast<double>(host.second.needed) - share * static_cast<double>(host.second.available);
  };
  return std::ranges::max_element(hosts, {}, lack)->second;
}

double largest(double number) {
  if (!in_group()) return number;
  at::Tensor tensor = at::empty({1}, at::kDouble).fill_(number);
  all_reduce(tensor, ReduceOp::MAX);
  return tensor.item<double>();
}

/// What a trial takes on top of what there was, at most: of the process's memory, or of its device's.
class Peak {
 public:
  explicit Peak(c10::Device device) : device_(device) {
    if (device_.is_cpu()) {
      reset_peak();
      before_ = status_bytes("VmRSS");
    } else {
      reset_peak_device_memory(device_);  // the peak is what is taken now
      before_ = peak_device_memory(device_).value_or(0);
    }
  }

  int64_t bytes() const {
    const int64_t peak = device_.is_cpu() ? status_bytes("VmHWM") : peak_device_memory(device_).value_or(0);
    return std::max<int64_t>(peak - before_, 0);
  }

 private:
  c10::Device device_;
  int64_t before_ = 0;
};

class Finder {
 public:
  Finder(const std::function<void(int64_t)>& step, const std::function<void(const ProcessGroup&)>& move_to,
         c10::Device device, const BatchSizeFinderOptions& options)
      : step_(step), move_to_(move_to), device_(device), options_(options) {}

  BatchSizeReport find() {
    int64_t good = 0, bad = 0;  // the largest that fits, the smallest that does not (0: none known)
    for (int64_t size = options_.init_val; trials_left();) {
      (fits(size) ? good : bad) = size;
      if (bad != 0 || size == options_.max_val) break;
      size = std::min(2 * size, options_.max_val);
    }
    if (options_.mode == BatchSizeFinderOptions::Mode::binsearch && good != 0 && bad != 0) {
      while (bad - good > 1 && trials_left()) {
        const int64_t middle = std::midpoint(good, bad);
        (fits(middle) ? good : bad) = middle;
      }
    }
    report_.batch_size = good;
    return std::move(report_);
  }

 private:
  bool trials_left() const { return static_cast<int64_t>(report_.trials.size()) < options_.max_trials; }

  /// The same answer on all ranks.
  bool fits(int64_t size) {
    BatchSizeTrial trial{.batch_size = size};
    const auto limits = read_memory_limits();
    const auto [needed, available] = shortest(
        {predicted(size), std::min<int64_t>(limits.available, limits.cgroup_left)}, options_.memory_share);
    const auto allowed = static_cast<int64_t>(options_.memory_share * static_cast<double>(available));
    if (needed > allowed) {
      trial.reason = "it would take about " + format_bytes(needed) + " of the " + format_bytes(available) +
                     " that are available, more than memory_share of them";
    } else {
      measure(size, trial);
    }
    report_.trials.push_back(trial);
    return trial.fits;
  }

  /// Bytes on this rank, by a straight line through the last two sizes that fitted.
  int64_t predicted(int64_t size) const {
    if (own_.empty() || !device_.is_cpu()) return 0;
    const auto& [last_size, last_bytes] = own_.back();
    const auto& [before_size, before_bytes] =
        own_.size() > 1 ? own_[own_.size() - 2] : std::pair<int64_t, int64_t>{};
    const double slope = static_cast<double>(std::max<int64_t>(last_bytes - before_bytes, 0)) /
                         static_cast<double>(std::max<int64_t>(last_size - before_size, 1));
    return last_bytes + static_cast<int64_t>(slope * static_cast<double>(size - last_size));
  }

  void measure(int64_t size, BatchSizeTrial& trial) {
    const Peak peak(device_);
    std::exception_ptr failure;
    double seconds = 0;
    try {
      step_(size);  // warms up
      synchronize(device_);
      const auto begin = std::chrono::steady_clock::now();
      for (int64_t i = 0; i < options_.steps_per_trial; ++i) step_(size);
      synchronize(device_);
      seconds = largest(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure) {
      trial.reason = agree_on_out_of_memory(failure, size);
      return;
    }
    const int64_t bytes = peak.bytes();
    own_.emplace_back(size, bytes);
    std::sort(own_.begin(), own_.end());
    const int ranks = in_group() ? get_world_size() : 1;
    trial.fits = true;
    trial.bytes = largest(bytes);
    trial.samples_per_second = static_cast<double>(ranks * size * options_.steps_per_trial) / seconds;
  }

  /// Who ran out of memory. Throws what else went wrong.
  std::string agree_on_out_of_memory(const std::exception_ptr& failure, int64_t size) {
    const auto agreement =
        agree_on_failure({.kind = kind_of(failure), .text = text_of(failure), .largest_micro_batch = size},
                         std::chrono::minutes(1));
    std::string reason;
    for (size_t i = 0; i < agreement.reports.size(); ++i) {
      const auto& report = agreement.reports[i];
      if (report.kind == FailureCause::kOther) std::rethrow_exception(failure);
      if (report.kind != FailureCause::kOutOfMemory || !reason.empty()) continue;
      reason = "rank " + std::to_string(agreement.former_ranks[i]) + " ran out of memory";
    }
    if (agreement.any_rank_died || reason.empty()) std::rethrow_exception(failure);
    if (agreement.group) move_to_(agreement.group);
    return reason;
  }

  const std::function<void(int64_t)>& step_;
  const std::function<void(const ProcessGroup&)>& move_to_;
  const c10::Device device_;
  const BatchSizeFinderOptions& options_;
  std::vector<std::pair<int64_t, int64_t>> own_;  // sizes that fitted, and this rank's bytes
  BatchSizeReport report_;
};

}  // namespace

TrialState::TrialState(std::vector<NamedTensor> tensors, torch::optim::Optimizer& optimizer)
    : optimizer_(optimizer) {
  TORCH_CHECK_VALUE(
      dynamic_cast<ZeroRedundancyOptimizer*>(&optimizer) == nullptr,
      "scale_batch_size: the optimizer is sharded, and its process group would be gone after a trial "
      "that failed; find the batch size with a plain optimizer");
  optimizer_state_ = Recoverable(optimizer).save();
  at::NoGradGuard no_grad;
  // In the host's memory: a device's is what the trials try.
  for (const auto& [name, tensor] : tensors) {
    tensors_.emplace_back(tensor, tensor.detach().to(at::kCPU, tensor.scalar_type(), /*non_blocking=*/false,
                                                     /*copy=*/true));
  }
  random_.take(accelerator_generators());
}

void TrialState::restore() {
  at::NoGradGuard no_grad;
  for (auto& [tensor, values] : tensors_) tensor.copy_(values);
  optimizer_.zero_grad();
  optimizer_.state().clear();  // what load() does not, of parameters that had none
  Recoverable(optimizer_).load(optimizer_state_);
  random_.restore();
}

std::vector<int64_t> RoundRobin::indices() {
  std::vector<int64_t> indices(static_cast<size_t>(count_));
  for (int64_t i = 0; i < count_; ++i) indices[static_cast<size_t>(i)] = i % size_;
  return indices;
}

BatchSizeReport find_batch_size(const std::function<void(int64_t batch_size)>& step,
                                const std::function<void(const ProcessGroup&)>& move_to, c10::Device device,
                                const BatchSizeFinderOptions& options, TrialState& state) {
  check(options);
  BatchSizeReport report;
  try {
    report = Finder(step, move_to, device, options).find();
  } catch (...) {
    try {
      state.restore();
    } catch (const std::exception&) {
      LOCKSTEP_LOG(kError) << "scale_batch_size: model and optimizer are not as they were before: "
                           << text_of(std::current_exception());
    }
    throw;
  }
  state.restore();
  return report;
}

}  // namespace train

std::string BatchSizeReport::table() const {
  std::string text = "batch size    samples/s    memory\n";
  for (const auto& trial : trials) {
    text += formatted("%10lld", static_cast<long long>(trial.batch_size));
    if (trial.fits) {
      text += formatted(" %12.0f    %s\n", trial.samples_per_second, format_bytes(trial.bytes).c_str());
    } else {
      text += "            -    " + trial.reason + "\n";
    }
  }
  return text;
}

}  // namespace lockstep
