#pragma once

#include <vector>

#include <lockstep/optim/lr_scheduler/scheduler.h>

/// Cosine annealing (Loshchilov, Hutter: SGDR, arXiv:1608.03983).
namespace lockstep::lr_scheduler {

/// From base_lr down to eta_min along half a cosine in T_max epochs, without restarts: eta_min + (base_lr -
/// eta_min) · (1 + cos(π t / T_max)) / 2. Beyond T_max it goes up again. Throws c10::ValueError for a T_max
/// below 1.
class CosineAnnealingLR final : public LRScheduler {
 public:
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, int64_t T_max, double eta_min = 0,
                    int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  std::optional<std::vector<double>> get_closed_form_lr() const override;

  int64_t t_max_;
  double eta_min_;
};

/// The same from base_lr anew after T_0 epochs, then after T_0 · T_mult, and so on. step(epoch) takes
/// fractions, for steps within an epoch: epoch + batch / batches. Throws c10::ValueError for a T_0 or T_mult
/// below 1, and for a negative epoch.
class CosineAnnealingWarmRestarts final : public LRScheduler {
 public:
  CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer, int64_t T_0, int64_t T_mult = 1,
                              double eta_min = 0, int64_t last_epoch = -1);

  void step() override;
  void step(double epoch) override;

 private:
  std::vector<double> get_lr() override;

  int64_t t_0_;
  int64_t t_i_;  // epochs between the restarts before and after this epoch
  int64_t t_mult_;
  double eta_min_;
  double t_cur_;  // epochs since the last restart
};

}  // namespace lockstep::lr_scheduler
