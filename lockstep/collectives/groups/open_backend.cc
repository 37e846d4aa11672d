#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/collectives/groups/internal/shrinking.h>
#include <lockstep/collectives/groups/internal/transport_options.h>
#include <lockstep/collectives/groups/open_backend.h>
#include <lockstep/rendezvous/store_all_gather.h>
#include <lockstep/rendezvous/topology.h>

namespace lockstep {

using namespace collectives::internal;

namespace {

using transport::GroupChannel;
using transport::HostTransport;

/// A mapping that groups of this process stand on. All its ranks know it by the same token.
struct Mapping {
  uint64_t token;
  std::weak_ptr<HostTransport> transport;
  hosts::CostModel wire_model;  // of its rank 0, where it spans hosts
};

/// What this process has opened and has not closed yet. A forked child begins anew.
struct Opened {
  std::mutex mutex;
  std::vector<Mapping> mappings;
  std::vector<c10::weak_intrusive_ptr<LockstepBackend>> backends;
};

Opened& opened() {
  static PerProcess<Opened> all;
  return all.get();
}

/// For close_all_backends().
void remember(const c10::intrusive_ptr<LockstepBackend>& backend) {
  Opened& all = opened();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.backends, [](const auto& one) { return one.expired(); });
  all.backends.emplace_back(backend);
}

struct SharedMapping {
  std::shared_ptr<HostTransport> transport;  // null: the members have none in common
  std::vector<int> members;                  // their ranks there, by group rank
  hosts::CostModel wire_model;
};

struct LivingMapping {
  uint64_t token;
  std::shared_ptr<HostTransport> transport;
  hosts::CostModel wire_model;
};

std::vector<LivingMapping> living_mappings() {
  Opened& all = opened();
  std::lock_guard lock(all.mutex);
  std::vector<LivingMapping> living;
  std::erase_if(all.mappings, [&](const Mapping& mapping) {
    auto transport = mapping.transport.lock();
    if (transport) living.push_back({mapping.token, std::move(transport), mapping.wire_model});
    return mapping.transport.expired();
  });
  return living;
}

/// "TOKEN:RANK TOKEN:RANK", by age.
std::vector<std::pair<uint64_t, int>> parse_mappings(const std::string& text, int rank) {
  std::vector<std::pair<uint64_t, int>> mappings;
  std::istringstream in(text);
  uint64_t token = 0;
  char colon = 0;
  int there = 0;
  while (in >> token >> colon >> there) mappings.emplace_back(token, there);
  TORCH_CHECK_WITH(DistStoreError, in.eof(), "the store holds \"", text, "\" for rank ", rank,
                   ", which no member wrote; give each process group a store or a prefix of its own");
  return mappings;
}

/// The exchange at which the members meet.
constexpr const char* kMeeting = "lockstep/mappings";

/// The oldest mapping that all members have.
SharedMapping find_shared_mapping(c10d::Store& store, int rank, int size, const Deadline& deadline) {
  const auto living = living_mappings();
  std::ostringstream mine;
  for (const LivingMapping& one : living) {
    mine << (mine.tellp() > 0 ? " " : "") << one.token << ':' << one.transport->rank();
  }
  const auto texts = store_all_gather(store, kMeeting, rank, size, mine.str(), deadline);
  std::vector<std::vector<std::pair<uint64_t, int>>> all;
  for (int member = 0; member < size; ++member) all.push_back(parse_mappings(texts[member], member));
  for (const auto& candidate : all.front()) {
    SharedMapping shared;
    for (const auto& theirs : all) {
      const auto found = std::find_if(theirs.begin(), theirs.end(),
                                      [&](const auto& one) { return one.first == candidate.first; });
      if (found != theirs.end()) shared.members.push_back(found->second);
    }
    if (static_cast<int>(shared.members.size()) < size) continue;
    for (const LivingMapping& one : living) {
      if (one.token != candidate.first) continue;
      shared.transport = one.transport;
      shared.wire_model = one.wire_model;
    }
    return shared;
  }
  return {};
}

SharedMapping make_mapping(c10d::Store& store, int rank, int size, const OpenBackendOptions& options,
                           const Deadline& deadline) {
  SharedMapping made;
  std::vector<HostIdentity> hosts;
  for (const auto& host : store_all_gather(store, "lockstep/hosts", rank, size, this_host().to_string(),
                                           deadline, {}, kMeeting)) {
    hosts.push_back(HostIdentity::parse(host));
  }
  const Topology topology = Topology::make(hosts, rank);
  if (topology.spans_hosts() && rank == 0) made.wire_model = hosts::read_cost_model();
  // Where the store is, only the launcher knows here.
  const auto meeting_host = environment::text("MASTER_ADDR").value_or("");
  auto transport_options = lockstep::transport_options(topology, meeting_host);
  transport_options.job_ranks = options.global_ranks;
  transport_options.met_at = kMeeting;
  made.transport = HostTransport::connect(store, rank, size, deadline, transport_options);
  made.members = all_ranks(size);
  // A number; over hosts the cost model follows that of rank 0.
  std::string token = std::to_string(std::bit_cast<uint64_t>(random_bytes<sizeof(uint64_t)>()));
  if (topology.spans_hosts() && rank == 0) token += ' ' + hosts::to_json(made.wire_model);
  token = store_all_gather(store, "lockstep/token", rank, size, token, deadline, {}, kMeeting).front();
  if (topology.spans_hosts()) {
    made.wire_model = hosts::parse_cost_model(token.substr(token.find(' ') + 1), "the cost model of rank 0");
  }
  Opened& all = opened();
  std::lock_guard lock(all.mutex);
  all.mappings.push_back({std::stoull(token), made.transport, made.wire_model});
  return made;
}

}  // namespace

c10::intrusive_ptr<LockstepBackend> open_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                 int size, const OpenBackendOptions& options) {
  log::check_environment();
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "lockstep: rank ", rank, " of ", size,
                    " ranks; it takes a rank from 0 to the number of ranks less one");
  TORCH_CHECK_VALUE(options.timeout > std::chrono::milliseconds(0), "lockstep: the timeout is ",
                    options.timeout.count(), " ms; it must be more than 0");
  TORCH_CHECK_VALUE(options.global_ranks.empty() || static_cast<int>(options.global_ranks.size()) == size,
                    "lockstep: ", options.global_ranks.size(), " global ranks for a group of ", size);
  if (options.global_ranks.empty()) log::set_rank(rank);
  const Deadline deadline = Deadline::after(options.timeout);
  SharedMapping mapping;
  bool is_new = false;
  try {
    mapping = find_shared_mapping(*store, rank, size, deadline);
    is_new = mapping.transport == nullptr;
    if (is_new) mapping = make_mapping(*store, rank, size, options, deadline);
  } catch (c10::Error& error) {
    error.add_context(options.global_ranks.empty()
                          ? std::string(group_making::kMeetingAdvice)
                          : c10::str("while the members of a group met: its ranks 0 to ", size - 1,
                                     " are ranks ", c10::Join(", ", options.global_ranks), " of the job"));
    throw;
  }
  const auto exchange = group_making::exchange_through_store(
      store, mapping.transport, mapping.members, "lockstep/addresses", "open_backend",
      c10::str("open_backend(between_hosts ", to_string(options.between_hosts), ')'), deadline, kMeeting);
  auto channel = GroupChannel::open(mapping.transport, mapping.members, exchange, deadline);
  auto backend = LockstepBackend::make(std::move(channel), {.name = options.group_name,
                                                            .timeout = options.timeout,
                                                            .global_ranks = options.global_ranks,
                                                            .between_hosts = options.between_hosts,
                                                            .wire_model = mapping.wire_model,
                                                            .make_subclass = options.make_subclass,
                                                            .store = store});
  LOCKSTEP_LOG(kInfo) << "joined group '" << options.group_name << "' as rank " << rank << " of " << size
                      << (backend->getBackendName() == "gloo" ? ", in Gloo's place" : "")
                      << (is_new ? ", with a mapping of its own" : "");
  remember(backend);
  return backend;
}

HostCompression LockstepBackend::between_hosts_of(const Options* options) const {
  const auto* own = dynamic_cast<const GroupOptions*>(options);
  return own != nullptr ? own->between_hosts : settings_.between_hosts;
}

c10::intrusive_ptr<c10d::Backend> LockstepBackend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const std::vector<int>& ranks,
                                                         const c10::intrusive_ptr<Options>& options) {
  check_not_forked();
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) return nullptr;
  OpenBackendOptions of_part{.group_name = options->group_name,
                             .timeout = options->timeout,
                             .between_hosts = between_hosts_of(options.get()),
                             .make_subclass = settings_.make_subclass};
  for (const int rank : ranks) of_part.global_ranks.push_back(settings_.global_ranks.at(rank));
  return open_backend(c10::make_intrusive<c10d::PrefixStore>("lockstep_split", store),
                      static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), of_part);
}

c10::intrusive_ptr<c10d::Backend> LockstepBackend::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                         const c10::intrusive_ptr<Options>& options,
                                                         const int& rank, const int& size) {
  check_not_forked();
  return open_backend(c10::make_intrusive<c10d::PrefixStore>("lockstep_merge", store), rank, size,
                      {.group_name = options->group_name,
                       .timeout = options->timeout,
                       .between_hosts = between_hosts_of(options.get()),
                       .make_subclass = settings_.make_subclass});
}

c10::intrusive_ptr<c10d::Backend> LockstepBackend::shrink(const std::vector<int64_t>& ranks_to_exclude,
                                                          int shrink_flags,
                                                          const c10::intrusive_ptr<Options>& opts_override) {
  const auto shrunk = shrinking::shrink(*this, {ranks_to_exclude.begin(), ranks_to_exclude.end()},
                                        shrink_flags, /*with_control=*/false);
  Settings settings = settings_;
  settings.name += ":shrunk";
  settings.timeout = opts_override ? opts_override->timeout : timeout();
  settings.between_hosts = between_hosts_of(opts_override.get());
  settings.global_ranks.clear();
  for (int rank : shrunk.survivors) settings.global_ranks.push_back(settings_.global_ranks.at(rank));
  auto backend = make(shrunk.channel, std::move(settings));
  remember(backend);
  return backend;
}

void close_all_backends(bool by_exception) {
  Opened& all = opened();
  std::vector<c10::intrusive_ptr<LockstepBackend>> living;
  {
    std::lock_guard lock(all.mutex);
    for (const auto& one : std::exchange(all.backends, {})) {
      if (auto backend = one.lock()) living.push_back(std::move(backend));
    }
  }
  for (const auto& backend : living) backend->close_at_exit(by_exception);
}

}  // namespace lockstep
