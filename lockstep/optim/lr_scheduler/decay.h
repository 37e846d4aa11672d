#pragma once

#include <functional>
#include <map>
#include <vector>

#include <lockstep/optim/lr_scheduler/scheduler.h>

/// Schedules that multiply learning rates. Each sets, in epoch t, a group's learning rate lr(t) from lr(t-1),
/// so that schedules can be chained; step(epoch) computes it from the initial one, base_lr. `last_epoch`: see
/// LRScheduler.
namespace lockstep::lr_scheduler {

/// The factor of an epoch.
using LrLambda = std::function<double(int64_t epoch)>;

/// What LambdaLR and MultiplicativeLR have in common: a function for each group. A state has None for each of
/// them; loading one with attributes of Python's callable objects throws c10::ValueError.
class LambdaScheduler : public LRScheduler {
 public:
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 protected:
  /// Throws c10::ValueError for another number of functions than groups, and for empty ones.
  LambdaScheduler(torch::optim::Optimizer& optimizer, std::string name, std::vector<LrLambda> lr_lambdas,
                  int64_t last_epoch);

  std::vector<LrLambda> lr_lambdas_;
};

/// lr(t) = base_lr · lr_lambda(t). One function for all groups, or a list of one for each.
class LambdaLR final : public LambdaScheduler {
 public:
  LambdaLR(torch::optim::Optimizer& optimizer, const LrLambda& lr_lambda, int64_t last_epoch = -1);
  LambdaLR(torch::optim::Optimizer& optimizer, std::vector<LrLambda> lr_lambda, int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
};

/// lr(t) = lr(t-1) · lr_lambda(t), from t = 1 on.
class MultiplicativeLR final : public LambdaScheduler {
 public:
  MultiplicativeLR(torch::optim::Optimizer& optimizer, const LrLambda& lr_lambda, int64_t last_epoch = -1);
  MultiplicativeLR(torch::optim::Optimizer& optimizer, std::vector<LrLambda> lr_lambda,
                   int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
};

/// Multiplied by gamma every step_size epochs: base_lr · gamma^⌊t / step_size⌋. Throws c10::ValueError for a
/// step_size below 1.
class StepLR final : public LRScheduler {
 public:
  StepLR(torch::optim::Optimizer& optimizer, int64_t step_size, double gamma = 0.1, int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  int64_t step_size_;
  double gamma_;
};

/// Multiplied by gamma at each milestone; by gamma^n where one is listed n times. Python's state has the
/// milestones as a Counter, which LibTorch can't unpickle: save dict(state["milestones"]) there. A dict from
/// here serves Python's step(), for its step(epoch) make a Counter of it.
class MultiStepLR final : public LRScheduler {
 public:
  MultiStepLR(torch::optim::Optimizer& optimizer, const std::vector<int64_t>& milestones, double gamma = 0.1,
              int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  std::map<int64_t, int64_t> milestones_;  // how often each is listed
  double gamma_;
};

/// base_lr · factor until epoch total_iters, base_lr from then on. Throws c10::ValueError for a factor
/// outside [0, 1].
class ConstantLR final : public LRScheduler {
 public:
  ConstantLR(torch::optim::Optimizer& optimizer, double factor = 1.0 / 3, int64_t total_iters = 5,
             int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  double factor_;
  int64_t total_iters_;
};

/// base_lr multiplied by what goes evenly from start_factor in epoch 0 to end_factor in epoch total_iters: a
/// warm-up. Throws c10::ValueError for a start_factor outside (0, 1] and an end_factor outside [0, 1].
class LinearLR final : public LRScheduler {
 public:
  LinearLR(torch::optim::Optimizer& optimizer, double start_factor = 1.0 / 3, double end_factor = 1.0,
           int64_t total_iters = 5, int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  double start_factor_;
  double end_factor_;
  int64_t total_iters_;
};

/// Multiplied by gamma in every epoch.
class ExponentialLR final : public LRScheduler {
 public:
  ExponentialLR(torch::optim::Optimizer& optimizer, double gamma, int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  double gamma_;
};

/// base_lr · (1 - t / total_iters)^power, and 0 from epoch total_iters on.
class PolynomialLR final : public LRScheduler {
 public:
  PolynomialLR(torch::optim::Optimizer& optimizer, int64_t total_iters = 5, double power = 1.0,
               int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  int64_t total_iters_;
  double power_;
};

}  // namespace lockstep::lr_scheduler
