#include <tuple>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/optim/internal/momentum_access.h>

namespace lockstep::internal {
namespace {

using torch::optim::OptimizerOptions;

template <class T>
bool set_momentum_of(OptimizerOptions& options, double momentum) {
  auto* typed = dynamic_cast<T*>(&options);
  if (typed) typed->momentum(momentum);
  return typed != nullptr;
}

template <class T>
bool set_beta1_of(OptimizerOptions& options, double beta1) {
  auto* typed = dynamic_cast<T*>(&options);
  if (typed) typed->betas({beta1, std::get<1>(typed->betas())});
  return typed != nullptr;
}

template <class... T>
bool is_one_of(const OptimizerOptions& options) {
  return (... || (dynamic_cast<const T*>(&options) != nullptr));
}

}  // namespace

MomentumKind momentum_kind(const OptimizerOptions& options) {
  using namespace torch::optim;
  if (is_one_of<SGDOptions, RMSpropOptions>(options)) return MomentumKind::kMomentum;
  if (is_one_of<AdamOptions, AdamWOptions>(options)) return MomentumKind::kBeta1;
  return MomentumKind::kNone;
}

void set_momentum(OptimizerOptions& options, double momentum) {
  using namespace torch::optim;
  const bool known =
      set_momentum_of<SGDOptions>(options, momentum) || set_momentum_of<RMSpropOptions>(options, momentum) ||
      set_beta1_of<AdamOptions>(options, momentum) || set_beta1_of<AdamWOptions>(options, momentum);
  TORCH_INTERNAL_ASSERT(known, "these optimizer options have no momentum");
}

}  // namespace lockstep::internal
