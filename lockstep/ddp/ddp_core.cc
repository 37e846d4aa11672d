#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <lockstep/ddp/ddp_core.h>
#include <lockstep/ddp/reducer.h>
#include <lockstep/ddp/state_sync.h>

namespace lockstep {
namespace {

/// The parameters that are to be reduced: each once, though it may be registered under several names.
std::vector<NamedTensor> reduced_parameters(const std::vector<NamedTensor>& parameters) {
  std::vector<NamedTensor> reduced;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) reduced.emplace_back(name, parameter);
  }
  return reduced;
}

void check_options(const DistributedDataParallelOptions& options) {
  TORCH_CHECK_VALUE(options.bucket_cap_mb > 0, "bucket_cap_mb is ", options.bucket_cap_mb,
                    "; it must be more than 0");
  TORCH_CHECK_VALUE(options.first_bucket_cap_mb > 0, "first_bucket_cap_mb is ", options.first_bucket_cap_mb,
                    "; it must be more than 0");
}

}  // namespace

DdpCore::DdpCore(std::vector<NamedTensor> parameters, Buffers buffers, DistributedDataParallelOptions options)
    : buffers_(std::move(buffers)), options_(std::move(options)) {
  check_options(options_);
  if (!options_.process_group) options_.process_group = default_group();
  TORCH_CHECK_VALUE(is_member(options_.process_group),
                    "DistributedDataParallel: this rank is not in the process group");
  const auto reduced = reduced_parameters(parameters);
  TORCH_CHECK(!reduced.empty(),
              "DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
              "a gradient.");
  for (const auto& [name, parameter] : parameters) {
    TORCH_CHECK_VALUE(!parameter.defined() || parameter.device().is_cpu(), "parameter '", name, "' is on ",
                      parameter.device(), "; DistributedDataParallel supports CPU modules for now");
    TORCH_CHECK_VALUE(!parameter.defined() || parameter.layout() == c10::kStrided, "parameter '", name,
                      "' is sparse; sparse parameters can't be synchronised");
  }
  if (options_.init_sync) {
    verify_same_model(reduced, options_.process_group);
    std::vector<NamedTensor> state;
    for (const auto& tensor : parameters) {
      if (tensor.second.defined()) state.push_back(tensor);
    }
    for (auto& buffer : buffers_()) {
      if (buffer.second.defined()) state.push_back(std::move(buffer));
    }
    broadcast_coalesced(state, options_.process_group);
  }
  reducer_ = Reducer::create(reduced, options_);
}

void DdpCore::before_forward() {
  if (at::GradMode::is_enabled() && synchronise_) reducer_->prepare_forward();
  if (options_.broadcast_buffers && buffers_may_differ_) {
    std::vector<NamedTensor> defined;
    for (auto& buffer : buffers_()) {
      if (buffer.second.defined()) defined.push_back(std::move(buffer));
    }
    broadcast_coalesced(defined, options_.process_group);
  }
}

void DdpCore::after_forward() {
  // As torch does: after a forward that no synchronised backward follows, buffers are not broadcast before
  // the next.
  buffers_may_differ_ = at::GradMode::is_enabled() && synchronise_;
  if (at::GradMode::is_enabled()) reducer_->expect_backward(synchronise_);
}

}  // namespace lockstep
