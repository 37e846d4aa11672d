// How the messages of a channel move: what MessageChannel's rounds do with each send and each receive.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <lockstep/base/failpoint.h>
#include <lockstep/transport/host/groups/message_channel.h>

namespace lockstep::transport {
namespace {

using layout::kReceiverGaveUp;
using layout::Mailbox;
using layout::Message;
using layout::Transfer;
using layout::TransferState;

constexpr size_t kRingBytes = layout::kRingChunkBytes * layout::kRingChunks;
/// Rings of one rank in one group at a time: bounds the memory of many large messages in flight.
constexpr int kMaxRings = 16;
/// Copied at once under the mutex.
constexpr size_t kPieceBytes = size_t{1} << 20;

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

}  // namespace

// ---- sending

bool MessageChannel::post(Request& request) {
  Peer& peer = peers_[request.peer];
  if (is_remote(request.peer)) {
    peer.full = peer.full || !wire_->has_room(request.peer);
    if (peer.full) return false;
    failpoint::here("send");
    if (request.kind.bytes <= layout::kInlineBytes) {
      wire_->send(request.peer, request.tag, request.kind, request.data);
    } else {
      request.crossing = wire_->offer(request.peer, request.tag, request.kind, request.data);
    }
    request.enter(Stage::kPosted);
    if (!request.crossing) finish(request);
    return true;
  }
  Arena& arena = members_->transport().arena();
  if (peer.outgoing == nullptr) {
    auto* memory = arena.allocate(sizeof(Mailbox));
    peer.outgoing = new (memory) Mailbox;  // default-initialised: payload pages stay untouched
    peer.outgoing->sent.store(0, std::memory_order_relaxed);
    peer.outgoing->taken.store(0, std::memory_order_relaxed);
    // Release: a rank that finds the mailbox finds it empty.
    members_->inbox(place_of(request.peer), members_->rank())
        .store(pack_reference(*arena.find(memory, sizeof(Mailbox))), std::memory_order_release);
  }
  Mailbox& mailbox = *peer.outgoing;
  const uint64_t sent = mailbox.sent.load(std::memory_order_relaxed);
  // Acquire: the receiver has read the slot before it said so.
  peer.full = peer.full || sent - mailbox.taken.load(std::memory_order_acquire) >= layout::kMailboxSlots;
  if (peer.full) return false;  // in this round nothing overtakes what has found no room
  failpoint::here("send");
  const size_t slot = sent % layout::kMailboxSlots;
  Message& message = mailbox.messages[slot];
  message = {request.tag, request.kind.bytes, 0, request.kind.type};
  if (request.kind.bytes <= layout::kInlineBytes) {
    copy_bytes(mailbox.payloads[slot].data(), request.data, request.kind.bytes);
  } else {
    auto* memory = arena.allocate(sizeof(Transfer));
    request.transfer = new (memory) Transfer{};
    const auto reference = arena.find(request.data, request.kind.bytes);
    if (reference) {
      request.transfer->segment = reference->segment;
      request.transfer->offset = reference->offset;
      request.transfer->direct = 1;
    }
    message.transfer = pack_reference(*arena.find(memory, sizeof(Transfer)));
  }
  // Release: a rank that sees the count sees the message, and the data in this rank's arena.
  mailbox.sent.store(sent + 1, std::memory_order_release);
  notify(request.peer);
  request.enter(Stage::kPosted);
  if (request.transfer == nullptr) finish(request);
  return true;
}

bool MessageChannel::advance_send(Request& request) {
  if (request.stage == Stage::kStarted) return post(request);
  if (request.crossing) return advance_crossing(request);
  Transfer& transfer = *request.transfer;
  switch (transfer.state.load(std::memory_order_acquire)) {
    case TransferState::kClaimed:
      return transfer.direct == 0 && fill_ring(request);
    case TransferState::kDone:
      release_transfer(request);
      finish(request);
      return true;
    case TransferState::kRefused: {
      const MessageKind expected{transfer.expected_bytes, transfer.expected_type};
      release_transfer(request);
      finish(request, expected.bytes == kReceiverGaveUp
                          ? std::make_exception_ptr(peer_gave_up(request, "receiving"))
                          : std::make_exception_ptr(MessageMismatch(request.peer, request.kind, expected)));
      return true;
    }
    default:
      return false;
  }
}

bool MessageChannel::fill_ring(Request& request) {
  Transfer& transfer = *request.transfer;
  if (request.memory == nullptr) {
    if (rings_ >= kMaxRings) return false;
    Arena& arena = members_->transport().arena();
    request.memory = arena.allocate(kRingBytes);
    ++rings_;
    transfer.ring.store(pack_reference(*arena.find(request.memory, kRingBytes)), std::memory_order_release);
  }
  // Acquire: the receiver has read what it says it has taken.
  const size_t room = kRingBytes - (request.moved - transfer.taken.load(std::memory_order_acquire));
  const size_t at = request.moved % kRingBytes;
  const size_t bytes =
      std::min({room, request.kind.bytes - request.moved, layout::kRingChunkBytes, kRingBytes - at});
  if (bytes == 0) return false;
  std::memcpy(request.memory + at, request.data + request.moved, bytes);
  request.moved += bytes;
  transfer.filled.store(request.moved, std::memory_order_release);
  notify(request.peer);
  return true;
}

/// Of a send whose receiver will not look at it any more.
void MessageChannel::release_transfer(Request& request) {
  Arena& arena = members_->transport().arena();
  if (request.memory != nullptr) {
    arena.deallocate(request.memory);
    --rings_;
  }
  arena.deallocate(std::exchange(request.transfer, nullptr));
}

// ---- receiving

bool MessageChannel::take_arrivals() {
  bool moved = false;
  for (int from = 0; from < static_cast<int>(peers_.size()); ++from) moved |= take_arrivals_from(from);
  return moved;
}

/// Also what has come to this host, and waits there for a receive of the wire's.
void MessageChannel::take_all_arrivals() {
  constexpr int kMostRounds = 64;  // others may send without end
  for (int round = 0; round < kMostRounds; ++round) {
    if (wire_) wire_->before_sleep();  // moves all, whichever thread is at it
    if (!take_arrivals() || !wire_) return;
  }
}

bool MessageChannel::take_arrivals_from(int from) {
  Peer& peer = peers_[from];
  if (peer.unreadable) return false;
  try {
    return is_remote(from) ? take_remote_arrivals(from) : take_arrivals_of(from, peer);
  } catch (...) {
    peer.unreadable = std::current_exception();
    return true;
  }
}

bool MessageChannel::take_arrivals_of(int from, Peer& peer) {
  HostTransport& transport = members_->transport();
  if (peer.incoming == nullptr) {
    const uint64_t word = members_->inbox(members_->rank(), place_of(from)).load(std::memory_order_acquire);
    if (word == 0) return false;
    peer.incoming = reinterpret_cast<Mailbox*>(transport.address(transport_rank(from), unpack_reference(word),
                                                                 Deadline::after(std::chrono::seconds(10))));
  }
  Mailbox& mailbox = *peer.incoming;
  const uint64_t sent = mailbox.sent.load(std::memory_order_acquire);
  if (peer.taken == sent) return false;
  for (; peer.taken < sent; ++peer.taken) {
    const size_t slot = peer.taken % layout::kMailboxSlots;
    const Message& message = mailbox.messages[slot];
    Arrived arrived{from, message.tag, {message.bytes, message.type}, {}};
    if (message.transfer != 0) {
      arrived.transfer = reinterpret_cast<Transfer*>(
          transport.address(transport_rank(from), unpack_reference(message.transfer),
                            Deadline::after(std::chrono::seconds(10))));
      if (!offer(arrived)) arrived_.push_back(std::move(arrived));
      continue;
    }
    // Straight from the mailbox to where it is wanted; kept aside only if no request wants it yet.
    const std::byte* payload = mailbox.payloads[slot].data();
    arrived.inline_data = payload;
    if (offer(arrived)) continue;
    arrived.payload.assign(payload, payload + message.bytes);
    arrived.inline_data = nullptr;
    arrived_.push_back(std::move(arrived));
  }
  mailbox.taken.store(sent, std::memory_order_release);
  notify(from);  // the sender may wait for room
  return true;
}

bool MessageChannel::take_remote_arrivals(int from) {
  return wire_->take(from, [&](WireMessages::Arrival& arrival) {
    Arrived arrived{
        from, arrival.tag, arrival.kind, {}, arrival.payload, nullptr, std::move(arrival.transfer)};
    if (offer(arrived)) return;
    if (arrived.inline_data != nullptr) {
      arrived.payload.assign(arrival.payload, arrival.payload + arrival.kind.bytes);
      arrived.inline_data = nullptr;
    }
    arrived_.push_back(std::move(arrived));
  });
}

/// Gives a message to the first receive that waits for such a one.
bool MessageChannel::offer(Arrived& arrived) {
  for (const Handle& request : requests_) {
    if (!request->is_send && request->stage == Stage::kStarted && match(*request, arrived)) return true;
  }
  return false;
}

/// True if the message is used up: given to the receive, or worth nothing any more.
bool MessageChannel::match(Request& request, Arrived& arrived) {
  if (request.tag != arrived.tag || (request.peer != kAnySource && request.peer != arrived.from))
    return false;
  const bool fits = request.kind.bytes == arrived.kind.bytes && request.kind.type == arrived.kind.type;
  const bool in_transfer = arrived.transfer != nullptr || arrived.crossing;
  if (in_transfer) {
    if (!match_transfer(request, arrived, fits))
      return true;  // the sender has given it up; the receive waits on
  } else if (fits) {
    copy_bytes(request.data, arrived.inline_data != nullptr ? arrived.inline_data : arrived.payload.data(),
               arrived.kind.bytes);
  }
  request.enter(Stage::kPosted);
  request.peer = arrived.from;
  if (!fits) {
    finish(request, std::make_exception_ptr(MessageMismatch(arrived.from, arrived.kind, request.kind)));
  } else if (!in_transfer) {
    finish(request);
  }
  return true;
}

/// False if the sender has given it up.
bool MessageChannel::match_transfer(Request& request, Arrived& arrived, bool fits) {
  if (arrived.crossing) {
    if (arrived.crossing->state != WireTransfer::State::kOffered) return false;
    if (fits) {
      wire_->claim(*arrived.crossing, request.data);
      request.crossing = arrived.crossing;
    } else {
      wire_->refuse(*arrived.crossing, request.kind);
    }
    return true;
  }
  Transfer& transfer = *arrived.transfer;
  if (!fits) {
    transfer.expected_bytes = request.kind.bytes;
    transfer.expected_type = request.kind.type;
  }
  if (!change(transfer, TransferState::kOffered, fits ? TransferState::kClaimed : TransferState::kRefused)) {
    transfer.state.store(TransferState::kDropped, std::memory_order_release);
    return false;
  }
  notify(arrived.from);
  request.transfer = arrived.transfer;
  return true;
}

bool MessageChannel::advance_receive(Request& request) {
  if (request.crossing) return advance_crossing(request);
  if (request.transfer == nullptr) return false;
  Transfer& transfer = *request.transfer;
  if (transfer.state.load(std::memory_order_acquire) == TransferState::kGivenUp) {
    transfer.state.store(TransferState::kDropped, std::memory_order_release);
    finish(request, std::make_exception_ptr(peer_gave_up(request, "sending")));
    return true;
  }
  const size_t left = request.kind.bytes - request.moved;
  size_t bytes = 0;
  if (request.memory == nullptr) {
    const uint64_t ring = transfer.ring.load(std::memory_order_acquire);
    if (transfer.direct == 0 && ring == 0) return false;
    const MemoryReference reference =
        transfer.direct != 0 ? MemoryReference{transfer.segment, transfer.offset} : unpack_reference(ring);
    request.memory = members_->transport().address(transport_rank(request.peer), reference,
                                                   Deadline::after(std::chrono::seconds(10)));
  }
  if (transfer.direct != 0) {
    bytes = std::min(left, kPieceBytes);
    std::memcpy(request.data + request.moved, request.memory + request.moved, bytes);
  } else {
    const size_t at = request.moved % kRingBytes;
    // Acquire: the sender wrote what it says it has filled.
    bytes = std::min({transfer.filled.load(std::memory_order_acquire) - request.moved,
                      layout::kRingChunkBytes, kRingBytes - at});
    if (bytes == 0) return false;
    std::memcpy(request.data + request.moved, request.memory + at, bytes);
  }
  request.moved += bytes;
  if (request.moved < request.kind.bytes) {
    if (transfer.direct == 0) {
      transfer.taken.store(request.moved, std::memory_order_release);
      notify(request.peer);
    }
    return true;
  }
  // The sender may have given up while this was copied; then it is the memory's owner again, and what was
  // read may be torn.
  if (change(transfer, TransferState::kClaimed, TransferState::kDone)) {
    request.transfer = nullptr;
    notify(request.peer);
    finish(request);
  }
  return true;
}

// ---- to and from other hosts

bool MessageChannel::advance_crossing(Request& request) {
  const std::shared_ptr<WireTransfer> crossing = request.crossing;
  // What this rank gives up as the group fails the peer is not to get afterwards: it is told why instead.
  if (request.is_send && members_->failed()) crossing->allowed = crossing->begun;
  const bool moved = wire_->advance(*crossing);
  std::exception_ptr error;
  switch (crossing->state) {
    case WireTransfer::State::kOffered:
    case WireTransfer::State::kMoving:
      return moved;
    case WireTransfer::State::kDone:
      break;
    case WireTransfer::State::kRefused:
      error = crossing->expected.bytes == kReceiverGaveUp
                  ? std::make_exception_ptr(peer_gave_up(request, "receiving"))
                  : std::make_exception_ptr(MessageMismatch(request.peer, request.kind, crossing->expected));
      break;
    case WireTransfer::State::kGivenUp:
      error = std::make_exception_ptr(peer_gave_up(request, "sending"));
      break;
    case WireTransfer::State::kFailed:
      error = std::make_exception_ptr(
          ChannelError(FailureKind::kAborted,
                       "the wire between this host and that of " + describe({request.peer}) + " has failed"));
      break;
  }
  request.crossing.reset();
  finish(request, error);
  return true;
}

}  // namespace lockstep::transport
