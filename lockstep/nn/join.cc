#include <exception>
#include <utility>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <lockstep/base/log.h>
#include <lockstep/nn/join.h>

namespace lockstep {
namespace {

int64_t counted(const at::Tensor& ones) {
  return static_cast<int64_t>(ones.item<float>());
}

/// As many shadowed iterations are worth a warning.
constexpr int kWarnThreshold = 1000;

ProcessGroup group_of(const Joinable& joinable) {
  ProcessGroup group = joinable.join_process_group();
  return group ? group : default_group();
}

// The numbers here travel on the CPU, which every group takes, whatever device the joinables compute on.
at::Tensor all_reduced(at::Tensor tensor, const ProcessGroup& group) {
  all_reduce(tensor, ReduceOp::SUM, group);
  return tensor;
}

}  // namespace

Join::Join(std::vector<Joinable*> joinables, const JoinOptions& options)
    : joinables_(std::move(joinables)), options_(options), exceptions_before_(std::uncaught_exceptions()) {
  TORCH_CHECK_VALUE(!joinables_.empty(), "The join context manager requires at least one joinable");
  for (const Joinable* joinable : joinables_) {
    TORCH_CHECK_VALUE(joinable != nullptr, "Join: a joinable is a null pointer");
    TORCH_CHECK(!joinable->join_config_.enable,
                "Join: a joinable is in another Join; end that one before this one begins");
    if (!group_) group_ = group_of(*joinable);
    TORCH_CHECK_VALUE(group_ == group_of(*joinable),
                      "Using join context manager with multiple process groups");
  }
  for (Joinable* joinable : joinables_) hooks_.push_back(joinable->join_hook(options_));
  training_ranks_ = group_->getSize();
  for (Joinable* joinable : joinables_) {
    joinable->join_ = this;
    joinable->join_config_ = {.enable = options_.enable,
                              .throw_on_early_termination = options_.throw_on_early_termination,
                              .is_first_joinable = joinable == joinables_.front()};
  }
}

Join::~Join() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_before_) {
    leave();  // the exception goes on; to shadow now could wait for ranks that will never come
  } else {
    finish();
  }
}

void Join::finish() {
  if (std::exchange(finished_, true)) return;
  try {
    if (options_.enable) shadow();
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void Join::shadow() {
  // From here on this rank notifies no other, also where a hook runs the very code that notifies.
  joinables_.front()->join_config_.is_first_joinable = false;
  const int rank = get_rank(group_);
  bool is_last_joiner = true;
  counting_.reset();
  for (int iteration = 0; (training_ranks_ = count_nonjoined()) > 0; ++iteration) {
    if (options_.throw_on_early_termination) {
      all_reduced(at::ones({1}), group_);  // the others throw, too
      TORCH_CHECK(false, "Rank ", rank, " exhausted all inputs.");
    }
    if (iteration == kWarnThreshold + 1) {
      LOCKSTEP_LOG(kWarning) << "Detected uneven input skew of greater than " << kWarnThreshold
                             << ". This means that rank " << rank << " has at least " << kWarnThreshold
                             << " fewer inputs than other currently-active ranks. This level of skew could "
                                "lead to performance degradation during training.";
    }
    for (const auto& hook : hooks_) hook->main_hook();
    is_last_joiner = false;
  }
  for (const auto& hook : hooks_) hook->post_hook(is_last_joiner);
}

void Join::leave() {
  for (Joinable* joinable : joinables_) {
    joinable->join_config_ = {};
    joinable->join_ = nullptr;
  }
}

int64_t Join::count_nonjoined() const {
  return counted(all_reduced(at::zeros({1}), group_));
}

int64_t Join::training_ranks(const Joinable& joinable) {
  Join* join = joinable.join_;
  TORCH_CHECK(join != nullptr, "Join::training_ranks: the joinable is in no Join");
  if (const Work counting = std::exchange(join->counting_, {})) {
    counting->wait();
    join->training_ranks_ = counted(counting->result().at(0));
  }
  return join->training_ranks_;
}

Work Join::notify_join_context(const Joinable& joinable) {
  const JoinConfig& config = joinable.join_config_;
  if (!config.is_first_joinable || !config.enable) return {};
  const ProcessGroup group = joinable.join_process_group();
  Work work = all_reduce(at::ones({1}), ReduceOp::SUM, group, /*async_op=*/true);
  joinable.join_->counting_ = work;
  if (config.throw_on_early_termination) {
    const bool should_throw = all_reduced(at::zeros({1}), group).item<float>() != 0;
    TORCH_CHECK(!should_throw,
                "Detected at least one rank that exhausted inputs. Throwing across all ranks.");
  }
  return work;
}

}  // namespace lockstep
