#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <lockstep/transport/control_message.h>
#include <lockstep/transport/group_layout.h>
#include <lockstep/transport/host/groups/host_channel.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport {

/// What a member of a group over several hosts shares with the members on the others: the numbers of its messages, what
/// it tells them and is told. Ranks are group ranks. For the thread that runs the group's operations, but where it says
/// otherwise.
class HostsLink final : public ControlListener {
 public:
  /// `members`: ranks of the transport.
  HostsLink(std::shared_ptr<HostTransport> transport, GroupLayout layout, std::vector<int> members);
  HostsLink(const HostsLink&) = delete;
  HostsLink& operator=(const HostsLink&) = delete;
  /// leave()
  ~HostsLink() override;

  /// The words of all members for GroupMembers::open() on this host, by way of an exchange between them all.
  std::vector<uint64_t> exchange(const GroupMembers::AddressExchange& all, uint64_t own);
  /// From now on failures are passed on, in both directions.
  void attach(std::shared_ptr<HostChannel> host);

  wire::Handle send(int to, const void* data, size_t bytes);
  wire::Handle receive(int from, void* data, size_t bytes);
  void await(const std::vector<wire::Handle>& requests);
  void cancel_requests();

  uint32_t number_of(int rank) const { return numbers_[rank]; }
  // From any thread:
  bool has_left(int rank) const { return left_[rank].load(std::memory_order_acquire); }
  /// Asks a member with which this rank will have point-to-point messages to tell when it leaves.
  void greet(int rank);
  void leave();
  /// Tells why the group has failed, unless it was told already.
  void tell_that_it_failed();

  void on_control(int from, const ControlMessage& message) override;

 private:
  class Wait;

  void check(int rank) const;
  void tell(int rank, ControlMessage& message);
  void tell_failure(const GroupFailure& failure);

  const std::shared_ptr<HostTransport> transport_;
  const GroupLayout layout_;
  const std::vector<int> members_;
  const uint32_t own_number_;
  std::vector<uint32_t> numbers_;  // by rank, those that each has given this group; 0: unknown yet
  std::shared_ptr<HostChannel> host_;

  std::vector<uint32_t> sent_, received_;  // messages, by rank
  std::vector<wire::Handle> requests_;     // of the operation in progress
  wire::Handle last_;

  std::unique_ptr<std::atomic<bool>[]> met_;   // by rank: those that are told what happens
  std::unique_ptr<std::atomic<bool>[]> left_;  // by rank
  std::atomic<uint32_t> leavings_{0};
  std::atomic<bool> has_told_leave_{false};

  std::mutex mutex_;
  std::optional<GroupFailure> early_;              // told before attach()
  std::optional<ControlMessage> failure_message_;  // that the group has failed
};

}  // namespace lockstep::transport
