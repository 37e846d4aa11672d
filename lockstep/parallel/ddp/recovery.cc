#include <algorithm>
#include <exception>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/optim/recoverable.h>
#include <lockstep/parallel/ddp/ddp_core.h>
#include <lockstep/parallel/ddp/delayed_all_reduce.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>
#include <lockstep/parallel/ddp/state_sync.h>

namespace lockstep {
namespace {

std::vector<int64_t> gather_numbers(int64_t number, const ProcessGroup& group) {
  at::Tensor mine = at::empty({1}, at::kLong).fill_(number);
  at::Tensor all = at::empty({group->getSize()}, at::kLong);
  all_gather_into_tensor(all, mine, group);
  const auto* numbers = all.const_data_ptr<int64_t>();
  return {numbers, numbers + all.numel()};
}

/// Brings the ranks that have done fewer steps than others to the state of the lowest rank of those that have
/// done most: tensors in place, and `states` in order. Returns that number of steps. Collective; costs one
/// small collective when all are equal, as after a failed reduction on one host they are. Over hosts it may
/// have succeeded on one and failed on another. A rank keeps what it has until all has come; `mixed` is true from then until
/// all is in place, and stays so when a state can't be loaded. Where a rank has no memory to keep both, it throws that on
/// this rank, and c10::DistBackendError on the others.
int64_t catch_up(int64_t steps, const std::vector<NamedTensor>& tensors,
                 const std::vector<Recoverable>& states, const ProcessGroup& group, bool& mixed) {
  const auto all = gather_numbers(steps, group);
  const auto ahead = std::max_element(all.begin(), all.end());
  TORCH_CHECK_WITH(
      DistBackendError, *ahead >= 0,
      "update_process_group: no rank has a whole state, for loading another one's has failed on all "
      "that are left; load a checkpoint");
  if (std::all_of(all.begin(), all.end(), [&](int64_t number) { return number == *ahead; })) return *ahead;
  const int source = static_cast<int>(ahead - all.begin());
  const bool behind = steps != *ahead;
  // A rank that is behind keeps what it has until all has come, for the sender may end meanwhile. One that has no memory
  // for that says so before the others wait for it.
  std::vector<NamedTensor> come = tensors;
  std::exception_ptr failure;
  try {
    failpoint::here("ddp_catch_up");
    for (auto& [name, tensor] : come) {
      if (behind) tensor = tensor.detach().clone();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  const auto failed = gather_numbers(failure ? 1 : 0, group);
  if (failure) std::rethrow_exception(failure);
  const auto first = std::find(failed.begin(), failed.end(), 1);
  TORCH_CHECK_WITH(DistBackendError, first == failed.end(), "update_process_group: rank ",
                   first - failed.begin(),
                   " of the group has no memory for another rank's state; its own error says more");
  broadcast_coalesced(come, group, source);
  std::vector<std::string> bytes;
  for (const Recoverable& state : states) {
    bytes.push_back(
        broadcast_bytes(group->getRank() == source ? state.save() : std::string(), group, source));
  }
  if (!behind) return *ahead;
  mixed = true;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].second.variable_data().copy_(come[i].second);
  for (size_t i = 0; i < states.size(); ++i) states[i].load(bytes[i]);
  mixed = false;
  return *ahead;
}

}  // namespace

int64_t DdpCore::update_process_group(const ProcessGroup& group, const std::vector<Recoverable>& states) {
  TORCH_CHECK_VALUE(is_member(group), "update_process_group: this rank is not in the process group");
  options_.process_group = group;
  buffers_may_differ_ = true;
  if (delayed_) delayed_->update_process_group(group);
  auto tensors = model_.parameters;
  const auto& delayed = options_.delay_all_reduce_named_params;
  tensors.insert(tensors.end(), delayed.begin(), delayed.end());
  for (auto& buffer : current_buffers()) tensors.push_back(std::move(buffer));
  if (!reducer_) {
    // Without rounds to compare all ranks get the state of the first one.
    catch_up(mixed_ ? -1 : group->getRank() == 0 ? 1 : 0, tensors, states, group, mixed_);
    return 0;
  }
  // A round whose gradients were not used is to be done again.
  // Those that this rank only shadowed in a Join, which has not ended, its optimizer has not applied.
  const int64_t rounds = reducer_->rounds() - reducer_->shadowed_rounds();
  int64_t committed = rounds == 0 || reducer_->stepped_since_round() ? rounds : rounds - 1;
  // A rank whose state is a mixture, because it could not take on another one's, is behind all others.
  if (mixed_) committed = -1;
  undo_step();
  reducer_->update_process_group(group);
  const int64_t steps = catch_up(committed, tensors, states, group, mixed_);
  reducer_->set_rounds(steps);
  return steps;
}

}  // namespace lockstep
