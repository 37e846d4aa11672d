#include <cmath>
#include <limits>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/device/device.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/gradient_list.h>

namespace lockstep {
namespace {

using Tensors = std::vector<at::Tensor>;

/// torch/utils/_foreach_utils.py, _device_has_foreach_support.
bool has_foreach(const at::Device& device) {
  return device.is_cpu() || device.is_cuda() || device.is_xpu() || device.type() == at::kMTIA ||
         device.is_privateuseone();
}

bool use_foreach(const at::Device& device, std::optional<bool> foreach) {
  TORCH_CHECK(!foreach.value_or(false) || has_foreach(device),
              "foreach=True was passed, but can't use the foreach API on ", device.type(), " tensors");
  return foreach.value_or(has_foreach(device));
}

/// The values whose norm is a gradient's.
at::Tensor values_of(const at::Tensor& gradient) {
  // A sparse gradient may list an index several times: it stands for the sum.
  return gradient.is_sparse() ? gradient.coalesce().values() : gradient;
}

Tensors norms_of_each(const Tensors& tensors, double norm_type, std::optional<bool> foreach) {
  Tensors values;
  for (const at::Tensor& tensor : tensors) values.push_back(values_of(tensor));
  Tensors norms;
  for (const auto& [key, members] : group_by_device_and_dtype(values)) {
    const bool half = members[0].scalar_type() == at::kHalf || members[0].scalar_type() == at::kBFloat16;
    const auto type = half ? std::optional<at::ScalarType>(at::kFloat) : std::nullopt;
    if (use_foreach(members[0].device(), foreach)) {
      for (auto& norm : at::_foreach_norm(members, norm_type, type)) norms.push_back(std::move(norm));
    } else {
      for (const at::Tensor& tensor : members) {
        norms.push_back(at::linalg_vector_norm(tensor, norm_type, std::nullopt, /*keepdim=*/false, type));
      }
    }
  }
  return norms;
}

/// The norm of the whole from those of its parts: itself a norm, but for 0, where parts are counted.
at::Tensor norm_of_norms(const at::Tensor& norms, double norm_type) {
  return norm_type == 0 ? norms.sum() : at::linalg_vector_norm(norms, norm_type);
}

/// Where this rank gathers from, so that all meet in one backend. NCCL takes devices' tensors alone: in a group that has it, a
/// rank without gradients, or with ones on the CPU, gathers from the device that it was given, too. Ranks that were given none
/// train on the CPU, and gather there. Lockstep takes all.
c10::Device place_of_gathering(const ProcessGroup& group, c10::Device own) {
  if (!own.is_cpu()) return own;
  const auto on_cpu = group->getBackend(c10::kCPU);
  for (const c10::Device device : group->getDeviceTypes()) {
    if (group->getBackend(device.type()) == on_cpu) continue;
    if (const auto bound = group->getBoundDeviceId()) return *bound;
    return chosen_device().value_or(own);
  }
  return own;
}

/// Gathering the norms and not summing their powers: no power overflows, and one way serves for all norms.
at::Tensor over_ranks(const at::Tensor& mine, double norm_type, const ProcessGroup& process_group) {
  TORCH_CHECK_VALUE(is_member(process_group),
                    "this rank is not a member of the group that the gradients are "
                    "sharded over; leave the call to its members");
  const ProcessGroup group = process_group ? process_group : default_group();
  at::Tensor input = mine.to(place_of_gathering(group, mine.device()), at::kDouble).view({1});
  at::Tensor all = at::empty({group->getSize()}, input.options());
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  const CallSite site("the norm of gradients");
  group->getBackend(input.device().type())->_allgather_base(all, input, options)->wait();
  return norm_of_norms(all, norm_type).to(mine.options());
}

}  // namespace

at::Tensor get_total_norm(Tensors tensors, double norm_type, bool error_if_nonfinite,
                          std::optional<bool> foreach, const std::optional<ProcessGroup>& sharded_over) {
  at::NoGradGuard no_grad;
  const c10::Device device = tensors.empty() ? at::kCPU : tensors[0].device();
  // An empty piece adds nothing, but has no norm of its own: torch throws for the infinite and negative ones.
  if (sharded_over) std::erase_if(tensors, [](const at::Tensor& tensor) { return tensor.numel() == 0; });
  at::Tensor total;
  if (tensors.empty()) {
    // Nothing adds nothing: for negative norms, of which −infinity is the minimum, that is infinity.
    const bool others = sharded_over && norm_type < 0;
    total = at::full({}, others ? std::numeric_limits<double>::infinity() : 0.0,
                     at::TensorOptions(at::kFloat).device(device));
  } else {
    Tensors norms = norms_of_each(tensors, norm_type, foreach);
    for (at::Tensor& norm : norms) norm = norm.to(tensors[0].device());
    if (norm_type == 0) {
      for (at::Tensor& norm : norms) norm = norm.ne(0).to(norm.scalar_type());
    }
    total = norm_of_norms(at::stack(norms), norm_type);
  }
  if (sharded_over) total = over_ranks(total, norm_type, *sharded_over);
  TORCH_CHECK(
      !error_if_nonfinite || at::isfinite(total).item<bool>(), "The total norm of order ", norm_type,
      " for gradients from `parameters` is non-finite, so it cannot be clipped. To disable this error "
      "and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=false`");
  return total;
}

void clip_grads_with_norm_(const Tensors& parameters, double max_norm, const at::Tensor& total_norm,
                           std::optional<bool> foreach) {
  at::NoGradGuard no_grad;
  const Tensors gradients = gradients_of(parameters);
  if (gradients.empty()) return;
  Tensors values;
  for (const at::Tensor& gradient : gradients) {
    // Scaling is linear, so a sparse gradient needs no coalescing for it.
    values.push_back(gradient.is_sparse() ? gradient._values() : gradient);
  }
  const at::Tensor factor = (max_norm / (total_norm + 1e-6)).clamp_max(1.0);
  for (auto& [key, members] : group_by_device_and_dtype(values)) {
    const at::Tensor here = factor.to(members[0].device());
    if (use_foreach(members[0].device(), foreach)) {
      at::_foreach_mul_(members, here);
    } else {
      for (at::Tensor& gradient : members) gradient.mul_(here);
    }
  }
}

at::Tensor clip_grad_norm_(const Tensors& parameters, double max_norm, double norm_type,
                           bool error_if_nonfinite, std::optional<bool> foreach,
                           const std::optional<ProcessGroup>& sharded_over) {
  const at::Tensor total =
      get_total_norm(gradients_of(parameters), norm_type, error_if_nonfinite, foreach, sharded_over);
  clip_grads_with_norm_(parameters, max_norm, total, foreach);
  return total;
}

void clip_grad_value_(const Tensors& parameters, double clip_value, std::optional<bool> foreach) {
  at::NoGradGuard no_grad;
  const Tensors gradients = gradients_of(parameters);
  for (const at::Tensor& gradient : gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !gradient.is_sparse(), "clip_grad_value_: a gradient of the sizes ", gradient.sizes(),
        " is sparse, and torch can't clamp those; clip by clip_grad_norm_(), or make the gradient dense");
  }
  for (auto& [key, members] : group_by_device_and_dtype(gradients)) {
    if (use_foreach(members[0].device(), foreach)) {
      at::_foreach_clamp_min_(members, -clip_value);
      at::_foreach_clamp_max_(members, clip_value);
    } else {
      for (at::Tensor& gradient : members) gradient.clamp_(-clip_value, clip_value);
    }
  }
}

}  // namespace lockstep
