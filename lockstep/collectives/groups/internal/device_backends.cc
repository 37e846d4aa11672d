#include <random>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/groups/internal/backend_names.h>
#include <lockstep/collectives/groups/internal/device_agreement.h>
#include <lockstep/collectives/groups/internal/device_backends.h>
#include <lockstep/device/cuda_library.h>

namespace lockstep::collectives::internal::device_backends {
namespace {

using BackendType = c10d::ProcessGroup::BackendType;

/// A number of the group's first rank, for all members.
int64_t common_number(LockstepBackend& backend) {
  at::Tensor number = at::empty({1}, at::kLong);
  std::random_device random;
  if (backend.getRank() == 0) number.fill_(static_cast<int64_t>(random()));
  std::vector<at::Tensor> tensors{number};
  c10d::BroadcastOptions options;
  options.asyncOp = false;
  backend.broadcast(tensors, options)->wait();
  return number.item<int64_t>();
}

/// Throws on the members that succeeded when another did not.
void check_all_succeeded(LockstepBackend& backend, bool succeeded, const group_making::GroupPlan& plan) {
  std::vector<at::Tensor> inputs{at::full({1}, succeeded ? 1 : 0, at::kByte)};
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (size_t i = 0; i < plan.ranks.size(); ++i) outputs[0].push_back(at::empty({1}, at::kByte));
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  backend.allgather(outputs, inputs, options)->wait();
  std::vector<int> failed;
  for (size_t i = 0; i < plan.ranks.size(); ++i) {
    if (outputs[0][i].item<uint8_t>() == 0) failed.push_back(plan.ranks[i]);
  }
  TORCH_CHECK_WITH(DistBackendError, !succeeded || failed.empty(), "process group '", plan.name,
                   "' was not made: ", name_ranks(failed),
                   " could not make a NCCL backend; that rank's own error says more");
}

c10::intrusive_ptr<c10d::Backend> open_nccl(RegisteredGroup& group, const DefaultWorld& world,
                                            const group_making::GroupPlan& plan) {
  // NCCL's members meet in the store, and a name may have been used before.
  const std::string prefix = c10::str("nccl/", plan.name, "/", common_number(*group.backend));
  auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, world.world.store);
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = cuda_library().make_nccl_backend(store, group.handle->getRank(), group.handle->getSize(),
                                               {.name = plan.name,
                                                .description = plan.description,
                                                .global_ranks = plan.ranks,
                                                .timeout = plan.timeout,
                                                .options = plan.nccl});
  } catch (...) {
    check_all_succeeded(*group.backend, false, plan);
    throw;
  }
  check_all_succeeded(*group.backend, true, plan);
  return backend;
}

/// Never throws: the group ends in any case.
template <class Body>
void for_each_backend(const RegisteredGroup& group, const char* what, const Body& body) {
  if (group.device_backends.empty() || group.backend->channel().transport().in_forked_child()) return;
  for (const auto& [device, backend] : group.device_backends) {
    try {
      body(*backend);
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kError) << what << " backend " << backend->getBackendName() << " of group '" << group.name
                           << "': " << text_of(error);
    }
  }
}

}  // namespace

std::string agree(const group_making::Gather& gather, const std::string& call, int rank,
                  const std::string& asked, const std::vector<std::vector<int>>& lists) {
  using namespace device_agreement;
  const auto records = gather(to_record(describe_this_rank(rank, asked)));
  std::string backend;
  for (const auto& list : lists) {
    std::vector<RankDevice> members;
    for (int position : list) members.push_back(from_record(records.at(static_cast<size_t>(position))));
    const BackendChoice decision = decide(members);
    TORCH_CHECK_WITH(DistBackendError, decision.mismatch.empty(), call,
                     ": the ranks asked for different backends: ", decision.mismatch,
                     "; all of them must ask for the same");
    TORCH_CHECK_VALUE(decision.refusal.empty(), call, ": ", decision.refusal);
    if (members.front().rank == rank) {
      for (const std::string& warning : decision.warnings) LOCKSTEP_LOG(kWarning) << warning;
    }
    backend = decision.backend;
  }
  return backend;
}

void open(RegisteredGroup& group, const DefaultWorld& world, const group_making::GroupPlan& plan) {
  group.nccl = plan.nccl;
  for (const auto& [device, name] : backend_names::by_device(plan.backend_name)) {
    if (name == backend_names::kLockstep) {
      group.handle->setBackend(device, BackendType::CUSTOM, c10::intrusive_ptr<c10d::Backend>(group.backend));
      continue;
    }
    auto backend = open_nccl(group, world, plan);
    group.device_backends[device] = backend;
    if (plan.device_id) group.handle->setBoundDeviceId(plan.device_id);  // the backends get it from there
    group.handle->setBackend(device, BackendType::NCCL, backend);
    if (plan.device_id) backend->eagerConnectSingleDevice(*plan.device_id);
  }
  // Whatever names no device (a barrier, say) goes over Lockstep.
  group.handle->setDefaultBackend(BackendType::CUSTOM);
}

void set_timeout(const RegisteredGroup& group, std::chrono::milliseconds timeout) {
  for_each_backend(group, "setting the timeout of",
                   [&](c10d::Backend& backend) { backend.setTimeout(timeout); });
}

void abort(const RegisteredGroup& group) {
  for_each_backend(group, "aborting", [](c10d::Backend& backend) { backend.abort(); });
}

void end(const RegisteredGroup& group, bool aborting) {
  auto& channel = group.backend->channel();
  if (group.device_backends.empty() || channel.transport().in_forked_child()) return;
  bool broken = aborting || channel.failed();
  for (int rank = 0; rank < channel.size(); ++rank) {
    // One that has left the group first has finished, too.
    broken = broken || (channel.has_ended(rank) && !channel.has_left(rank));
  }
  if (broken) return abort(group);
  for_each_backend(group, "ending", [](c10d::Backend& backend) { backend.shutdown(); });
}

}  // namespace lockstep::collectives::internal::device_backends
