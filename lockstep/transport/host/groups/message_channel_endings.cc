// How a MessageChannel's requests end without success.
#include <optional>
#include <sstream>
#include <vector>

#include <lockstep/base/text/format_duration.h>
#include <lockstep/transport/host/groups/message_channel.h>

namespace lockstep::transport {
namespace {

using layout::Transfer;
using layout::TransferState;

}  // namespace

bool MessageChannel::has_left(int rank) const {
  return is_remote(rank) ? wire_->members().has_left(rank) : members_->has_left(place_of(rank));
}

std::string MessageChannel::describe(const std::vector<int>& ranks) const {
  std::vector<int> translated;
  for (const int rank : ranks) translated.push_back(transport_rank(rank));
  return members_->transport().describe(translated);
}

ChannelError MessageChannel::gone_error(int peer) const {
  if (has_left(peer)) {
    return {FailureKind::kPeerLeft,
            describe({peer}) + " has left the group (destroyed it or ended) without its part"};
  }
  return {FailureKind::kPeerEnded, members_->transport().describe_end(transport_rank(peer))};
}

ChannelError MessageChannel::peer_gave_up(const Request& request, const char* doing) const {
  // Where the group has failed, that is why; the peer is not the cause.
  if (members_->failed()) return members_->describe_failure({}, request.timeout);
  return {FailureKind::kPeerLeft, describe({request.peer}) + " gave up " + doing + " it"};
}

int MessageChannel::stopped_cause() const {
  std::vector<int> others;
  for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
    if (peer != rank_ && !has_left(peer) && !has_ended(peer)) others.push_back(transport_rank(peer));
  }
  return members_->transport().find_stopped(others);
}

ChannelError MessageChannel::timeout_error(const Request& request, const std::vector<int>& senders, int cause,
                                           int stopped) const {
  const HostTransport& transport = members_->transport();
  std::ostringstream text;
  text << "timed out after " << format_duration(request.timeout) << " waiting for ";
  if (request.peer == kAnySource) {
    text << "a message from any of " << describe(senders);
  } else {
    text << describe({request.peer});
    if (cause >= 0 && cause != transport_rank(request.peer)) {
      text << ", which waits for " << transport.describe(cause);
    }
  }
  if (stopped >= 0 && stopped == cause) {
    text << ", which is stopped" << transport.in_action(stopped);
  } else {
    const std::string action = cause >= 0 ? transport.in_or_after_action(cause) : "";
    if (!action.empty()) text << ", which was" << action;
    if (stopped >= 0) {
      text << ", and " << transport.describe(stopped) << " is stopped" << transport.in_action(stopped);
    }
  }
  text << "; a late rank may be stopped, slower than the timeout allows, or in another part of the program";
  return {FailureKind::kTimeout, text.str()};
}

MessageChannel::Hopeless MessageChannel::gone(const Request& request, int peer) const {
  // It may have gone because the group has failed, and has told so before.
  if (members_->failed()) return {std::make_exception_ptr(members_->describe_failure({}, request.timeout))};
  return {std::make_exception_ptr(gone_error(peer)), transport_rank(peer)};
}

/// Why the request can't be done any more, if so.
MessageChannel::Hopeless MessageChannel::why_hopeless(const Request& request,
                                                      std::optional<int>& stopped_member) const {
  std::vector<int> senders;  // see timeout_error()
  if (members_->failed()) return {std::make_exception_ptr(members_->describe_failure({}, request.timeout))};
  if (request.peer != kAnySource) {
    const bool is_other = request.peer != rank_;
    if (is_other && (has_left(request.peer) || has_ended(request.peer))) return gone(request, request.peer);
    if (!request.is_send && request.stage == Stage::kStarted && peers_[request.peer].unreadable) {
      return {peers_[request.peer].unreadable};
    }
  } else {
    // A rank that left in good order will send nothing more, but others may; one that died may have been the
    // sender.
    int left = -1;
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer) {
      if (peer == rank_) continue;
      if (has_left(peer)) {
        left = peer;
      } else if (has_ended(peer)) {
        return gone(request, peer);
      } else if (request.stage == Stage::kStarted && peers_[peer].unreadable) {
        return {peers_[peer].unreadable};
      } else {
        senders.push_back(peer);
      }
    }
    if (senders.empty() && left >= 0) return gone(request, left);
  }
  if (!request.deadline.expired()) return {};
  HostTransport& transport = members_->transport();
  int cause = -1;
  if (request.peer != kAnySource && request.peer != rank_) {
    cause = transport.cause_of_waiting({transport_rank(request.peer)});
  }
  // Records may not lead to it: a rank that has given up its own wait for the stopped one has no record, and
  // that of a rank that any event has just woken does not count.
  int stopped = cause;
  if (cause < 0 || !transport.is_stopped(cause)) {
    if (!stopped_member) stopped_member = stopped_cause();
    stopped = *stopped_member;
  }
  return {std::make_exception_ptr(timeout_error(request, senders, cause, stopped)),
          request.peer == kAnySource ? stopped : cause};
}

bool MessageChannel::end_hopeless() {
  bool ended = false;
  std::optional<int> stopped_member;  // asking for it takes time: once for all requests
  for (const Handle& request : requests_) {
    if (request->done()) continue;
    const auto [error, culprit] = why_hopeless(*request, stopped_member);
    if (!error) continue;
    // Look again: its part may have come just before the peer went.
    take_all_arrivals();
    if (!request->done()) {
      const bool moved = (!request->is_send || request->stage == Stage::kPosted) && advance(*request);
      if (!moved && !request->done()) {
        if (culprit >= 0) members_->transport().note_culprit(culprit);
        give_up(*request, error);
      }
    }
    ended = true;
  }
  return ended;
}

void MessageChannel::give_up(Request& request, const std::exception_ptr& error) {
  if (request.done()) return;
  if (request.crossing) {
    // Where the group has failed the peer hears of that, which says more.
    wire_->give_up(*request.crossing, /*tell=*/!members_->failed());
    request.crossing.reset();
  } else if (request.transfer != nullptr) {
    Transfer& transfer = *request.transfer;
    if (request.is_send) {
      if (change(transfer, TransferState::kOffered, TransferState::kGivenUp) ||
          change(transfer, TransferState::kClaimed, TransferState::kGivenUp)) {
        given_up_.push_back(&transfer);  // the receiver may still look at it; so may it at the ring
        if (request.memory != nullptr) {
          members_->release_after_close([arena = members_->transport().shared_arena(),
                                         ring = request.memory] { arena->deallocate(ring); });
          --rings_;
        }
        request.transfer = nullptr;
      } else {
        release_transfer(request);  // done or refused meanwhile; this rank ends its request all the same
      }
    } else {
      transfer.expected_bytes = layout::kReceiverGaveUp;
      if (!change(transfer, TransferState::kClaimed, TransferState::kRefused)) {
        transfer.state.store(TransferState::kDropped, std::memory_order_release);
      }
      request.transfer = nullptr;
    }
    notify(request.peer);
  }
  finish(request, error);
}

}  // namespace lockstep::transport
