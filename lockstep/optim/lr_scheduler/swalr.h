#pragma once

#include <string>

#include <lockstep/optim/lr_scheduler/scheduler.h>

/// torch/optim/swa_utils.py: averages of weights. Include <lockstep/optim/swa_utils.h> for all of it.
namespace lockstep::swa_utils {

/// Leads the groups' learning rates, from whatever they are when it begins, to swa_lr in anneal_epochs steps,
/// and keeps them there, for stochastic weight averaging (Izmailov and others, arXiv:1803.05407). It is made
/// together with the schedule before it, and stepped in its place from the epoch on in which averaging
/// begins. The note of swa_lr is the optimizer's, as in Python: of two SWALR, the later one's holds.
class SWALR final : public lr_scheduler::LRScheduler {
 public:
  /// `anneal_strategy`: "cos" or "linear". Throws c10::ValueError for another, for negative anneal_epochs,
  /// and for a list of another length than the groups.
  SWALR(torch::optim::Optimizer& optimizer, const lr_scheduler::PerGroup& swa_lr, int64_t anneal_epochs = 10,
        const std::string& anneal_strategy = "cos", int64_t last_epoch = -1);

 private:
  std::vector<double> get_lr() override;
  double annealed(double t) const;

  int64_t anneal_epochs_;
  std::string anneal_strategy_;
};

}  // namespace lockstep::swa_utils
