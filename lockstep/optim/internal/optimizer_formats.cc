#include <array>
#include <deque>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/optim/internal/optimizer_formats.h>

// Keys and their order are those of `defaults` and `state` in torch/optim/*.py.
namespace lockstep::internal {
namespace {

using namespace optimizer_format;
using c10::IValue;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

/// The options that Python's classes have and LibTorch's have not, at Python's defaults: those that mean the
/// same arithmetic in another way, and those that mean another.
void add_foreign_options(StateDict& options, std::initializer_list<const char*> none,
                         std::initializer_list<const char*> off) {
  for (const char* key : none) options[key] = IValue();
  for (const char* key : off) options[key] = false;
}

/// An option that Python's older versions may lack; then 0.
double number_or_zero(const StateDict& from, const std::string& key) {
  return has(from, key) ? number_at(from, key) : 0;
}

/// The dynamic type's members; formats are found by the optimizer's type, so it is the right one.
template <class T, class Base>
auto& as(Base& object) {
  using Wanted = std::conditional_t<std::is_const_v<Base>, const T, T>;
  auto* typed = dynamic_cast<Wanted*>(&object);
  TORCH_CHECK_VALUE(typed, "options or state are of another type than the optimizer's");
  return *typed;
}

void put(StateDict& state, const char* key, const at::Tensor& tensor) {
  if (tensor.defined()) state[key] = tensor.detach();
}

class SgdFormat final : public OptimizerFormat {
 public:
  std::string optimizer_name() const override { return "SGD"; }

  StateDict get_options(const OptimizerOptions& options) const override {
    const auto& sgd = as<torch::optim::SGDOptions>(options);
    StateDict answer{{"lr", sgd.lr()},
                     {"momentum", sgd.momentum()},
                     {"dampening", sgd.dampening()},
                     {"weight_decay", sgd.weight_decay()},
                     {"nesterov", sgd.nesterov()}};
    add_foreign_options(answer, {"foreach", "fused"}, {"maximize", "differentiable"});
    return answer;
  }

  void set_options(const StateDict& from, OptimizerOptions& options) const override {
    for (const char* key : {"maximize", "differentiable"}) refuse_true(from, key, "SGD");
    const double lr = number_at(from, "lr"), momentum = number_at(from, "momentum");
    const double dampening = number_at(from, "dampening"), decay = number_at(from, "weight_decay");
    const bool nesterov = number_or_zero(from, "nesterov") != 0;
    as<torch::optim::SGDOptions>(options)
        .lr(lr)
        .momentum(momentum)
        .dampening(dampening)
        .weight_decay(decay)
        .nesterov(nesterov);
  }

  StateDict get_state(const OptimizerParamState& state) const override {
    StateDict answer;
    put(answer, "momentum_buffer", as<torch::optim::SGDParamState>(state).momentum_buffer());
    return answer;
  }

  std::unique_ptr<OptimizerParamState> make_state(const StateDict& from, const at::Tensor& parameter,
                                                  const OptimizerOptions& /*unused*/) const override {
    at::Tensor buffer = optional_tensor_like(parameter, from, "momentum_buffer");
    if (!buffer.defined()) return nullptr;  // as before the first step
    auto state = std::make_unique<torch::optim::SGDParamState>();
    state->momentum_buffer(std::move(buffer));
    return state;
  }
};

/// Adam and AdamW: in Python one class, which `decoupled_weight_decay` tells apart.
template <class Options, class State, bool kDecoupled>
class AdamFormat final : public OptimizerFormat {
 public:
  std::string optimizer_name() const override { return kDecoupled ? "AdamW" : "Adam"; }

  StateDict get_options(const OptimizerOptions& options) const override {
    const auto& adam = as<Options>(options);
    StateDict answer{{"lr", adam.lr()},           {"betas", to_object(adam.betas())},
                     {"eps", adam.eps()},         {"weight_decay", adam.weight_decay()},
                     {"amsgrad", adam.amsgrad()}, {"decoupled_weight_decay", kDecoupled}};
    add_foreign_options(answer, {"foreach", "fused"}, {"maximize", "capturable", "differentiable"});
    return answer;
  }

  void set_options(const StateDict& from, OptimizerOptions& options) const override {
    for (const char* key : {"maximize", "differentiable"}) refuse_true(from, key, optimizer_name());
    if (has(from, "decoupled_weight_decay")) {
      const bool decoupled = number_at(from, "decoupled_weight_decay") != 0;
      TORCH_CHECK_VALUE(decoupled == kDecoupled, "'decoupled_weight_decay' is ", decoupled ? "true" : "false",
                        ": make it a torch::optim::", decoupled ? "AdamW" : "Adam");
    }
    const double lr = number_at(from, "lr"), eps = number_at(from, "eps");
    const double decay = number_at(from, "weight_decay");
    const auto betas = betas_at(from);
    const bool amsgrad = number_or_zero(from, "amsgrad") != 0;
    as<Options>(options).lr(lr).betas(betas).eps(eps).weight_decay(decay).amsgrad(amsgrad);
  }

  StateDict get_state(const OptimizerParamState& state) const override {
    const auto& adam = as<State>(state);
    StateDict answer{{"step", step_tensor(adam.step())}};
    put(answer, "exp_avg", adam.exp_avg());
    put(answer, "exp_avg_sq", adam.exp_avg_sq());
    put(answer, "max_exp_avg_sq", adam.max_exp_avg_sq());
    return answer;
  }

  std::unique_ptr<OptimizerParamState> make_state(const StateDict& from, const at::Tensor& parameter,
                                                  const OptimizerOptions& options) const override {
    if (from.empty()) return nullptr;
    auto state = std::make_unique<State>();
    state->step(step_at(from));
    state->exp_avg(tensor_like(parameter, from, "exp_avg"));
    state->exp_avg_sq(tensor_like(parameter, from, "exp_avg_sq"));
    const bool needed = as<Options>(options).amsgrad();
    state->max_exp_avg_sq(needed ? tensor_like(parameter, from, "max_exp_avg_sq")
                                 : optional_tensor_like(parameter, from, "max_exp_avg_sq"));
    return state;
  }

 private:
  static std::tuple<double, double> betas_at(const StateDict& from) {
    const auto found = from.find("betas");
    TORCH_CHECK_VALUE(found != from.end(), "there is no 'betas'");
    const auto parts = from_object<std::array<IValue, 2>>(found->second);  // numbers or tensors
    const StateDict named{{"betas[0]", parts[0]}, {"betas[1]", parts[1]}};
    return {number_at(named, "betas[0]"), number_at(named, "betas[1]")};
  }
};

class RmspropFormat final : public OptimizerFormat {
 public:
  std::string optimizer_name() const override { return "RMSprop"; }

  StateDict get_options(const OptimizerOptions& options) const override {
    const auto& rmsprop = as<torch::optim::RMSpropOptions>(options);
    StateDict answer{
        {"lr", rmsprop.lr()},   {"momentum", rmsprop.momentum()}, {"alpha", rmsprop.alpha()},
        {"eps", rmsprop.eps()}, {"centered", rmsprop.centered()}, {"weight_decay", rmsprop.weight_decay()}};
    add_foreign_options(answer, {"foreach"}, {"maximize", "capturable", "differentiable"});
    return answer;
  }

  void set_options(const StateDict& from, OptimizerOptions& options) const override {
    for (const char* key : {"maximize", "differentiable"}) refuse_true(from, key, "RMSprop");
    const double lr = number_at(from, "lr"), alpha = number_at(from, "alpha"), eps = number_at(from, "eps");
    const double decay = number_at(from, "weight_decay"), momentum = number_or_zero(from, "momentum");
    const bool centered = number_or_zero(from, "centered") != 0;
    as<torch::optim::RMSpropOptions>(options)
        .lr(lr)
        .alpha(alpha)
        .eps(eps)
        .weight_decay(decay)
        .momentum(momentum)
        .centered(centered);
  }

  StateDict get_state(const OptimizerParamState& state) const override {
    const auto& rmsprop = as<torch::optim::RMSpropParamState>(state);
    StateDict answer{{"step", step_tensor(rmsprop.step())}};
    put(answer, "square_avg", rmsprop.square_avg());
    put(answer, "momentum_buffer", rmsprop.momentum_buffer());
    put(answer, "grad_avg", rmsprop.grad_avg());
    return answer;
  }

  std::unique_ptr<OptimizerParamState> make_state(const StateDict& from, const at::Tensor& parameter,
                                                  const OptimizerOptions& options) const override {
    if (from.empty()) return nullptr;
    const auto& rmsprop = as<torch::optim::RMSpropOptions>(options);
    const auto tensor = [&](const char* key, bool needed) {
      return needed ? tensor_like(parameter, from, key) : optional_tensor_like(parameter, from, key);
    };
    auto state = std::make_unique<torch::optim::RMSpropParamState>();
    state->step(step_at(from));
    state->square_avg(tensor("square_avg", true));
    state->momentum_buffer(tensor("momentum_buffer", rmsprop.momentum() > 0));
    state->grad_avg(tensor("grad_avg", rmsprop.centered()));
    return state;
  }
};

class AdagradFormat final : public OptimizerFormat {
 public:
  std::string optimizer_name() const override { return "Adagrad"; }

  StateDict get_options(const OptimizerOptions& options) const override {
    const auto& adagrad = as<torch::optim::AdagradOptions>(options);
    StateDict answer{{"lr", adagrad.lr()},
                     {"lr_decay", adagrad.lr_decay()},
                     {"eps", adagrad.eps()},
                     {"weight_decay", adagrad.weight_decay()},
                     {"initial_accumulator_value", adagrad.initial_accumulator_value()}};
    add_foreign_options(answer, {"foreach", "fused"}, {"maximize", "differentiable"});
    return answer;
  }

  void set_options(const StateDict& from, OptimizerOptions& options) const override {
    for (const char* key : {"maximize", "differentiable"}) refuse_true(from, key, "Adagrad");
    const double lr = number_at(from, "lr"), lr_decay = number_at(from, "lr_decay");
    const double eps = number_at(from, "eps"), decay = number_at(from, "weight_decay");
    const double initial = number_or_zero(from, "initial_accumulator_value");
    as<torch::optim::AdagradOptions>(options)
        .lr(lr)
        .lr_decay(lr_decay)
        .eps(eps)
        .weight_decay(decay)
        .initial_accumulator_value(initial);
  }

  StateDict get_state(const OptimizerParamState& state) const override {
    const auto& adagrad = as<torch::optim::AdagradParamState>(state);
    StateDict answer{{"step", step_tensor(adagrad.step())}};
    put(answer, "sum", adagrad.sum());
    return answer;
  }

  std::unique_ptr<OptimizerParamState> make_state(const StateDict& from, const at::Tensor& parameter,
                                                  const OptimizerOptions& /*unused*/) const override {
    auto state = std::make_unique<torch::optim::AdagradParamState>();
    state->step(step_at(from));
    state->sum(tensor_like(parameter, from, "sum"));
    return state;
  }
};

/// Its state is one for all parameters, flat, and is the first one's.
class LbfgsFormat final : public OptimizerFormat {
 public:
  std::string optimizer_name() const override { return "LBFGS"; }
  bool has_state_per_parameter() const override { return false; }

  StateDict get_options(const OptimizerOptions& options) const override {
    const auto& lbfgs = as<torch::optim::LBFGSOptions>(options);
    return {{"lr", lbfgs.lr()},
            {"max_iter", lbfgs.max_iter()},
            {"max_eval", to_object(lbfgs.max_eval())},
            {"tolerance_grad", lbfgs.tolerance_grad()},
            {"tolerance_change", lbfgs.tolerance_change()},
            {"history_size", lbfgs.history_size()},
            {"line_search_fn", to_object(lbfgs.line_search_fn())}};
  }

  void set_options(const StateDict& from, OptimizerOptions& options) const override {
    const double lr = number_at(from, "lr"), grad = number_at(from, "tolerance_grad");
    const double change = number_at(from, "tolerance_change");
    const int64_t max_iter = step_at(from, "max_iter"), history = step_at(from, "history_size");
    std::optional<int64_t> max_eval;
    if (has(from, "max_eval")) max_eval = step_at(from, "max_eval");
    std::optional<std::string> line_search;
    if (has(from, "line_search_fn")) line_search = from_object<std::string>(from.at("line_search_fn"));
    TORCH_CHECK_VALUE(!line_search || line_search == "strong_wolfe",
                      "only 'strong_wolfe' is supported as line_search_fn, and not '",
                      line_search.value_or(""), "'");
    as<torch::optim::LBFGSOptions>(options)
        .lr(lr)
        .max_iter(max_iter)
        .max_eval(max_eval)
        .tolerance_grad(grad)
        .tolerance_change(change)
        .history_size(history)
        .line_search_fn(line_search);
  }

  StateDict get_state(const OptimizerParamState& state) const override {
    const auto& lbfgs = as<torch::optim::LBFGSParamState>(state);
    StateDict answer{{"func_evals", lbfgs.func_evals()}, {"n_iter", lbfgs.n_iter()}};
    if (!lbfgs.d().defined()) return answer;  // before the first step
    put(answer, "d", lbfgs.d());
    put(answer, "H_diag", lbfgs.H_diag());
    put(answer, "prev_flat_grad", lbfgs.prev_flat_grad());
    answer["t"] = lbfgs.t();
    answer["prev_loss"] = lbfgs.prev_loss();
    answer["old_dirs"] = list_of(lbfgs.old_dirs());
    answer["old_stps"] = list_of(lbfgs.old_stps());
    answer["ro"] = list_of(lbfgs.ro());
    if (lbfgs.al()) answer["al"] = list_of(*lbfgs.al());
    return answer;
  }

  std::unique_ptr<OptimizerParamState> make_state(const StateDict& from, const at::Tensor& parameter,
                                                  const OptimizerOptions& options) const override {
    auto state = std::make_unique<torch::optim::LBFGSParamState>();
    state->func_evals(step_at(from, "func_evals"));
    state->n_iter(step_at(from, "n_iter"));
    if (!has(from, "d")) return state;
    state->d(flat(from, "d", parameter));
    state->prev_flat_grad(flat(from, "prev_flat_grad", parameter));
    // Python begins with the number 1.
    state->H_diag(at::scalar_tensor(number_at(from, "H_diag"), parameter.options().requires_grad(false)));
    if (from.at("H_diag").isTensor()) state->H_diag(copy_for(parameter, from.at("H_diag").toTensor()));
    state->t(number_at(from, "t"));
    state->prev_loss(number_at(from, "prev_loss"));
    state->old_dirs(tensors_at<std::deque<at::Tensor>>(from, "old_dirs", parameter));
    state->old_stps(tensors_at<std::deque<at::Tensor>>(from, "old_stps", parameter));
    state->ro(tensors_at<std::deque<at::Tensor>>(from, "ro", parameter));
    const size_t history = state->ro().size();
    TORCH_CHECK_VALUE(state->old_dirs().size() == history && state->old_stps().size() == history,
                      "'old_dirs', 'old_stps' and 'ro' have other lengths");
    if (has(from, "al")) {
      auto al = tensors_at<std::vector<at::Tensor>>(from, "al", parameter);
      const auto size = static_cast<size_t>(as<torch::optim::LBFGSOptions>(options).history_size());
      TORCH_CHECK_VALUE(al.size() == size && history <= size, "'al' has ", al.size(),
                        " elements, the history ", size);
      state->al(std::move(al));
    }
    return state;
  }

 private:
  template <class Tensors>
  static IValue list_of(const Tensors& tensors) {
    std::vector<IValue> values;
    for (const at::Tensor& tensor : tensors) {
      values.push_back(tensor.defined() ? IValue(tensor.detach()) : IValue());
    }
    return to_object(values);
  }

  template <class Tensors>
  static Tensors tensors_at(const StateDict& from, const std::string& key, const at::Tensor& parameter) {
    const auto found = from.find(key);
    TORCH_CHECK_VALUE(found != from.end(), "there is no '", key, "'");
    Tensors tensors;
    for (const IValue& value : from_object<std::vector<IValue>>(found->second)) {
      tensors.push_back(value.isNone() ? at::Tensor()
                                       : copy_of(key, parameter, from_object<at::Tensor>(value)));
    }
    return tensors;
  }

  static at::Tensor flat(const StateDict& from, const std::string& key, const at::Tensor& parameter) {
    TORCH_CHECK_VALUE(has(from, key), "there is no '", key, "'");
    const at::Tensor value = from_object<at::Tensor>(from.at(key));
    TORCH_CHECK_VALUE(value.dim() == 1, "'", key, "' has sizes ", value.sizes(), ", and is to be flat");
    return copy_of(key, parameter, value);
  }

  /// A file may claim sizes that a copy could not have: nothing here is compared with the parameters'.
  static at::Tensor copy_of(const std::string& key, const at::Tensor& parameter, const at::Tensor& value) {
    TORCH_CHECK_VALUE(value.defined() && value.nbytes() <= value.storage().nbytes(), "'", key,
                      "' is larger than its memory");
    return copy_for(parameter, value);
  }
};

}  // namespace

const OptimizerFormat& format_of(const torch::optim::Optimizer& optimizer) {
  namespace optim = torch::optim;
  static const SgdFormat sgd;
  static const AdamFormat<optim::AdamOptions, optim::AdamParamState, false> adam;
  static const AdamFormat<optim::AdamWOptions, optim::AdamWParamState, true> adamw;
  static const RmspropFormat rmsprop;
  static const AdagradFormat adagrad;
  static const LbfgsFormat lbfgs;
  if (const auto* own = dynamic_cast<const OptimizerFormat*>(&optimizer)) return *own;
  if (dynamic_cast<const optim::SGD*>(&optimizer)) return sgd;
  if (dynamic_cast<const optim::Adam*>(&optimizer)) return adam;
  if (dynamic_cast<const optim::AdamW*>(&optimizer)) return adamw;
  if (dynamic_cast<const optim::RMSprop*>(&optimizer)) return rmsprop;
  if (dynamic_cast<const optim::Adagrad*>(&optimizer)) return adagrad;
  if (dynamic_cast<const optim::LBFGS*>(&optimizer)) return lbfgs;
  TORCH_CHECK_VALUE(false, "the state of an optimizer of class ", c10::demangle(typeid(optimizer).name()),
                    " has no known form; let the class derive from lockstep::OptimizerFormat as well "
                    "(lockstep/optim/optimizer_format.h), which tells the names of its options and states");
}

}  // namespace lockstep::internal
