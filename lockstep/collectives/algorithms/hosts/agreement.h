#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/transport/group_channel.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// Small data that travel with the agreement, so that their operation takes one round trip a level: what the members
/// have announced as their payloads.
class AgreementPayload {
 public:
  /// The size of what a host says with its call.
  static constexpr size_t kHostBytes = size_t{32} << 10;
  static_assert(kHostBytes >= transport::layout::kPartialBytes);

  virtual ~AgreementPayload() = default;
  /// For the payloads of a host of more than eight members, if any.
  virtual const transport::PayloadCombiner* combiner() const { return nullptr; }
  /// On the leader, after the announcements of its host: what it says for them. Returns its bytes.
  virtual size_t combine_host(void* part, transport::HostChannel& host) const = 0;
  /// On each leader: the result, at most kPayloadBytes, of all hosts' parts in host order. The parts stay as long as the
  /// result, and its members see them at the same distance from it.
  virtual void finish_hosts(void* result, const std::vector<const void*>& parts) const = 0;
};

/// The phase of an operation over hosts in which all ranks learn that all called the same, in two levels: the
/// members of a host by their announcements, the hosts by their leaders. Also what holds to the end of the
/// operation: its scratch. In the head of the scratch a leader answers its neighbours; after that the
/// operation's own begins, at the same place on all members.
class Agreement {
 public:
  explicit Agreement(transport::GroupChannel& channel) : channel_(channel), host_(channel.host()) {}
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;
  /// Messages that an error has left under way are over when the operation is.
  ~Agreement() { channel_.cancel_requests(); }

  /// After the own announcement, of `signature`: waits for the host's, then for the other hosts'. Throws
  /// ChannelError; kMismatch on all ranks of all hosts if two differ, with a text that says who called what.
  /// `scratch_bytes`: what the operation needs of this rank's.
  void reach(const Signature& signature, size_t scratch_bytes, const AgreementPayload* payload = nullptr);
  /// Another one, in an exchange: that each rank takes from each what that one gives. Throws kMismatch on all ranks
  /// if not, naming the first pair.
  void compare_sizes(const Exchange& exchange);
  /// What that needs of the scratch.
  static size_t comparison_bytes(const transport::GroupChannel& channel);

  /// The payloads' result. Stays until the next operation is announced.
  const std::byte* result() { return answer()->body; }
  /// The operation's own scratch on this rank, and on another of this host.
  std::byte* scratch() { return scratch_of(host_.rank()); }
  std::byte* scratch_of(int place) { return host_.scratch_of(place) + sizeof(Answer); }

 private:
  /// What the leader found out.
  struct alignas(64) Answer {
    uint64_t refusal_bytes;  // of the text at `body`; 0: all agree
    alignas(64) std::byte body[transport::HostChannel::kPayloadBytes];
  };

  bool leads() const { return host_.rank() == 0; }
  Answer* answer() { return reinterpret_cast<Answer*>(host_.scratch_of(0)); }
  /// On the leader: what the others learn by follow(); empty text: agreed.
  void write_answer(const std::string& refusal);
  /// Waits for the leader's answer; throws if it refuses.
  void follow();
  std::string gather_calls(const Signature& signature, const AgreementPayload* payload);
  std::string gather_sizes();

  transport::GroupChannel& channel_;
  transport::HostChannel& host_;
};

}  // namespace lockstep::collectives::internal::algorithms::hosts
