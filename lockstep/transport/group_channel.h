#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/transport/group_layout.h>
#include <lockstep/transport/host/groups/host_channel.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport {

class HostsLink;

/// One process group as one of its ranks sees it: the channel of its members on this host (HostChannel), and for a group
/// over several hosts the messages between them.
///
/// An operation is that of the host's channel: host().begin() → announce() → … → commit(). Over hosts, messages between
/// hosts come before the commit: each rank that has messages waits for them by await(), so that a host commits after all
/// its members have what they need. A failure on one host is told to the others; there it fails the operation in
/// progress, or the next one. Between hosts an operation may so succeed on one and fail on another: each rank gets a
/// result or an error, never wrong data.
///
/// Ranks are group ranks. Threads as for HostChannel.
class GroupChannel {
 public:
  using AddressExchange = GroupMembers::AddressExchange;

  /// Collective over `members` (transport ranks, in group order, this one among them). `exchange` is used no more once
  /// open() has returned on any member. Throws what `exchange` throws, and c10::DistBackendError or DistTimeoutError if a
  /// member fails while the group is being made.
  static std::shared_ptr<GroupChannel> open(std::shared_ptr<HostTransport> transport,
                                            const std::vector<int>& members, const AddressExchange& exchange,
                                            const Deadline& deadline);
  /// The channel of a group on one host, around that host's.
  static std::shared_ptr<GroupChannel> of_host(std::shared_ptr<HostChannel> host);
  GroupChannel(const GroupChannel&) = delete;
  GroupChannel& operator=(const GroupChannel&) = delete;
  ~GroupChannel();

  int rank() const { return layout_.rank; }
  int size() const { return layout_.size(); }
  /// The rank within the job, for messages.
  int job_rank(int rank) const { return transport().job_rank(members_[rank]); }
  /// The host of a member, for messages; "" in a job on one host.
  const std::string& host_name(int rank) const { return transport().host_name(members_[rank]); }
  HostTransport& transport() const { return host_->transport(); }
  const GroupLayout& layout() const { return layout_; }
  bool spans_hosts() const { return between_ != nullptr; }
  /// What no other group over hosts of its transport has, the same on all members.
  std::string id() const;
  /// The members on this host; ranks there are places in layout().neighbours().
  HostChannel& host() { return *host_; }
  const HostChannel& host() const { return *host_; }
  const std::shared_ptr<HostChannel>& shared_host() const { return host_; }

  /// Whether a member's process has ended, or is out of reach.
  bool has_ended(int rank) const { return transport().has_ended(members_[rank]); }
  /// The ranks of the transport.
  const std::vector<int>& members() const { return members_; }
  /// Whether a member has left; one on another host, as far as it has told this rank.
  bool has_left(int rank) const;

  // Messages between hosts, for the operation in progress. The two ranks of a pair send and receive in the same order:
  // the n-th receive from a rank takes its n-th send, which may be shorter.
  /// The data must stay until await() has returned or thrown.
  wire::Handle send(int to, const void* data, size_t bytes);
  /// Into memory that this operation alone uses: after an error nothing is written into it any more.
  wire::Handle receive(int from, void* data, size_t bytes);
  /// Waits until all are done. Throws ChannelError as HostChannel's waits do, on all members: a peer that ended or left,
  /// the deadline, a failure on another host. All requests of the operation are over then.
  void await(const std::vector<wire::Handle>& requests);
  /// Ends the operation's requests, for one that ends by an error that is none of the channel's: before its memory goes.
  void cancel_requests();

  /// HostChannel::refuse() on all hosts.
  [[noreturn]] void refuse(const std::string& text) { host_->refuse(text); }

  uint64_t sequence() const { return host_->sequence(); }
  /// Send and receive between members, on whatever hosts.
  MessageChannel& messages() { return messages_ ? *messages_ : host_->messages(); }
  bool failed() const { return host_->failed(); }
  /// With a reason: what the errors of other ranks say of it, after this rank's name.
  void abort(const std::string& reason = "");
  /// abort() with the cause for which another group of this transport has failed. From any thread.
  void fail_as(const GroupChannel& failed);
  void leave();
  std::exception_ptr take_interruption() { return host_->take_interruption(); }
  void release_after_close(std::function<void()> release) { host_->release_after_close(std::move(release)); }

 private:
  GroupChannel(GroupLayout layout, std::vector<int> members, std::unique_ptr<HostsLink> between,
               std::shared_ptr<HostChannel> host);
  void meet(const Deadline& deadline);
  WireMessages::Members members_on_hosts() const;

  const GroupLayout layout_;
  const std::vector<int> members_;      // the transport's ranks
  std::unique_ptr<HostsLink> between_;  // null on one host
  std::shared_ptr<HostChannel> host_;
  std::unique_ptr<MessageChannel> messages_;  // over hosts
};

}  // namespace lockstep::transport
