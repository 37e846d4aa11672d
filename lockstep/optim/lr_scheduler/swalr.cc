#include <algorithm>
#include <cmath>
#include <numbers>

#include <c10/util/Exception.h>

#include <lockstep/optim/internal/scheduled_groups.h>
#include <lockstep/optim/lr_scheduler/swalr.h>

namespace lockstep::swa_utils {

SWALR::SWALR(torch::optim::Optimizer& optimizer, const lr_scheduler::PerGroup& swa_lr, int64_t anneal_epochs,
             const std::string& anneal_strategy, int64_t last_epoch)
    : LRScheduler(optimizer, "SWALR"), anneal_epochs_(anneal_epochs), anneal_strategy_(anneal_strategy) {
  auto& groups = scheduled_groups().groups();
  const auto swa_lrs = swa_lr.expanded("swa_lr", groups.size());
  TORCH_CHECK_VALUE(anneal_strategy == "cos" || anneal_strategy == "linear",
                    "anneal_strategy must be one of 'cos' or 'linear', instead got ", anneal_strategy);
  TORCH_CHECK_VALUE(anneal_epochs >= 0, "anneal_epochs must be equal or greater than 0, got ", anneal_epochs);
  for (size_t group = 0; group < groups.size(); ++group) groups[group].swa_lr = swa_lrs[group];
  begin(last_epoch);
  state_fields().add("anneal_epochs", anneal_epochs_);
  state_fields().add("_anneal_strategy", anneal_strategy_);
  initial_step();
}

double SWALR::annealed(double t) const {
  return anneal_strategy_ == "cos" ? (1 - std::cos(std::numbers::pi * t)) / 2 : t;
}

std::vector<double> SWALR::get_lr() {
  check_group_count(base_lrs_.size());
  int64_t step = step_count_ - 1;
  if (anneal_epochs_ == 0) step = std::max<int64_t>(1, step);
  const auto epochs = static_cast<double>(std::max<int64_t>(1, anneal_epochs_));
  const double before = annealed(std::clamp(static_cast<double>(step - 1) / epochs, 0.0, 1.0));
  const double now = annealed(std::clamp(static_cast<double>(step) / epochs, 0.0, 1.0));
  std::vector<double> lrs = current_lrs();
  for (size_t group = 0; group < lrs.size(); ++group) {
    const auto& noted = scheduled_groups().groups()[group].swa_lr;
    TORCH_CHECK_VALUE(
        noted, "SWALR: param_groups[", group,
        "] has no 'swa_lr': an optimizer's state that was loaded since has none; load it before "
        "the SWALR is made");
    const double swa_lr = *noted;
    // What the learning rate would be without annealing.
    const double initial = before == 1 ? swa_lr : (lrs[group] - before * swa_lr) / (1 - before);
    lrs[group] = swa_lr * now + initial * (1 - now);
  }
  return lrs;
}

}  // namespace lockstep::swa_utils
