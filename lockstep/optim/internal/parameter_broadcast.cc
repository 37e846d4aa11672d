#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <lockstep/optim/internal/parameter_broadcast.h>

namespace lockstep::internal {
namespace {

/// A parcel's size; parameters of this size and more travel alone. Below it, an operation costs more than
/// copying.
constexpr size_t kParcelBytes = 1 << 20;

/// Copies each parameter into its part of the parcel (`pack`), or out of it.
void copy(const std::vector<at::Tensor>& parameters, const at::Tensor& flat, bool pack) {
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor part = flat.narrow(0, offset, parameter.numel()).view(parameter.sizes());
    pack ? part.copy_(parameter) : parameter.copy_(part);
    offset += parameter.numel();
  }
}

}  // namespace

void ParameterBroadcast::start(int owner, const std::vector<at::Tensor>& parameters) {
  Parcel parcel{.flat = {}, .parameters = {}, .owner = owner, .work = {}};
  size_t bytes = 0;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.numel() == 0) continue;
    if (parameter.nbytes() >= kParcelBytes) {
      send({.flat = {}, .parameters = {parameter.detach()}, .owner = owner, .work = {}});
      continue;
    }
    if (bytes + parameter.nbytes() > kParcelBytes) {
      send(std::exchange(parcel, {.flat = {}, .parameters = {}, .owner = owner, .work = {}}));
      bytes = 0;
    }
    parcel.parameters.push_back(parameter.detach());
    bytes += parameter.nbytes();
  }
  if (!parcel.parameters.empty()) send(std::move(parcel));
}

void ParameterBroadcast::send(Parcel parcel) {
  at::NoGradGuard no_grad;
  if (parcel.parameters.size() > 1) {
    int64_t numel = 0;
    for (const at::Tensor& parameter : parcel.parameters) numel += parameter.numel();
    parcel.flat = at::empty({numel}, parcel.parameters.front().options());
    if (parcel.owner == group_->getRank()) copy(parcel.parameters, parcel.flat, /*pack=*/true);
  }
  const at::Tensor& tensor = parcel.flat.defined() ? parcel.flat : parcel.parameters.front();
  parcel.work = broadcast(tensor, get_global_rank(group_, parcel.owner), group_, /*async_op=*/true);
  under_way_.push_back(std::move(parcel));
}

void ParameterBroadcast::finish() {
  at::NoGradGuard no_grad;
  std::exception_ptr error;
  for (const Parcel& parcel : under_way_) {
    try {
      parcel.work->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  const auto arrived = std::exchange(under_way_, {});
  if (error) std::rethrow_exception(error);
  for (const Parcel& parcel : arrived) {
    if (parcel.owner == group_->getRank()) continue;
    if (parcel.flat.defined()) {
      copy(parcel.parameters, parcel.flat, /*pack=*/false);
    } else {
      // Written behind autograd's back; graphs that saved the old value must notice.
      parcel.parameters.front().unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace lockstep::internal
