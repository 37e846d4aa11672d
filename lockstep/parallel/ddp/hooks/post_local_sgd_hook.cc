#include <atomic>
#include <mutex>
#include <utility>

#include <lockstep/base/log.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/hooks/internal/hook_operations.h>
#include <lockstep/parallel/ddp/hooks/post_local_sgd_hook.h>

namespace lockstep {
namespace {

ProcessGroup group_of_host(const ProcessGroup& group) {
  const Topology topology = get_topology(group);
  return topology.spans_hosts() ? split_group(group, topology.ranks_by_host()) : group;
}

}  // namespace

struct PostLocalSGDState::Data {
  const ProcessGroup process_group;
  const ProcessGroup subgroup;
  const int64_t start_localSGD_iter;
  const bool post_local_gradient_allreduce;
  std::atomic<int64_t> iter{0};
  std::mutex mutex = {};
  ProcessGroup parent = {};  // guarded by mutex, as the next: that group_of_host() was asked for
  ProcessGroup of_host = {};
};

PostLocalSGDState::PostLocalSGDState(ProcessGroup process_group, ProcessGroup subgroup,
                                     int64_t start_localSGD_iter, bool post_local_gradient_allreduce)
    : data_(new Data{std::move(process_group), std::move(subgroup), start_localSGD_iter,
                     post_local_gradient_allreduce}) {
  LOCKSTEP_LOG(kInfo) << "Local SGD will be started after " << start_localSGD_iter << " iterations";
}

const ProcessGroup& PostLocalSGDState::process_group() const {
  return data_->process_group;
}
const ProcessGroup& PostLocalSGDState::subgroup() const {
  return data_->subgroup;
}
int64_t PostLocalSGDState::start_localSGD_iter() const {
  return data_->start_localSGD_iter;
}
bool PostLocalSGDState::post_local_gradient_allreduce() const {
  return data_->post_local_gradient_allreduce;
}
int64_t PostLocalSGDState::iter() const {
  return data_->iter;
}

HookFuture post_localSGD_hook(const PostLocalSGDState& state, GradBucket& bucket) {
  PostLocalSGDState::Data& data = *state.data_;
  if (data.iter < data.start_localSGD_iter) {
    if (bucket.is_last() && ++data.iter == data.start_localSGD_iter) {
      LOCKSTEP_LOG(kInfo) << "Start to apply local SGD after " << data.iter << " iterations.";
    }
    return hooks::internal::average(data.process_group, bucket.buffer());
  }
  if (!data.post_local_gradient_allreduce) return completed_future(bucket.buffer());
  if (data.subgroup) return hooks::internal::average(data.subgroup, bucket.buffer());
  const ProcessGroup parent = data.process_group ? data.process_group : default_group();
  ProcessGroup of_host;
  {
    const std::lock_guard lock(data.mutex);
    if (parent != data.parent) {  // the default group may be another one by now
      data.of_host = group_of_host(parent);
      data.parent = parent;
    }
    of_host = data.of_host;
  }
  return hooks::internal::average(of_host, bucket.buffer());
}

}  // namespace lockstep
