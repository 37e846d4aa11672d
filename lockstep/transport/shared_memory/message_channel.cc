#include <algorithm>
#include <cstring>
#include <new>
#include <sstream>
#include <system_error>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <lockstep/base/cpu.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/format_duration.h>
#include <lockstep/base/interrupt.h>
#include <lockstep/base/log.h>
#include <lockstep/base/thread_cache.h>
#include <lockstep/transport/shared_memory/message_channel.h>

namespace lockstep::transport {
namespace {

using layout::Mailbox;
using layout::Message;
using layout::Transfer;
using layout::TransferState;

constexpr size_t kRingBytes = layout::kRingChunkBytes * layout::kRingChunks;
/// Rings of one rank in one group at a time: bounds the memory of many large messages in flight.
constexpr int kMaxRings = 16;
/// Copied at once under the mutex.
constexpr size_t kPieceBytes = size_t{1} << 20;
/// Whoever has started a request mostly waits for it soon: until then the background thread keeps away.
constexpr auto kGrace = std::chrono::microseconds(100);
constexpr uint64_t kReceiverGaveUp = ~uint64_t{0};

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// One side's step; false if the other side was faster with another one.
bool change(Transfer& transfer, TransferState from, TransferState to) {
  return transfer.state.compare_exchange_strong(from, to, std::memory_order_acq_rel);
}

}  // namespace

MessageChannel::MessageChannel(std::shared_ptr<GroupMembers> members)
    : members_(std::move(members)), peers_(members_->size()) {
  const int ranks = members_->transport().living_count();
  const int cores = usable_cores();
  foreground_policy_ = choose_wait_policy(ranks, cores, false);
  background_policy_ = choose_wait_policy(ranks, cores, true);
}

MessageChannel::~MessageChannel() {
  if (members_->transport().in_forked_child()) return;
  close();
  // Peers may still read from the mailboxes, and look at transfers that were given up.
  auto arena = members_->transport().shared_arena();
  for (const Peer& peer : peers_) {
    if (peer.outgoing == nullptr) continue;
    members_->release_after_close([arena, mailbox = peer.outgoing] { arena->deallocate(mailbox); });
  }
  for (Transfer* transfer : given_up_) {
    members_->release_after_close([arena, transfer] { arena->deallocate(transfer); });
  }
}

// ---- starting, waiting, ending

MessageChannel::Handle MessageChannel::send(const void* data, MessageKind kind, int to, int64_t tag,
                                            const Deadline& deadline, Callback on_done) {
  return start(std::make_shared<Request>(Request{.is_send = true,
                                                 .data = static_cast<std::byte*>(const_cast<void*>(data)),
                                                 .kind = kind,
                                                 .tag = tag,
                                                 .deadline = deadline,
                                                 .timeout = deadline.remaining(),
                                                 .on_done = std::move(on_done),
                                                 .peer = to}));
}

MessageChannel::Handle MessageChannel::receive(void* data, MessageKind kind, int from, int64_t tag,
                                               const Deadline& deadline, Callback on_done) {
  return start(std::make_shared<Request>(Request{.is_send = false,
                                                 .data = static_cast<std::byte*>(data),
                                                 .kind = kind,
                                                 .tag = tag,
                                                 .deadline = deadline,
                                                 .timeout = deadline.remaining(),
                                                 .on_done = std::move(on_done),
                                                 .peer = from}));
}

MessageChannel::Handle MessageChannel::start(Handle request) {
  TORCH_CHECK_WITH(DistBackendError, !members_->transport().in_forked_child(),
                   "a process group of the parent can't be used in a forked child");
  Lock lock(mutex_);
  if (members_->failed()) throw members_->describe_failure({}, {});
  TORCH_CHECK_WITH(DistBackendError, !closed_, "the process group was destroyed");
  requests_.push_back(request);
  if (!request->is_send) {
    // Among the messages that came before; matched messages leave the list.
    for (auto arrived = arrived_.begin(); arrived != arrived_.end() && !request->posted;) {
      arrived = match(*request, *arrived) ? arrived_.erase(arrived) : std::next(arrived);
    }
  }
  advance();
  // Whoever sleeps does not know of the new request, nor that its own may be done.
  if (driving_) members_->block(members_->rank()).messages.notify();
  run_callbacks(lock);
  return request;
}

bool MessageChannel::wait(const Handle& request, const Deadline& until) {
  Lock lock(mutex_);
  ++waiters_;
  const auto leave = c10::make_scope_exit([this] {
    --waiters_;
    changed_.notify_all();
  });
  while (!request->done && !until.expired()) {
    if (!driving_) {
      drive(lock, request.get(), until);
    } else {
      // The background thread gives way, another waiter advances this request too.
      if (waiters_ == 1) members_->block(members_->rank()).messages.notify();
      wait_interruptibly(changed_, lock, until);
    }
  }
  return request->done;
}

bool MessageChannel::is_done(const Handle& request) {
  Lock lock(mutex_);
  if (!request->done && !driving_) {
    advance();
    run_callbacks(lock);
  }
  return request->done;
}

std::exception_ptr MessageChannel::error(const Handle& request) {
  Lock lock(mutex_);
  return request->error;
}

int MessageChannel::source(const Handle& request) {
  Lock lock(mutex_);
  return request->peer;
}

void MessageChannel::close() {
  Lock lock(mutex_);
  closed_ = true;
  const ChannelError error(FailureKind::kAborted, "the process group was destroyed before this was done");
  for (const Handle& request : requests_) give_up(*request, error);
  remove_done();
  run_callbacks(lock);
  members_->block(members_->rank()).messages.notify();
  changed_.notify_all();
  changed_.wait(lock, [this] { return !serving_ && !driving_ && telling_ == 0; });
}

// ---- who advances

void MessageChannel::advance_in_background() {
  Lock lock(mutex_);
  if (serving_ || !busy() || closed_) return;
  serving_ = true;
  lock.unlock();
  run_in_background([this] { serve(); });
}

void MessageChannel::tell_in_background(std::function<void()> tell) {
  {
    Lock lock(mutex_);
    ++telling_;
  }
  const auto run = [this](std::function<void()>& tell) {
    tell();
    tell = nullptr;  // what it holds goes without the lock
    Lock lock(mutex_);
    --telling_;
    changed_.notify_all();
  };
  try {
    run_in_background([run, tell]() mutable { run(tell); });
  } catch (const std::system_error& error) {
    LOCKSTEP_LOG(kWarning) << "a callback runs in the thread of a message: " << error.what();
    run(tell);
  }
}

void MessageChannel::serve() {
  Lock lock(mutex_);
  changed_.wait_for(lock, kGrace, [this] { return !busy() || closed_; });
  while (busy() && !closed_) {
    if (driving_ || waiters_ > 0) {
      changed_.wait(lock, [this] { return (!driving_ && waiters_ == 0) || !busy() || closed_; });
    } else {
      drive(lock, nullptr, Deadline::never());
    }
  }
  serving_ = false;
  changed_.notify_all();
}

/// Advances everything until `request` is done; without one, until nothing is left or somebody waits.
void MessageChannel::drive(Lock& lock, const Request* request, const Deadline& until) {
  driving_ = true;
  const auto stop = c10::make_scope_exit([this] {
    driving_ = false;
    changed_.notify_all();
  });
  while (true) {
    const bool moved = advance();
    run_callbacks(lock);
    if (request != nullptr ? request->done || until.expired() : !busy() || waiters_ > 0 || closed_) break;
    if (!moved) sleep(lock, until, request == nullptr);
  }
}

void MessageChannel::sleep(Lock& lock, const Deadline& until, bool background) {
  const uint32_t seen = seen_events_;
  Deadline nearest = until;
  for (const Handle& request : requests_) {
    if (request->deadline.remaining() < nearest.remaining()) nearest = request->deadline;
  }
  lock.unlock();
  const auto relock = c10::make_scope_exit([&lock] { lock.lock(); });
  wait_until(members_->block(members_->rank()).messages.doorbell,
             background ? background_policy_ : foreground_policy_, nearest, [&] { return events() != seen; });
}

uint32_t MessageChannel::events() const {
  // Acquire: what was changed before an event was counted is visible to who sees the count.
  return members_->block(members_->rank()).messages.count.load(std::memory_order_acquire);
}

void MessageChannel::run_callbacks(Lock& lock) {
  if (finished_.empty()) return;
  const auto finished = std::exchange(finished_, {});
  lock.unlock();
  for (const Handle& request : finished) std::exchange(request->on_done, nullptr)(request->error);
  lock.lock();
}

/// One round over everything that may have changed; true if anything moved.
bool MessageChannel::advance() {
  // First the count, then what it counts: nothing is overlooked that happens meanwhile.
  seen_events_ = events();
  for (Peer& peer : peers_) peer.full = false;
  bool moved = take_arrivals();
  for (const Handle& request : requests_) {
    if (!request->done) moved |= request->is_send ? advance_send(*request) : advance_receive(*request);
  }
  if (!moved) moved = end_hopeless();
  remove_done();
  return moved;
}

void MessageChannel::remove_done() {
  requests_.remove_if([](const Handle& request) { return request->done; });
  given_up_.remove_if([this](Transfer* transfer) {
    if (transfer->state.load(std::memory_order_acquire) != TransferState::kDropped) return false;
    members_->transport().arena().deallocate(transfer);
    return true;
  });
}

void MessageChannel::finish(Request& request, std::exception_ptr error) {
  request.done = true;
  request.error = std::move(error);
  if (request.on_done) {
    auto same = std::find_if(requests_.begin(), requests_.end(),
                             [&](const Handle& handle) { return handle.get() == &request; });
    finished_.push_back(*same);
  }
  changed_.notify_all();
}

// ---- sending

bool MessageChannel::post(Request& request) {
  Peer& peer = peers_[request.peer];
  Arena& arena = members_->transport().arena();
  if (peer.outgoing == nullptr) {
    auto* memory = arena.allocate(sizeof(Mailbox));
    peer.outgoing = new (memory) Mailbox;  // default-initialised: payload pages stay untouched
    peer.outgoing->sent.store(0, std::memory_order_relaxed);
    peer.outgoing->taken.store(0, std::memory_order_relaxed);
    // Release: who finds the mailbox finds it empty.
    members_->inbox(request.peer, members_->rank())
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
  // Release: who sees the count sees the message, and the data in this rank's arena.
  mailbox.sent.store(sent + 1, std::memory_order_release);
  members_->block(request.peer).messages.notify();
  request.posted = true;
  if (request.transfer == nullptr) finish(request);
  return true;
}

bool MessageChannel::advance_send(Request& request) {
  if (!request.posted) return post(request);
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
      finish(request,
             expected.bytes == kReceiverGaveUp
                 ? std::make_exception_ptr(ChannelError(
                       FailureKind::kPeerLeft, members_->describe({request.peer}) + " gave up receiving it"))
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
  members_->block(request.peer).messages.notify();
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
  for (int from = 0; from < members_->size(); ++from) moved |= take_arrivals_from(from);
  return moved;
}

bool MessageChannel::take_arrivals_from(int from) {
  Peer& peer = peers_[from];
  HostTransport& transport = members_->transport();
  if (peer.incoming == nullptr) {
    const uint64_t word = members_->inbox(members_->rank(), from).load(std::memory_order_acquire);
    if (word == 0) return false;
    peer.incoming = reinterpret_cast<Mailbox*>(transport.address(
        members_->transport_rank(from), unpack_reference(word), Deadline::after(std::chrono::seconds(10))));
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
          transport.address(members_->transport_rank(from), unpack_reference(message.transfer),
                            Deadline::after(std::chrono::seconds(10))));
      if (!offer(arrived)) arrived_.push_back(std::move(arrived));
      continue;
    }
    // Straight from the mailbox to where it is wanted; kept aside only if nobody wants it yet.
    const std::byte* payload = mailbox.payloads[slot].data();
    arrived.inline_data = payload;
    if (offer(arrived)) continue;
    arrived.payload.assign(payload, payload + message.bytes);
    arrived.inline_data = nullptr;
    arrived_.push_back(std::move(arrived));
  }
  mailbox.taken.store(sent, std::memory_order_release);
  members_->block(from).messages.notify();  // the sender may wait for room
  return true;
}

/// Gives a message to the first receive that waits for such a one.
bool MessageChannel::offer(Arrived& arrived) {
  for (const Handle& request : requests_) {
    if (!request->is_send && !request->posted && !request->done && match(*request, arrived)) return true;
  }
  return false;
}

/// True if the message is used up: given to the receive, or worth nothing any more.
bool MessageChannel::match(Request& request, Arrived& arrived) {
  if (request.tag != arrived.tag || (request.peer != kAnySource && request.peer != arrived.from))
    return false;
  const bool fits = request.kind.bytes == arrived.kind.bytes && request.kind.type == arrived.kind.type;
  auto& sender = members_->block(arrived.from).messages;
  if (arrived.transfer != nullptr) {
    Transfer& transfer = *arrived.transfer;
    if (!fits) {
      transfer.expected_bytes = request.kind.bytes;
      transfer.expected_type = request.kind.type;
    }
    if (!change(transfer, TransferState::kOffered,
                fits ? TransferState::kClaimed : TransferState::kRefused)) {
      transfer.state.store(TransferState::kDropped, std::memory_order_release);
      return true;  // the sender has given it up; the receive waits on
    }
    sender.notify();
    request.transfer = arrived.transfer;
  } else if (fits) {
    copy_bytes(request.data, arrived.inline_data != nullptr ? arrived.inline_data : arrived.payload.data(),
               arrived.kind.bytes);
  }
  request.posted = true;
  request.peer = arrived.from;
  if (!fits) {
    finish(request, std::make_exception_ptr(MessageMismatch(arrived.from, arrived.kind, request.kind)));
  } else if (arrived.transfer == nullptr) {
    finish(request);
  }
  return true;
}

bool MessageChannel::advance_receive(Request& request) {
  if (request.transfer == nullptr) return false;
  Transfer& transfer = *request.transfer;
  if (transfer.state.load(std::memory_order_acquire) == TransferState::kGivenUp) {
    transfer.state.store(TransferState::kDropped, std::memory_order_release);
    finish(request, std::make_exception_ptr(ChannelError(
                        FailureKind::kPeerLeft, members_->describe({request.peer}) + " gave up sending it")));
    return true;
  }
  const size_t left = request.kind.bytes - request.moved;
  size_t bytes = 0;
  if (request.memory == nullptr) {
    const uint64_t ring = transfer.ring.load(std::memory_order_acquire);
    if (transfer.direct == 0 && ring == 0) return false;
    const MemoryReference reference =
        transfer.direct != 0 ? MemoryReference{transfer.segment, transfer.offset} : unpack_reference(ring);
    request.memory = members_->transport().address(members_->transport_rank(request.peer), reference,
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
  auto& sender = members_->block(request.peer).messages;
  if (request.moved < request.kind.bytes) {
    if (transfer.direct == 0) {
      transfer.taken.store(request.moved, std::memory_order_release);
      sender.notify();
    }
    return true;
  }
  // The sender may have given up while this was copied; then it is the memory's owner again, and what was
  // read may be torn.
  if (change(transfer, TransferState::kClaimed, TransferState::kDone)) {
    request.transfer = nullptr;
    sender.notify();
    finish(request);
  }
  return true;
}

// ---- giving up

ChannelError MessageChannel::gone_error(int peer) const {
  if (members_->has_left(peer)) {
    return {FailureKind::kPeerLeft,
            members_->describe({peer}) + " has left the group (destroyed it or ended) without its part"};
  }
  return {FailureKind::kPeerEnded, members_->describe_end(peer)};
}

ChannelError MessageChannel::timeout_error(const Request& request) const {
  std::ostringstream text;
  text << "timed out after " << format_duration(request.timeout) << " waiting for ";
  if (request.peer == kAnySource) {
    std::vector<int> others;
    for (int rank = 0; rank < members_->size(); ++rank) {
      if (rank != members_->rank()) others.push_back(rank);
    }
    text << "a message from any of " << members_->describe(others);
  } else {
    text << members_->describe({request.peer});
  }
  text << "; a late one may be stopped, slower than the timeout allows, or in another part of the program";
  return {FailureKind::kTimeout, text.str()};
}

/// Why the request can't be done any more, if so.
std::optional<ChannelError> MessageChannel::why_hopeless(const Request& request) const {
  if (members_->failed()) return members_->describe_failure({}, request.timeout);
  if (request.peer != kAnySource) {
    if (request.peer != members_->rank() && members_->is_gone(request.peer)) return gone_error(request.peer);
  } else {
    // Whoever left in good order will send nothing more, but others may; whoever died may have been the one.
    int left = -1;
    bool all_left = members_->size() > 1;
    for (int peer = 0; peer < members_->size(); ++peer) {
      if (peer == members_->rank()) continue;
      if (members_->has_left(peer)) {
        left = peer;
      } else if (members_->has_ended(peer)) {
        return gone_error(peer);
      } else {
        all_left = false;
      }
    }
    if (all_left) return gone_error(left);
  }
  if (request.deadline.expired()) return timeout_error(request);
  return std::nullopt;
}

bool MessageChannel::end_hopeless() {
  bool ended = false;
  for (const Handle& request : requests_) {
    if (request->done) continue;
    auto why = why_hopeless(*request);
    if (!why) continue;
    // Look again: its part may have come just before the peer went.
    take_arrivals();
    if (!request->done) {
      const bool moved =
          request->is_send ? request->posted && advance_send(*request) : advance_receive(*request);
      if (!moved && !request->done) give_up(*request, *why);
    }
    ended = true;
  }
  return ended;
}

void MessageChannel::give_up(Request& request, const ChannelError& error) {
  if (request.done) return;
  if (request.transfer != nullptr) {
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
      transfer.expected_bytes = kReceiverGaveUp;
      if (!change(transfer, TransferState::kClaimed, TransferState::kRefused)) {
        transfer.state.store(TransferState::kDropped, std::memory_order_release);
      }
      request.transfer = nullptr;
    }
    members_->block(request.peer).messages.notify();
  }
  finish(request, std::make_exception_ptr(error));
}

}  // namespace lockstep::transport
