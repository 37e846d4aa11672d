#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/collectives/algorithms/signature.h>
#include <lockstep/collectives/groups/internal/device_backends.h>
#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/rendezvous/store_all_gather.h>

namespace lockstep::collectives::internal::group_making {
namespace {

using transport::ChannelError;
using transport::FailureKind;
using transport::GroupChannel;

/// What is said of a request when the ranks disagree; longer texts are cut.
constexpr size_t kTextBytes = 4096;
constexpr const char* kDifferentGroups =
    "no process group was made, for the ranks asked for different ones: ";

/// The digest that all must have in common, and a character that says whether this rank refuses.
std::string record_of(const GroupRequest& request) {
  return c10::sha1(request.identity).str() + (request.refusal.empty() ? '+' : '-');
}

/// "rank 0: new_group(…); ranks 1 and 2: new_group(…)"
std::string who_said_what(const std::vector<std::string>& texts, const std::vector<int>& ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string text = texts[i].c_str();  // up to the padding
    auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == text; });
    if (same == groups.end()) same = groups.insert(groups.end(), {text, {}});
    same->second.push_back(ranks[i]);
  }
  std::string all;
  for (const auto& [text, who] : groups) all += (all.empty() ? "" : "; ") + name_ranks(who) + ": " + text;
  return all;
}

at::Tensor to_tensor(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

uint64_t word_of(const std::string& bytes) {
  uint64_t word = 0;
  TORCH_INTERNAL_ASSERT(bytes.size() == sizeof word);
  std::memcpy(&word, bytes.data(), sizeof word);
  return word;
}
std::string bytes_of(uint64_t word) {
  std::string bytes(sizeof word, '\0');
  std::memcpy(bytes.data(), &word, sizeof word);
  return bytes;
}

/// Throws once a member has ended. A member that ended when the group was complete had all members' words, so
/// the store may hold them all: it throws at the second call that finds an ended member, after a look at the
/// store.
std::function<void()> watch(std::shared_ptr<transport::HostTransport> transport, std::vector<int> members,
                            std::string call) {
  return [transport = std::move(transport), members = std::move(members), call = std::move(call),
          noticed = false]() mutable {
    transport->expect(members);
    const auto ended = std::find_if(members.begin(), members.end(),
                                    [&](int member) { return transport->has_ended(member); });
    if (ended == members.end()) return;
    TORCH_CHECK_WITH(DistBackendError, !noticed, call, " failed on rank ", transport->rank(), ": ",
                     transport->describe_end(*ended));
    noticed = true;
  };
}

/// Opens the group, unregistered. Collective over the members.
std::shared_ptr<RegisteredGroup> open(const DefaultWorld& world, const GroupPlan& plan,
                                      const GroupChannel::AddressExchange& exchange, Deadline deadline) {
  std::shared_ptr<GroupChannel> channel;
  try {
    failpoint::here("allocate_group");
    channel = GroupChannel::open(world.transport, world.transport_ranks(plan.ranks), exchange, deadline);
  } catch (c10::Error& error) {
    error.add_context("while group '" + plan.name + "' of " + name_ranks(plan.ranks) + " was made");
    throw;
  }
  return group_of(world, plan, std::move(channel));
}

void give_no_address(const Gather& gather) {
  try {
    gather(bytes_of(0));
  } catch (const c10::Error&) {
    // The caller's own error says more.
  }
}

}  // namespace

std::shared_ptr<RegisteredGroup> group_of(const DefaultWorld& world, const GroupPlan& plan,
                                          std::shared_ptr<GroupChannel> channel) {
  const int rank = channel->rank();
  const int size = channel->size();
  auto group = std::make_shared<RegisteredGroup>();
  group->name = plan.name;
  group->first_name = plan.name;
  group->backend_name = plan.backend_name;
  group->ranks = plan.ranks;
  group->backend = c10::make_intrusive<LockstepBackend>(
      std::move(channel), LockstepBackend::Settings{.name = plan.name,
                                                    .timeout = plan.timeout,
                                                    .between_hosts = plan.between_hosts,
                                                    .wire_model = world.wire_model,
                                                    .store = world.world.store});
  auto store = c10::make_intrusive<c10d::PrefixStore>(plan.name + "/", world.world.store);
  group->handle = c10::make_intrusive<c10d::ProcessGroup>(std::move(store), rank, size);
  device_backends::open(*group, world, plan);
  group->handle->setGroupName(plan.name);  // tells the backends, too
  group->handle->setGroupDesc(plan.description);
  return group;
}

std::pair<uint64_t, std::string> parse_store_value(const std::string& value, int rank) {
  uint64_t word = 0;
  const char* end = value.data() + value.size();
  auto [stop, error] = std::from_chars(value.data(), end, word);
  TORCH_CHECK_WITH(DistStoreError, error == std::errc() && stop != end && *stop == ' ' && word != 0,
                   "the store holds ", value.size(), " bytes for rank ", rank,
                   " which no member wrote; do not write to the job's store under lockstep/");
  return {word, std::string(stop + 1, end)};
}

GroupChannel::AddressExchange exchange_through_store(const c10::intrusive_ptr<c10d::Store>& store,
                                                     std::shared_ptr<transport::HostTransport> transport,
                                                     std::vector<int> members, std::string key,
                                                     std::string call, std::string identity,
                                                     Deadline deadline, std::string met_at) {
  return [=](uint64_t own) {
    const auto place = std::find(members.begin(), members.end(), transport->rank());
    const int rank = static_cast<int>(place - members.begin());
    failpoint::here("agree_on_group");
    const auto values = store_all_gather(*store, key, rank, static_cast<int>(members.size()),
                                         std::to_string(own) + ' ' + identity, deadline,
                                         watch(transport, members, call), met_at);
    failpoint::here("join_group");
    std::vector<uint64_t> words;
    std::vector<std::string> identities;
    std::vector<int> ranks;
    for (size_t i = 0; i < members.size(); ++i) {
      auto [word, theirs] = parse_store_value(values[i], members[i]);
      words.push_back(word);
      identities.push_back(std::move(theirs));
      ranks.push_back(transport->job_rank(members[i]));
    }
    const bool same = std::all_of(identities.begin(), identities.end(),
                                  [&](const std::string& theirs) { return theirs == identity; });
    if (!same) {
      keep_store_until_seen(*store, key, rank, static_cast<int>(members.size()));
      C10_THROW_ERROR(DistBackendError, kDifferentGroups + who_said_what(identities, ranks));
    }
    return words;
  };
}

Gather over_control(DefaultWorld& world, std::string call, Deadline deadline) {
  return [&world, call = std::move(call), deadline](const std::string& mine) {
    GroupChannel& channel = *world.control;
    const uint64_t before = channel.sequence();
    std::vector<std::string> all(channel.size(), std::string(mine.size(), '\0'));
    const auto signature = Signature::of(CollectiveKind::kNewGroup, to_tensor(mine));
    const algorithms::Exchange exchange{.gives = {{mine.data(), mine.size()}},
                                        .takes = std::vector<size_t>(all.size(), mine.size())};
    const auto keep = [&](const std::vector<algorithms::Window>& windows) {
      for (size_t rank = 0; rank < windows.size(); ++rank) {
        const auto& window = windows[rank];
        if (window.bytes > 0) std::memcpy(all[rank].data() + window.offset, window.data, window.bytes);
      }
    };
    try {
      algorithms::exchange(channel, {.deadline = deadline, .background = false}, signature, exchange, keep);
    } catch (const ChannelError& error) {
      const std::string text = c10::str(
          call, " failed on rank ", channel.job_rank(channel.rank()), ": ",
          channel.sequence() == before ? "the making of an earlier group had failed: " : "", error.what());
      if (error.kind() == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text);
      C10_THROW_ERROR(DistBackendError, text);
    }
    if (const auto interruption = channel.take_interruption()) std::rethrow_exception(interruption);
    return all;
  };
}

Gather over_group(std::shared_ptr<RegisteredGroup> parent) {
  return [parent = std::move(parent)](const std::string& mine) {
    std::vector<at::Tensor> inputs{to_tensor(mine)};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (size_t i = 0; i < parent->ranks.size(); ++i) outputs[0].push_back(at::empty_like(inputs[0]));
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    parent->backend->allgather(outputs, inputs, options)->wait();
    std::vector<std::string> all;
    for (const at::Tensor& output : outputs[0]) {
      all.emplace_back(static_cast<const char*>(output.const_data_ptr()), mine.size());
    }
    return all;
  };
}

void agree(const Gather& gather, const GroupRequest& request, const std::vector<int>& ranks) {
  failpoint::here("agree_on_group");
  const auto records = gather(record_of(request));
  const bool same = std::all_of(records.begin(), records.end(), [&](const std::string& record) {
    return record == records.front() && record.back() == '+';
  });
  if (same) return;
  const bool refused =
      std::any_of(records.begin(), records.end(), [](const auto& record) { return record.back() == '-'; });
  std::string text = request.refusal.empty() ? request.text : request.text + " refused: " + request.refusal;
  text.resize(kTextBytes, '\0');
  text.back() = '\0';
  const std::string all = who_said_what(gather(text), ranks);
  TORCH_CHECK_VALUE(!refused, "no process group was made: ", all);
  C10_THROW_ERROR(DistBackendError, c10::str(kDifferentGroups, all,
                                             "; all of them must make the same groups in the same order"));
}

hosts::CostModel agree_on_wire_model(const Gather& gather, const hosts::CostModel& own) {
  std::string bytes(sizeof own, '\0');
  std::memcpy(bytes.data(), &own, sizeof own);
  bytes = gather(bytes).front();
  hosts::CostModel model;
  std::memcpy(&model, bytes.data(), sizeof model);
  return model;
}

std::shared_ptr<RegisteredGroup> open_together(const DefaultWorld& world, const GroupPlan& plan,
                                               const Gather& gather, const std::vector<int>& positions,
                                               Deadline deadline) {
  bool exchanged = positions.size() == 1;  // a group of one needs no addresses
  auto exchange = [&](uint64_t own) {
    exchanged = true;
    const auto records = gather(bytes_of(own));
    failpoint::here("join_group");
    std::vector<uint64_t> words;
    for (size_t i = 0; i < positions.size(); ++i) {
      words.push_back(word_of(records[positions[i]]));
      TORCH_CHECK_WITH(DistBackendError, words.back() != 0, "process group '", plan.name,
                       "' was not made: rank ", plan.ranks[i],
                       " had no memory for it; that rank's own error says more");
    }
    return words;
  };
  try {
    return open(world, plan, exchange, deadline);
  } catch (...) {
    // The others wait for this rank's address: let them know that there is none.
    if (!exchanged) give_no_address(gather);
    throw;
  }
}

void stand_by(const Gather& gather, size_t size) {
  if (size > 1) gather(bytes_of(0));
}

std::shared_ptr<RegisteredGroup> open_through_store(const DefaultWorld& world, const GroupPlan& plan,
                                                    const std::string& key, const std::string& identity,
                                                    Deadline deadline) {
  auto group =
      open(world, plan,
           exchange_through_store(world.world.store, world.transport, world.transport_ranks(plan.ranks), key,
                                  identity, identity, deadline),
           deadline);
  // All members have joined, so all have read the store.
  if (plan.ranks.front() == world.world.rank) {
    forget_store_all_gather(*world.world.store, key, static_cast<int>(plan.ranks.size()));
  }
  return group;
}

std::shared_ptr<GroupChannel> open_control(const DefaultWorld& world, HostCompression between_hosts,
                                           Deadline deadline) {
  const std::vector<int> members = all_ranks(world.world.world_size);
  const auto exchange = exchange_through_store(
      world.world.store, world.transport, members, "lockstep/control", "init_process_group",
      c10::str("init_process_group(between_hosts ", to_string(between_hosts), ')'), deadline,
      world.world.met_at);
  return GroupChannel::open(world.transport, members, exchange, deadline);
}

}  // namespace lockstep::collectives::internal::group_making
