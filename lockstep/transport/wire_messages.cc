#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/transport/wire_messages.h>

namespace lockstep::transport {
namespace {

using layout::kInlineBytes;
using layout::kReceiverGaveUp;

/// Messages and offers that a peer has not taken: bounds what waits in its engine.
constexpr uint64_t kNoteWindow = 32;
constexpr size_t kWireChunkBytes = size_t{512} << 10;
/// Chunks on their way: two messages in opposite directions have credits wait behind the other's chunks.
constexpr size_t kWireRingChunks = 8;
/// Rings of one rank in one group at a time: bounds the memory of many large messages in flight.
constexpr int kMaxWireRings = 16;

/// Numbers of notes and of chunks are in one channel of the wire.
constexpr uint32_t kChunkNumbers = uint32_t{1} << 31;

enum class NoteKind : uint32_t { kMessage, kOffer, kTaken, kGo, kCredit, kRefused, kGivenUp, kDone };

size_t chunks_of(const WireTransfer& transfer) {
  return (transfer.kind.bytes + kWireChunkBytes - 1) / kWireChunkBytes;
}
size_t chunk_bytes(const WireTransfer& transfer, size_t chunk) {
  return std::min(kWireChunkBytes, transfer.kind.bytes - chunk * kWireChunkBytes);
}
std::byte* place_in_ring(const WireTransfer& transfer, size_t chunk) {
  return transfer.ring.get() + chunk % kWireRingChunks * kWireChunkBytes;
}

}  // namespace

struct WireMessages::Header {
  NoteKind kind;
  uint32_t type = 0;      // of the elements
  uint64_t transfer = 0;  // the sender's number of it
  int64_t tag = 0;
  uint64_t bytes = 0;         // of the message; kRefused: that were expected
  uint64_t taken = 0;         // messages and offers that the note's sender has taken
  uint64_t action = 0;        // in which it is: HostTransport::action_of()
  uint32_t first_number = 0;  // kGo: of the chunks
};

WireMessages::WireMessages(HostTransport& transport, Members members, layout::MessageEvents& events)
    : transport_(transport),
      members_(std::move(members)),
      events_(events),
      peers_(members_.transport_ranks.size()) {}

WireMessages::~WireMessages() {
  for (Peer& peer : peers_) {
    for (Standing& standing : peer.standing) {
      if (standing.request) transport_.wire().cancel(standing.request);
    }
  }
}

void WireMessages::open(int rank) {
  Peer& peer = peers_[rank];
  if (peer.open) return;
  members_.greet(rank);
  for (Standing& standing : peer.standing) {
    standing.memory = std::make_unique_for_overwrite<std::byte[]>(sizeof(Header) + kInlineBytes);
  }
  for (uint32_t note = 0; note < kStanding; ++note) stand(rank, note);
  peer.open = true;
}

void WireMessages::stand(int rank, uint32_t note) {
  Standing& standing = peers_[rank].standing[note % kStanding];
  standing.request = transport_.wire().receive(
      members_.transport_ranks[rank], {members_.channels[members_.rank], note % kChunkNumbers},
      standing.memory.get(), sizeof(Header) + kInlineBytes, nullptr,
      [this](wire::RequestStatus) { events_.notify(); },
      /*standing=*/true);
}

/// Not tracked: what it holds stays until it has gone.
void WireMessages::note(int to, Header header, const std::byte* payload, size_t bytes) {
  Peer& peer = peers_[to];
  header.taken = peer.told_taken = peer.taken;
  header.action = transport_.action_of(transport_.rank());
  std::shared_ptr<std::byte[]> memory(new std::byte[sizeof(Header) + bytes]);
  std::memcpy(memory.get(), &header, sizeof(Header));
  if (bytes > 0) std::memcpy(memory.get() + sizeof(Header), payload, bytes);
  const wire::Tag tag{members_.channels[to], peer.notes_sent++ % kChunkNumbers};
  transport_.wire().send(members_.transport_ranks[to], tag, memory.get(), sizeof(Header) + bytes, nullptr,
                         [memory](wire::RequestStatus) {});
}

// ---- messages

bool WireMessages::has_room(int to) const {
  return peers_[to].sent - peers_[to].acknowledged < kNoteWindow;
}

void WireMessages::send(int to, int64_t tag, MessageKind kind, const std::byte* data) {
  note(to, {.kind = NoteKind::kMessage, .type = kind.type, .tag = tag, .bytes = kind.bytes}, data,
       kind.bytes);
  ++peers_[to].sent;
}

std::shared_ptr<WireTransfer> WireMessages::offer(int to, int64_t tag, MessageKind kind, std::byte* data) {
  Peer& peer = peers_[to];
  auto transfer = std::make_shared<WireTransfer>(
      WireTransfer{.is_send = true, .peer = to, .id = peer.sent, .kind = kind, .data = data});
  peer.outgoing.emplace(transfer->id, transfer);
  note(to, {.kind = NoteKind::kOffer,
            .type = kind.type,
            .transfer = transfer->id,
            .tag = tag,
            .bytes = kind.bytes});
  ++peer.sent;
  return transfer;
}

bool WireMessages::take(int rank, const std::function<void(Arrival&)>& arrive) {
  Peer& peer = peers_[rank];
  bool moved = false;
  while (peer.open) {
    Standing& standing = peer.standing[peer.notes_taken % kStanding];
    if (!standing.request->done()) break;
    const wire::RequestStatus status = standing.request->status();
    if (status == wire::RequestStatus::kPeerLost) break;  // the transport notices the end of the peer itself
    if (status != wire::RequestStatus::kSucceeded) {
      stand(rank, peer.notes_taken);  // for the next try
      C10_THROW_ERROR(DistBackendError, "the wire can't receive from " +
                                            transport_.describe(members_.transport_ranks[rank]) +
                                            "; see the log for its reason");
    }
    Header header;
    const size_t bytes = standing.request->bytes();
    std::memcpy(&header, standing.memory.get(), sizeof(Header));
    const bool is_whole = bytes >= sizeof(Header) &&
                          (header.kind != NoteKind::kMessage || header.bytes == bytes - sizeof(Header));
    TORCH_CHECK_WITH(DistBackendError, is_whole, transport_.describe(members_.transport_ranks[rank]),
                     " sent a note of ", bytes,
                     " bytes, which is none; do all ranks run the same version of Lockstep?");
    handle(rank, header, standing.memory.get() + sizeof(Header), arrive);
    stand(rank, peer.notes_taken + kStanding);
    ++peer.notes_taken;
    moved = true;
  }
  if (peer.taken - peer.told_taken >= kNoteWindow / 2) note(rank, {.kind = NoteKind::kTaken});
  return moved;
}

void WireMessages::handle(int from, const Header& header, const std::byte* payload,
                          const std::function<void(Arrival&)>& arrive) {
  Peer& peer = peers_[from];
  peer.acknowledged = header.taken;
  transport_.hear_action(members_.transport_ranks[from], header.action);
  const MessageKind kind{header.bytes, header.type};
  // What a transfer is told that is over already means nothing any more.
  const auto outgoing = peer.outgoing.find(header.transfer);
  WireTransfer* sending = outgoing != peer.outgoing.end() ? outgoing->second.get() : nullptr;
  switch (header.kind) {
    case NoteKind::kMessage: {
      Arrival arrival{.from = from, .tag = header.tag, .kind = kind, .payload = payload};
      arrive(arrival);
      ++peer.taken;
      break;
    }
    case NoteKind::kOffer: {
      const auto transfer = peer.incoming.try_emplace(header.transfer, nullptr).first;
      transfer->second = std::make_shared<WireTransfer>(
          WireTransfer{.is_send = false, .peer = from, .id = header.transfer, .kind = kind});
      Arrival arrival{.from = from, .tag = header.tag, .kind = kind, .transfer = transfer->second};
      arrive(arrival);
      ++peer.taken;
      break;
    }
    case NoteKind::kTaken:
      break;
    case NoteKind::kGo:
      if (sending == nullptr) break;
      sending->state = State::kMoving;
      sending->first_number = header.first_number;
      sending->allowed = kWireRingChunks;
      break;
    case NoteKind::kCredit:
      if (sending != nullptr) ++sending->allowed;
      break;
    case NoteKind::kDone:
      if (sending != nullptr) sending->has_arrived = true;
      break;
    case NoteKind::kRefused:
      if (sending == nullptr) break;
      sending->expected = kind;
      end(*sending, State::kRefused);
      break;
    case NoteKind::kGivenUp:
      if (const auto given_up = peer.incoming.find(header.transfer); given_up != peer.incoming.end()) {
        end(*given_up->second, State::kGivenUp);
      }
      break;
  }
}

// ---- larger ones

void WireMessages::claim(WireTransfer& transfer, std::byte* data) {
  transfer.data = data;
  transfer.state = State::kMoving;
}

void WireMessages::refuse(WireTransfer& transfer, MessageKind expected) {
  note(transfer.peer,
       {.kind = NoteKind::kRefused, .type = expected.type, .transfer = transfer.id, .bytes = expected.bytes});
  end(transfer, State::kRefused);
}

bool WireMessages::advance(WireTransfer& transfer) {
  if (transfer.state != State::kMoving) return false;
  return transfer.is_send ? advance_send(transfer) : advance_receive(transfer);
}

bool WireMessages::advance_send(WireTransfer& transfer) {
  bool moved = false;
  while (transfer.begun < std::min(transfer.allowed, chunks_of(transfer))) {
    post_chunk(transfer);
    moved = true;
  }
  while (transfer.state == State::kMoving && chunk_is_done(transfer)) {
    transfer.requests.pop_front();
    ++transfer.ended;
    moved = true;
  }
  if (transfer.state == State::kMoving && transfer.has_arrived && transfer.ended == chunks_of(transfer)) {
    end(transfer, State::kDone);
  }
  return moved || transfer.state != State::kMoving;
}

bool WireMessages::advance_receive(WireTransfer& transfer) {
  Peer& peer = peers_[transfer.peer];
  const size_t chunks = chunks_of(transfer);
  if (transfer.ring == nullptr) {
    if (rings_ >= kMaxWireRings) return false;
    transfer.ring = std::make_unique_for_overwrite<std::byte[]>(
        std::min(transfer.kind.bytes, kWireRingChunks * kWireChunkBytes));
    ++rings_;
    transfer.first_number = peer.chunks;
    peer.chunks += static_cast<uint32_t>(chunks);
    while (transfer.begun < std::min(kWireRingChunks, chunks)) post_chunk(transfer);
    note(transfer.peer,
         {.kind = NoteKind::kGo, .transfer = transfer.id, .first_number = transfer.first_number});
    return true;
  }
  // One at a time, for it is copied under the channel's mutex.
  if (!chunk_is_done(transfer)) return transfer.state != State::kMoving;
  std::memcpy(transfer.data + transfer.ended * kWireChunkBytes, place_in_ring(transfer, transfer.ended),
              chunk_bytes(transfer, transfer.ended));
  transfer.requests.pop_front();
  ++transfer.ended;
  if (transfer.begun < chunks) {
    post_chunk(transfer);
    note(transfer.peer, {.kind = NoteKind::kCredit, .transfer = transfer.id});
  }
  if (transfer.ended == chunks) {
    note(transfer.peer, {.kind = NoteKind::kDone, .transfer = transfer.id});
    end(transfer, State::kDone);
  }
  return true;
}

void WireMessages::post_chunk(WireTransfer& transfer) {
  const int rank = members_.transport_ranks[transfer.peer];
  const size_t chunk = transfer.begun;
  const size_t bytes = chunk_bytes(transfer, chunk);
  const uint32_t number = kChunkNumbers | (transfer.first_number + static_cast<uint32_t>(chunk));
  const auto on_done = [this](wire::RequestStatus) { events_.notify(); };
  wire::Wire& wire = transport_.wire();
  transfer.requests.push_back(
      transfer.is_send ? wire.send(rank, {members_.channels[transfer.peer], number},
                                   transfer.data + chunk * kWireChunkBytes, bytes, nullptr, on_done)
                       : wire.receive(rank, {members_.channels[members_.rank], number},
                                      place_in_ring(transfer, chunk), bytes, nullptr, on_done));
  ++transfer.begun;
}

bool WireMessages::chunk_is_done(WireTransfer& transfer) {
  if (transfer.requests.empty() || !transfer.requests.front()->done()) return false;
  switch (transfer.requests.front()->status()) {
    case wire::RequestStatus::kSucceeded:
      return true;
    case wire::RequestStatus::kPeerLost:
      return false;  // the transport notices the end of the peer itself
    default:
      give_up(transfer, /*tell=*/true);
      transfer.state = State::kFailed;
      return false;
  }
}

void WireMessages::give_up(WireTransfer& transfer, bool tell) {
  if (transfer.state != State::kOffered && transfer.state != State::kMoving) return;
  if (tell && transfer.is_send) note(transfer.peer, {.kind = NoteKind::kGivenUp, .transfer = transfer.id});
  if (tell && !transfer.is_send) {
    note(transfer.peer, {.kind = NoteKind::kRefused, .transfer = transfer.id, .bytes = kReceiverGaveUp});
  }
  end(transfer, State::kGivenUp);
}

void WireMessages::end(WireTransfer& transfer, State state) {
  for (const wire::Handle& request : transfer.requests) transport_.wire().cancel(request);
  transfer.requests.clear();
  if (transfer.ring != nullptr) --rings_;
  transfer.ring = nullptr;
  transfer.state = state;
  const uint64_t id = transfer.id;  // the map may be the last that keeps the transfer
  (transfer.is_send ? peers_[transfer.peer].outgoing : peers_[transfer.peer].incoming).erase(id);
}

}  // namespace lockstep::transport
