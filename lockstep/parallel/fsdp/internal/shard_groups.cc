#include <algorithm>
#include <array>
#include <exception>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/groups/spread_failure.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

namespace lockstep::fsdp::internal {
namespace {

using Lists = std::vector<std::vector<int>>;

Lists ranks_of_hosts(const Topology& topology) {
  Lists hosts = topology.ranks_by_host();
  for (size_t host = 1; host < hosts.size(); ++host) {
    TORCH_CHECK_VALUE(hosts[host].size() == hosts[0].size(), "FullyShardedDataParallel: host ",
                      topology.hosts[host].name, " has ", hosts[host].size(),
                      " ranks of the group, and host ", topology.hosts[0].name, " has ", hosts[0].size(),
                      "; all need the same number, for the n-th ranks of all hosts own the same rows");
  }
  return hosts;
}

/// Of each place in a host, the ranks there.
Lists ranks_of_places(const Lists& hosts) {
  Lists places(hosts[0].size());
  for (const auto& host : hosts) {
    for (size_t place = 0; place < places.size(); ++place) places[place].push_back(host[place]);
  }
  return places;
}

void end_group(ProcessGroup& group) {
  if (!group) return;
  try {
    destroy_process_group(group);
  } catch (const std::exception& error) {
    // The groups are gone already, by destroy_process_group() of all of them.
    LOCKSTEP_LOG(kDebug) << "a group of a sharded model: " << text_of(error);
  }
}

}  // namespace

ShardGroups::ShardGroups(const ProcessGroup& parent, RowsOn rows_on, bool gathers, c10::Device device)
    : device_(device) {
  const std::vector<int> ranks = all_ranks(parent->getSize());
  const Lists hosts = rows_on == RowsOn::kAllRanks ? Lists{ranks} : ranks_of_hosts(get_topology(parent));
  try {
    // It may fail on one host alone.
    const auto make = [&](ProcessGroup& group, const char* name) {
      run_on_all(parent, "to make their host's group", [&] { group = split_group(parent, hosts, {}, name); });
    };
    if (gathers) make(gathers_, "fsdp_gathers");
    make(host_, "fsdp");
    if (hosts.size() == 1) {
      all_ = host_;
    } else {
      all_ = split_group(parent, {ranks}, {}, "fsdp_all");
      replicas_ = split_group(parent, ranks_of_places(hosts), {}, "fsdp_replicas");
    }
  } catch (...) {
    end();
    throw;
  }
}

ShardGroups::~ShardGroups() {
  end();
}

void ShardGroups::end() noexcept {
  if (replicas_) {
    end_group(replicas_);
    end_group(all_);
  }
  end_group(host_);
  end_group(gathers_);
}

void ShardGroups::connect() const {
  if (device_.is_cpu()) return;
  for (const ProcessGroup& group : {host_, replicas_, gathers_}) {
    if (group)
      all_reduce(at::zeros({1}, at::TensorOptions(at::kFloat).device(device_)), ReduceOp::SUM, group);
  }
}

bool ShardGroups::any_has_failed() const {
  return std::ranges::any_of(std::array{host_, all_, replicas_, gathers_}, [](const ProcessGroup& group) {
    const auto backend = group ? lockstep_backend_of(*group) : nullptr;
    return backend && backend->channel().failed();
  });
}

void ShardGroups::spread_failure() const noexcept {
  if (replicas_ || gathers_) lockstep::spread_failure({host_, all_, replicas_, gathers_});
  if (!device_.is_cpu() && any_has_failed()) abort();
}

void ShardGroups::fail(const std::string& text) const noexcept {
  spread_failure();
  try {
    if (const auto backend = lockstep_backend_of(*all_)) backend->abort(text);
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kWarning) << "the ranks of a sharded model don't hear of a failure: " << text_of(error);
  }
  spread_failure();
}

void ShardGroups::abort() const noexcept {
  for (const ProcessGroup& group : {host_, replicas_, gathers_}) {
    try {
      if (group) lockstep::abort(group);  // one that has failed keeps its cause
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kWarning) << "the ranks of a sharded model don't hear of a failure: " << text_of(error);
    }
  }
}

}  // namespace lockstep::fsdp::internal
