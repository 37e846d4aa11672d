// Runs the schedules that lr_scheduler_test.py and scripts/plot-schedules ask for.
//
//     lr_scheduler_driver JOBS OUTPUT
//
// JOBS: a pickled {job name: {"optimizer": sgd|adam|adamw|rmsprop, "lrs": one for each group, "scheduler":
// {"class": …, its arguments by name}, "steps": …}}, and optionally "epochs" or "metrics" for each step,
// "initial_lr", and a state of Python's after "middle" steps: "state", "state_lrs", "state_momenta".
// OUTPUT: {job name: {"lrs": [steps + 1 × groups], "momenta": the same, "state": after "middle" steps,
// "resumed": learning rates after "middle" of another process that loads the checkpoint, "from_python":
// those of one that loads Python's, "end_state": …}}.
#include <cmath>
#include <sstream>

#include <torch/torch.h>

#include <lockstep/collectives/testing/pickle_file.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/optim/swa_utils.h>
#include <lockstep/testing/driver.h>

namespace lr_scheduler_driver {
namespace {

namespace lr = lockstep::lr_scheduler;
namespace optim = torch::optim;
using lockstep::from_object;
using lockstep::StateDict;
using lockstep::to_object;

using Numbers = std::vector<double>;
using Rows = std::vector<Numbers>;

/// The arguments of one scheduler.
class Spec {
 public:
  explicit Spec(StateDict values) : values_(std::move(values)) {}

  bool has(const std::string& key) const { return values_.contains(key); }
  template <class T>
  T get(const std::string& key) const {
    return lockstep::state_value<T>(values_, key, "the driver");
  }
  /// The argument if there is one.
  template <class T, class Target>
  void set(const std::string& key, Target& target) const {
    if (has(key)) target = get<T>(key);
  }
  template <class T>
  T get_or(const std::string& key, T otherwise) const {
    set<T>(key, otherwise);
    return otherwise;
  }
  lr::PerGroup per_group(const std::string& key) const {
    if (values_.at(key).isList()) return get<Numbers>(key);
    return get<double>(key);
  }
  void set_per_group(const std::string& key, lr::PerGroup& target) const {
    if (has(key)) target = per_group(key);
  }

 private:
  StateDict values_;
};

/// The functions that both sides know.
std::function<double(double)> function_of(const Spec& spec) {
  const auto kind = spec.get<std::string>("kind");
  const auto x = spec.get<double>("x");
  if (kind == "power") return [x](double epoch) { return std::pow(x, epoch); };
  if (kind == "inverse") return [x](double epoch) { return 1 / (1 + epoch / x); };
  TORCH_CHECK(kind == "alternate", "unknown function ", kind);
  return [x](double epoch) { return std::fmod(epoch, 2) == 0 ? x : 1 / x; };
}

std::vector<lr::LrLambda> lambdas_of(const Spec& spec) {
  std::vector<lr::LrLambda> lambdas;
  for (const auto& each : spec.get<std::vector<StateDict>>("lr_lambda")) {
    lambdas.push_back([f = function_of(Spec(each))](int64_t epoch) { return f(static_cast<double>(epoch)); });
  }
  return lambdas;
}

lr::CyclicLROptions cyclic_options(const Spec& spec) {
  lr::CyclicLROptions options;
  spec.set<int64_t>("step_size_up", options.step_size_up);
  spec.set<int64_t>("step_size_down", options.step_size_down);
  spec.set<std::string>("mode", options.mode);
  spec.set<double>("gamma", options.gamma);
  if (spec.has("scale_fn")) options.scale_fn = function_of(Spec(spec.get<StateDict>("scale_fn")));
  spec.set<std::string>("scale_mode", options.scale_mode);
  spec.set<bool>("cycle_momentum", options.cycle_momentum);
  spec.set_per_group("base_momentum", options.base_momentum);
  spec.set_per_group("max_momentum", options.max_momentum);
  spec.set<int64_t>("last_epoch", options.last_epoch);
  return options;
}

lr::OneCycleLROptions one_cycle_options(const Spec& spec) {
  lr::OneCycleLROptions options;
  spec.set<int64_t>("total_steps", options.total_steps);
  spec.set<int64_t>("epochs", options.epochs);
  spec.set<int64_t>("steps_per_epoch", options.steps_per_epoch);
  spec.set<double>("pct_start", options.pct_start);
  spec.set<std::string>("anneal_strategy", options.anneal_strategy);
  spec.set<bool>("cycle_momentum", options.cycle_momentum);
  spec.set_per_group("base_momentum", options.base_momentum);
  spec.set_per_group("max_momentum", options.max_momentum);
  spec.set<double>("div_factor", options.div_factor);
  spec.set<double>("final_div_factor", options.final_div_factor);
  spec.set<bool>("three_phase", options.three_phase);
  return options;
}

lr::ReduceLROnPlateauOptions plateau_options(const Spec& spec) {
  lr::ReduceLROnPlateauOptions options;
  spec.set<std::string>("mode", options.mode);
  spec.set<double>("factor", options.factor);
  spec.set<int64_t>("patience", options.patience);
  spec.set<double>("threshold", options.threshold);
  spec.set<std::string>("threshold_mode", options.threshold_mode);
  spec.set<int64_t>("cooldown", options.cooldown);
  spec.set_per_group("min_lr", options.min_lr);
  spec.set<double>("eps", options.eps);
  return options;
}

std::shared_ptr<lr::LRScheduler> make(const Spec& spec, optim::Optimizer& optimizer) {
  const auto kind = spec.get<std::string>("class");
  const auto last_epoch = spec.get_or<int64_t>("last_epoch", -1);
  const auto integer = [&](const char* key, int64_t otherwise) {
    return spec.get_or<int64_t>(key, otherwise);
  };
  const auto number = [&](const char* key, double otherwise) { return spec.get_or<double>(key, otherwise); };
  if (kind == "LambdaLR") return std::make_shared<lr::LambdaLR>(optimizer, lambdas_of(spec), last_epoch);
  if (kind == "MultiplicativeLR") {
    return std::make_shared<lr::MultiplicativeLR>(optimizer, lambdas_of(spec), last_epoch);
  }
  if (kind == "StepLR") {
    return std::make_shared<lr::StepLR>(optimizer, spec.get<int64_t>("step_size"), number("gamma", 0.1),
                                        last_epoch);
  }
  if (kind == "MultiStepLR") {
    return std::make_shared<lr::MultiStepLR>(optimizer, spec.get<std::vector<int64_t>>("milestones"),
                                             number("gamma", 0.1), last_epoch);
  }
  if (kind == "ConstantLR") {
    return std::make_shared<lr::ConstantLR>(optimizer, number("factor", 1.0 / 3), integer("total_iters", 5),
                                            last_epoch);
  }
  if (kind == "LinearLR") {
    return std::make_shared<lr::LinearLR>(optimizer, number("start_factor", 1.0 / 3),
                                          number("end_factor", 1.0), integer("total_iters", 5), last_epoch);
  }
  if (kind == "ExponentialLR") {
    return std::make_shared<lr::ExponentialLR>(optimizer, spec.get<double>("gamma"), last_epoch);
  }
  if (kind == "PolynomialLR") {
    return std::make_shared<lr::PolynomialLR>(optimizer, integer("total_iters", 5), number("power", 1.0),
                                              last_epoch);
  }
  if (kind == "CosineAnnealingLR") {
    return std::make_shared<lr::CosineAnnealingLR>(optimizer, spec.get<int64_t>("T_max"),
                                                   number("eta_min", 0), last_epoch);
  }
  if (kind == "CosineAnnealingWarmRestarts") {
    return std::make_shared<lr::CosineAnnealingWarmRestarts>(
        optimizer, spec.get<int64_t>("T_0"), integer("T_mult", 1), number("eta_min", 0), last_epoch);
  }
  if (kind == "CyclicLR") {
    return std::make_shared<lr::CyclicLR>(optimizer, spec.per_group("base_lr"), spec.per_group("max_lr"),
                                          cyclic_options(spec));
  }
  if (kind == "OneCycleLR") {
    return std::make_shared<lr::OneCycleLR>(optimizer, spec.per_group("max_lr"), one_cycle_options(spec));
  }
  if (kind == "SWALR") {
    return std::make_shared<lockstep::swa_utils::SWALR>(optimizer, spec.per_group("swa_lr"),
                                                        integer("anneal_epochs", 10),
                                                        spec.get_or<std::string>("anneal_strategy", "cos"));
  }
  lr::Schedulers parts;
  for (const auto& part : spec.get<std::vector<StateDict>>("schedulers")) {
    parts.push_back(make(Spec(part), optimizer));
  }
  if (kind == "ChainedScheduler") return std::make_shared<lr::ChainedScheduler>(parts);
  TORCH_CHECK(kind == "SequentialLR", "unknown scheduler ", kind);
  return std::make_shared<lr::SequentialLR>(optimizer, parts, spec.get<std::vector<int64_t>>("milestones"));
}

/// Each group has one parameter with a gradient.
std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& kind, const Numbers& lrs) {
  std::vector<optim::OptimizerParamGroup> groups;
  const auto add = [&](auto options) {
    for (const double value : lrs) {
      auto parameter = torch::ones({2}, torch::kDouble).requires_grad_();
      parameter.mutable_grad() = torch::ones({2}, torch::kDouble);
      options.lr(value);
      groups.emplace_back(std::vector<torch::Tensor>{parameter},
                          std::make_unique<decltype(options)>(options));
    }
    return options;
  };
  if (kind == "sgd") return std::make_unique<optim::SGD>(groups, add(optim::SGDOptions(0.5).momentum(0.9)));
  if (kind == "adam") return std::make_unique<optim::Adam>(groups, add(optim::AdamOptions(0.5)));
  if (kind == "adamw") return std::make_unique<optim::AdamW>(groups, add(optim::AdamWOptions(0.5)));
  TORCH_CHECK(kind == "rmsprop", "unknown optimizer ", kind);
  return std::make_unique<optim::RMSprop>(groups, add(optim::RMSpropOptions(0.5).momentum(0.9)));
}

/// An optimizer with its scheduler, of the one or the other kind.
class Training {
 public:
  explicit Training(const Spec& job) : job_(job) {
    optimizer_ = make_optimizer(job.get<std::string>("optimizer"), job.get<Numbers>("lrs"));
    std::optional<lr::InitialLr> initial_lr;
    if (job.has("initial_lr")) initial_lr.emplace(*optimizer_, job.per_group("initial_lr"));
    const Spec spec(job.get<StateDict>("scheduler"));
    if (spec.get<std::string>("class") == "ReduceLROnPlateau") {
      plateau_.emplace(*optimizer_, plateau_options(spec));
    } else {
      scheduler_ = make(spec, *optimizer_);
    }
    epochs_ = job.get_or<Numbers>("epochs", {});
    metrics_ = job.get_or<Numbers>("metrics", {});
  }

  /// Steps number `begin` to `end`; the learning rates and momenta after each, and, from the beginning,
  /// before.
  void run(int64_t begin, int64_t end, Rows& lrs, Rows& momenta) {
    if (begin == 0) note(lrs, momenta);
    for (auto step = static_cast<size_t>(begin); step < static_cast<size_t>(end); ++step) {
      optimizer_->step();
      if (plateau_) {
        plateau_->step(metrics_.at(step));
      } else if (!epochs_.empty()) {
        scheduler_->step(epochs_.at(step));
      } else {
        scheduler_->step();
      }
      note(lrs, momenta);
    }
  }

  StateDict state() const { return plateau_ ? plateau_->state_dict() : scheduler_->state_dict(); }
  void load(const StateDict& state) {
    plateau_ ? plateau_->load_state_dict(state) : scheduler_->load_state_dict(state);
  }
  optim::Optimizer& optimizer() { return *optimizer_; }

  void set_momenta(const Numbers& momenta) {
    for (size_t group = 0; group < momenta.size(); ++group) {
      auto& options = optimizer_->param_groups()[group].options();
      if (auto* sgd = dynamic_cast<optim::SGDOptions*>(&options)) sgd->momentum(momenta[group]);
      if (auto* rms = dynamic_cast<optim::RMSpropOptions*>(&options)) rms->momentum(momenta[group]);
      if (auto* adam = dynamic_cast<optim::AdamOptions*>(&options)) adam->betas({momenta[group], 0.999});
      if (auto* adam = dynamic_cast<optim::AdamWOptions*>(&options)) adam->betas({momenta[group], 0.999});
    }
  }

 private:
  void note(Rows& lrs, Rows& momenta) const {
    Numbers of_groups;
    Numbers momenta_of_groups;
    for (auto& group : optimizer_->param_groups()) {
      auto& options = group.options();
      of_groups.push_back(options.get_lr());
      if (auto* sgd = dynamic_cast<optim::SGDOptions*>(&options))
        momenta_of_groups.push_back(sgd->momentum());
      if (auto* rms = dynamic_cast<optim::RMSpropOptions*>(&options))
        momenta_of_groups.push_back(rms->momentum());
      if (auto* adam = dynamic_cast<optim::AdamOptions*>(&options))
        momenta_of_groups.push_back(std::get<0>(adam->betas()));
      if (auto* adam = dynamic_cast<optim::AdamWOptions*>(&options))
        momenta_of_groups.push_back(std::get<0>(adam->betas()));
    }
    const Numbers& last = plateau_ ? plateau_->get_last_lr() : scheduler_->get_last_lr();
    TORCH_CHECK(last == of_groups, "get_last_lr() differs from the optimizer's learning rates");
    lrs.push_back(of_groups);
    momenta.push_back(momenta_of_groups);
  }

  Spec job_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::shared_ptr<lr::LRScheduler> scheduler_;
  std::optional<lr::ReduceLROnPlateau> plateau_;
  Numbers epochs_;
  Numbers metrics_;
};

/// As a file would have it.
StateDict through_pickle(const StateDict& state) {
  return from_object<StateDict>(torch::pickle_load(torch::pickle_save(to_object(state))));
}

StateDict answer(const Spec& job) {
  const auto steps = job.get<int64_t>("steps");
  const auto middle = job.get_or<int64_t>("middle", steps);
  StateDict result;
  Rows lrs;
  Rows momenta;
  Training training(job);
  training.run(0, middle, lrs, momenta);
  result["state"] = to_object(training.state());
  std::stringstream checkpoint;
  torch::save(training.optimizer(), checkpoint);

  Training resumed(job);
  torch::load(resumed.optimizer(), checkpoint);
  resumed.load(through_pickle(training.state()));
  Rows resumed_lrs;
  Rows resumed_momenta;
  resumed.run(middle, steps, resumed_lrs, resumed_momenta);
  result["resumed"] = to_object(resumed_lrs);
  result["resumed_momenta"] = to_object(resumed_momenta);

  if (job.has("state")) {
    Training from_python(job);
    const auto state_lrs = job.get<Numbers>("state_lrs");
    for (size_t group = 0; group < state_lrs.size(); ++group) {
      from_python.optimizer().param_groups()[group].options().set_lr(state_lrs[group]);
    }
    from_python.set_momenta(job.get<Numbers>("state_momenta"));
    from_python.load(job.get<StateDict>("state"));
    Rows lrs_after;
    Rows momenta_after;
    from_python.run(middle, steps, lrs_after, momenta_after);
    result["from_python"] = to_object(lrs_after);
  }

  training.run(middle, steps, lrs, momenta);
  result["lrs"] = to_object(lrs);
  result["momenta"] = to_object(momenta);
  result["end_state"] = to_object(training.state());
  return result;
}

}  // namespace

LOCKSTEP_DRIVER(lr_scheduler_driver) {
  TORCH_CHECK(argc == 3, "usage: lr_scheduler_driver JOBS OUTPUT");
  StateDict results;
  for (const auto& [name, job] : from_object<StateDict>(lockstep::testing::read_pickle(argv[1]))) {
    try {
      results[name] = to_object(answer(Spec(from_object<StateDict>(job))));
    } catch (const c10::Error& error) {
      results[name] = to_object(StateDict{{"error", error.what_without_backtrace()}});
    }
  }
  lockstep::testing::write_pickle(argv[2], to_object(results));
  return 0;
}

}  // namespace lr_scheduler_driver
