#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/transport/group_channel.h>
#include <lockstep/transport/hosts_link.h>

namespace lockstep::transport {

GroupChannel::GroupChannel(GroupLayout layout, std::vector<int> members, std::unique_ptr<HostsLink> between,
                           std::shared_ptr<HostChannel> host)
    : layout_(std::move(layout)),
      members_(std::move(members)),
      between_(std::move(between)),
      host_(std::move(host)) {
  if (between_) messages_ = std::make_unique<MessageChannel>(host_->shared_members(), members_on_hosts());
}

GroupChannel::~GroupChannel() {
  messages_.reset();
  between_.reset();  // tells the other hosts first
}

std::shared_ptr<GroupChannel> GroupChannel::open(std::shared_ptr<HostTransport> transport,
                                                 const std::vector<int>& members,
                                                 const AddressExchange& exchange, const Deadline& deadline) {
  std::vector<int> hosts;
  for (const int member : members) hosts.push_back(transport->layout().host_of[member]);
  const auto own = std::find(members.begin(), members.end(), transport->rank());
  TORCH_INTERNAL_ASSERT(own != members.end());
  auto layout = GroupLayout::make(hosts, static_cast<int>(own - members.begin()));

  AddressExchange on_host = exchange;
  std::unique_ptr<HostsLink> between;
  if (layout.spans_hosts()) {
    between = std::make_unique<HostsLink>(transport, layout, members);
    on_host = [&](uint64_t word) { return between->exchange(exchange, word); };
  } else if (members.size() == 1) {
    on_host = [](uint64_t word) { return std::vector<uint64_t>{word}; };
  }
  std::vector<int> neighbours;
  for (const int rank : layout.neighbours()) neighbours.push_back(members[rank]);
  auto host =
      HostChannel::open_beside(GroupMembers::open(transport, std::move(neighbours), on_host, deadline));
  try {
    if (between) between->attach(host);
    host->join(deadline);
    std::shared_ptr<GroupChannel> channel(
        new GroupChannel(std::move(layout), members, std::move(between), std::move(host)));
    if (channel->spans_hosts()) channel->meet(deadline);
    return channel;
  } catch (const ChannelError& error) {
    const std::string text = "making the process group failed on rank " +
                             std::to_string(transport->job_rank(transport->rank())) + ": " + error.what();
    if (error.kind() == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text);
    C10_THROW_ERROR(DistBackendError, text);
  }
}

std::shared_ptr<GroupChannel> GroupChannel::of_host(std::shared_ptr<HostChannel> host) {
  std::vector<int> members;
  for (int rank = 0; rank < host->size(); ++rank) members.push_back(host->members().transport_rank(rank));
  auto layout = GroupLayout::make(std::vector<int>(members.size(), 0), host->rank());
  return std::shared_ptr<GroupChannel>(
      new GroupChannel(std::move(layout), std::move(members), nullptr, std::move(host)));
}

/// As HostChannel::join(), over hosts: an operation of each host, which ends once the first members of all have met.
void GroupChannel::meet(const Deadline& deadline) {
  host_->begin(deadline, /*background=*/false);
  host_->announce({});
  host_->await_announcements();
  if (layout_.place() == 0) {
    const std::byte hello{};
    std::vector<std::byte> hellos(layout_.hosts.size());
    std::vector<wire::Handle> requests;
    for (size_t other = 0; other < layout_.hosts.size(); ++other) {
      if (static_cast<int>(other) == layout_.host()) continue;
      const int first = layout_.hosts[other].front();
      requests.push_back(receive(first, &hellos[other], 1));
      requests.push_back(send(first, &hello, 1));
    }
    await(requests);
  }
  host_->publish(HostChannel::Flag::kDone, host_->sequence());
  host_->await_all(HostChannel::Flag::kDone, host_->sequence());
  host_->commit();
}

// Each rank counts its groups, so the first member's number for this one is given once.
std::string GroupChannel::id() const {
  return std::to_string(members_.front()) + '.' + std::to_string(between_->number_of(0));
}

bool GroupChannel::has_left(int rank) const {
  if (layout_.host_of[rank] != layout_.host()) return between_->has_left(rank);
  return host_->members().has_left(layout_.place_of[rank]);
}

wire::Handle GroupChannel::send(int to, const void* data, size_t bytes) {
  return between_->send(to, data, bytes);
}
wire::Handle GroupChannel::receive(int from, void* data, size_t bytes) {
  return between_->receive(from, data, bytes);
}
void GroupChannel::await(const std::vector<wire::Handle>& requests) {
  between_->await(requests);
}
void GroupChannel::cancel_requests() {
  if (between_) between_->cancel_requests();
}

WireMessages::Members GroupChannel::members_on_hosts() const {
  WireMessages::Members all;
  all.rank = layout_.rank;
  all.transport_ranks = members_;
  for (int rank = 0; rank < size(); ++rank) {
    all.places.push_back(layout_.host_of[rank] == layout_.host() ? layout_.place_of[rank] : -1);
    all.channels.push_back(between_->number_of(rank) + 1);  // operations have the first
  }
  all.has_left = [link = between_.get()](int rank) { return link->has_left(rank); };
  all.greet = [link = between_.get()](int rank) { link->greet(rank); };
  return all;
}

void GroupChannel::abort(const std::string& reason) {
  host_->abort(reason);
  if (between_) between_->tell_that_it_failed();
}

void GroupChannel::fail_as(const GroupChannel& failed) {
  GroupFailure failure = failed.host_->failure_for_others();
  failure.sequence = 0;  // whatever is in progress
  host_->fail_from_outside(failure);
  if (between_) between_->tell_that_it_failed();
}

void GroupChannel::leave() {
  host_->leave();
  if (between_) between_->leave();
}

}  // namespace lockstep::transport
