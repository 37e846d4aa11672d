#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/train/early_stopping.h>

namespace lockstep {

EarlyStopping::EarlyStopping(EarlyStoppingOptions options)
    : options_(std::move(options)),
      best_score_(options_.mode == MetricMode::min ? std::numeric_limits<double>::infinity()
                                                   : -std::numeric_limits<double>::infinity()) {
  TORCH_CHECK_VALUE(options_.min_delta >= 0, "EarlyStopping: min_delta is ", options_.min_delta,
                    "; it must not be negative");
  TORCH_CHECK_VALUE(options_.patience >= 1, "EarlyStopping: patience is ", options_.patience,
                    "; it must be at least 1");
}

bool EarlyStopping::update(double value) {
  const bool better = options_.mode == MetricMode::min ? value < best_score_ - options_.min_delta
                                                       : value > best_score_ + options_.min_delta;
  if (better) {
    best_score_ = value;
    wait_count_ = 0;
  } else {
    ++wait_count_;
  }
  return stopped();
}

StateDict EarlyStopping::state_dict() const {
  return {{"wait_count", wait_count_}, {"best_score", best_score_}};
}

void EarlyStopping::load_state_dict(const StateDict& state) {
  const auto wait_count = state_value<int64_t>(state, "wait_count", "EarlyStopping");
  best_score_ = state_value<double>(state, "best_score", "EarlyStopping");
  wait_count_ = wait_count;
}

}  // namespace lockstep
