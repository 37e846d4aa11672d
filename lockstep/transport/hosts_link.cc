#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/transport/hosts_link.h>

namespace lockstep::transport {
namespace {

// A member's word in the exchange: 20 bits of its number, 10 of the segment in which its block lies, 34 of the cache line.
// The number is for the members on other hosts, the block for those on its own.
constexpr int kLineBits = 34;
constexpr int kSegmentBits = 10;
static_assert(Arena::kMaxSegments <= 1 << kSegmentBits &&
              wire::Tag::kMaxChannel < 1 << (64 - kLineBits - kSegmentBits));

uint64_t pack_word(uint32_t number, const MemoryReference& block) {
  const uint64_t line = block.offset >> 6;
  TORCH_CHECK_WITH(DistBackendError, line >> kLineBits == 0,
                   "a control block lies beyond the first TiB of its segment");
  return (uint64_t{number} << kSegmentBits | block.segment) << kLineBits | line;
}
uint32_t number_in(uint64_t word) {
  return static_cast<uint32_t>(word >> (kLineBits + kSegmentBits));
}
MemoryReference block_in(uint64_t word) {
  return {static_cast<uint32_t>(word >> kLineBits & ((1 << kSegmentBits) - 1)),
          (word & ((uint64_t{1} << kLineBits) - 1)) << 6};
}

}  // namespace

HostsLink::HostsLink(std::shared_ptr<HostTransport> transport, GroupLayout layout, std::vector<int> members)
    : transport_(std::move(transport)),
      layout_(std::move(layout)),
      members_(std::move(members)),
      own_number_(transport_->add_listener(*this)),
      numbers_(members_.size()),
      sent_(members_.size()),
      received_(members_.size()),
      met_(std::make_unique<std::atomic<bool>[]>(members_.size())),
      left_(std::make_unique<std::atomic<bool>[]>(members_.size())) {
  for (const int rank : layout_.counterparts()) met_[rank].store(true, std::memory_order_relaxed);
}

HostsLink::~HostsLink() {
  if (transport_->in_forked_child()) return;
  if (host_) {
    host_->set_on_failure({});
    host_->set_ended_outside({});
  }
  cancel_requests();
  leave();
  transport_->remove_listener(own_number_, failure_message_);
  // The wire rings this rank's bell after a request is done: it no longer does once this is cancelled.
  if (last_) transport_->wire().cancel(last_);
}

std::vector<uint64_t> HostsLink::exchange(const GroupMembers::AddressExchange& all, uint64_t own) {
  const auto words = all(pack_word(own_number_, unpack_reference(own)));
  TORCH_INTERNAL_ASSERT(words.size() == members_.size());
  for (size_t rank = 0; rank < words.size(); ++rank) numbers_[rank] = number_in(words[rank]);
  std::vector<uint64_t> blocks;
  for (const int rank : layout_.neighbours()) blocks.push_back(pack_reference(block_in(words[rank])));
  return blocks;
}

void HostsLink::attach(std::shared_ptr<HostChannel> host) {
  // Each member tells, also what it was told itself: so its counterparts hear of that before they hear that it leaves.
  host->set_on_failure([this](const GroupFailure& failure) {
    cancel_requests();
    tell_failure(failure);
  });
  host->set_ended_outside([this]() -> std::optional<int> {
    for (int rank = 0; rank < layout_.size(); ++rank) {
      if (layout_.host_of[rank] == layout_.host() || !transport_->has_ended(members_[rank])) continue;
      // Of others it may be that the connection alone is lost, which the group does without.
      if (met_[rank].load() || transport_->end_is_certain(members_[rank])) return members_[rank];
    }
    return std::nullopt;
  });
  std::lock_guard lock(mutex_);
  host_ = std::move(host);
  if (early_) host_->fail_from_outside(*early_);
}

// ---- messages

void HostsLink::check(int rank) const {
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < layout_.size() && layout_.host_of[rank] != layout_.host(),
                        "rank ", rank, " is on this host");
}

wire::Handle HostsLink::send(int to, const void* data, size_t bytes) {
  check(to);
  if (!met_[to].load()) greet(to);
  transport_->meet(members_[to]);
  requests_.push_back(
      transport_->wire().send(members_[to], {numbers_[to], sent_[to]++}, data, bytes, &host_->doorbell()));
  return last_ = requests_.back();
}

wire::Handle HostsLink::receive(int from, void* data, size_t bytes) {
  check(from);
  if (!met_[from].load()) greet(from);
  transport_->meet(members_[from]);
  requests_.push_back(transport_->wire().receive(members_[from], {own_number_, received_[from]++}, data,
                                                 bytes, &host_->doorbell()));
  return last_ = requests_.back();
}

/// For some of the operation's requests.
class HostsLink::Wait final : public OutsideWait {
 public:
  Wait(HostsLink& link, const std::vector<wire::Handle>& requests) : link_(link), requests_(requests) {}

  bool complete() override {
    if (come()) return true;
    link_.transport_->wire().progress();
    return come();
  }

  std::optional<Gone> gone() override {
    leavings_ = link_.leavings_.load(std::memory_order_acquire);
    for (const auto& request : requests_) {
      // First look whether it is gone, then whether its message had come before it went.
      const auto gone = gone_peer(*request);
      if (!gone) continue;
      link_.transport_->wire().before_sleep();  // moves all that has come, whichever thread is at it
      if (request->status() != wire::RequestStatus::kSucceeded) return gone;
    }
    return std::nullopt;
  }

  bool has_changed() const override {
    return link_.leavings_.load(std::memory_order_acquire) != leavings_ ||
           std::any_of(requests_.begin(), requests_.end(),
                       [](const auto& request) { return has_failed(*request); });
  }

  std::vector<int> late() const override {
    std::vector<int> late;
    for (const auto& request : requests_) {
      if (!request->done()) late.push_back(request->peer());
    }
    return late;
  }

  void before_sleep() override { link_.transport_->wire().before_sleep(); }

 private:
  static bool has_failed(const wire::Request& request) {
    const wire::RequestStatus status = request.status();
    return status == wire::RequestStatus::kFailed || status == wire::RequestStatus::kCancelled;
  }
  bool come() {
    while (next_ < requests_.size() && requests_[next_]->status() == wire::RequestStatus::kSucceeded) ++next_;
    return next_ == requests_.size();
  }
  std::optional<Gone> gone_peer(const wire::Request& request) const {
    const int peer = request.peer();
    // Once: it may change meanwhile.
    const wire::RequestStatus status = request.status();
    if (status == wire::RequestStatus::kSucceeded) return std::nullopt;
    if (link_.transport_->has_ended(peer)) return Gone{FailureKind::kPeerEnded, peer};
    // Once the transport has heard what it had told before, it says so, too.
    if (status == wire::RequestStatus::kPeerLost) return std::nullopt;
    TORCH_CHECK_WITH(DistBackendError, status == wire::RequestStatus::kPending,
                     "the wire between hosts has failed on this rank: no memory, no "
                     "file descriptors, or a message of another size than was expected from ",
                     link_.transport_->describe(peer));
    const auto rank = std::find(link_.members_.begin(), link_.members_.end(), peer) - link_.members_.begin();
    if (link_.has_left(static_cast<int>(rank))) return Gone{FailureKind::kPeerLeft, peer};
    return std::nullopt;
  }

  HostsLink& link_;
  const std::vector<wire::Handle>& requests_;
  size_t next_ = 0;
  uint32_t leavings_ = 0;
};

void HostsLink::await(const std::vector<wire::Handle>& requests) {
  Wait wait(*this, requests);
  try {
    host_->await_outside(wait);
  } catch (...) {
    cancel_requests();
    throw;
  }
  std::erase_if(requests_, [](const wire::Handle& request) { return request->done(); });
}

void HostsLink::cancel_requests() {
  for (const auto& request : requests_) transport_->wire().cancel(request);
  requests_.clear();
}

// ---- control

void HostsLink::greet(int rank) {
  met_[rank].store(true);
  ControlMessage message;
  message.kind = ControlMessage::Kind::kMeet;
  message.number = own_number_;
  tell(rank, message);
}

void HostsLink::tell(int rank, ControlMessage& message) {
  if (numbers_[rank] == 0 || transport_->has_ended(members_[rank])) return;
  message.group = numbers_[rank];
  transport_->tell(members_[rank], message);
}

void HostsLink::leave() {
  if (has_told_leave_.load()) return;
  // Why the group has failed comes before, also where this rank was in no operation.
  if (host_ && host_->members().failed()) tell_that_it_failed();
  if (has_told_leave_.exchange(true)) return;
  ControlMessage message;
  message.kind = ControlMessage::Kind::kLeave;
  message.sequence = host_ ? host_->sequence() + 1 : 0;
  std::unique_lock lock(mutex_);
  auto failure = failure_message_;
  lock.unlock();
  // All, not only those with which it has messages: they may wait for ranks that wait for it.
  for (int rank = 0; rank < layout_.size(); ++rank) {
    if (layout_.host_of[rank] == layout_.host()) continue;
    if (failure) tell(rank, *failure);  // some have met this one since it was told
    tell(rank, message);
  }
}

void HostsLink::tell_that_it_failed() {
  {
    std::lock_guard lock(mutex_);
    if (failure_message_) return;
  }
  auto failure = host_->failure_for_others();
  // What this rank has succeeded in is none of it elsewhere.
  if (failure.sequence == 0) failure.sequence = host_->next_to_fail();
  tell_failure(failure);
}

void HostsLink::tell_failure(const GroupFailure& failure) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kFailure;
  message.failure = static_cast<uint32_t>(failure.kind);
  message.rank = failure.culprit;
  message.sequence = failure.sequence;
  message.set_text(failure.text);
  {
    std::lock_guard lock(mutex_);
    failure_message_ = message;  // for those that are met later
  }
  for (int rank = 0; rank < layout_.size(); ++rank) {
    if (met_[rank].load()) tell(rank, message);
  }
}

void HostsLink::on_control(int from, const ControlMessage& message) {
  const auto found = std::find(members_.begin(), members_.end(), from);
  if (found == members_.end()) return;
  const int rank = static_cast<int>(found - members_.begin());
  if (message.kind == ControlMessage::Kind::kMeet) {
    met_[rank].store(true);
    // What is told from now on will find it.
    std::unique_lock lock(mutex_);
    auto failure = failure_message_;
    lock.unlock();
    if (failure) tell(rank, *failure);
    if (!has_told_leave_.load()) return;
    ControlMessage answer;
    answer.kind = ControlMessage::Kind::kLeave;
    return tell(rank, answer);
  }
  if (message.kind == ControlMessage::Kind::kLeave) {
    left_[rank].store(true, std::memory_order_release);
    leavings_.fetch_add(1, std::memory_order_release);
    std::lock_guard lock(mutex_);
    if (!host_) return;
    if (message.sequence > 0) host_->note_absence(from, message.sequence);
    host_->members().wake_waiters();
    return;
  }
  const bool known = message.failure > 0 &&
                     message.failure <= static_cast<uint32_t>(FailureKind::kLeftBehind) &&
                     message.rank >= 0 && message.rank < transport_->world_size();
  const GroupFailure told =
      known ? GroupFailure{static_cast<FailureKind>(message.failure), message.rank, message.sequence,
                           message.get_text()}
            : GroupFailure{FailureKind::kAborted, from, 0, "failed on " + transport_->describe(from)};
  std::lock_guard lock(mutex_);
  if (host_) {
    host_->fail_from_outside(told);
  } else if (!early_) {
    early_ = told;
  }
}

}  // namespace lockstep::transport
