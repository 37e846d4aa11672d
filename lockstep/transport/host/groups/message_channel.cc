#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <lockstep/base/monotonic_ns.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/transport/host/groups/message_channel.h>

namespace lockstep::transport {
namespace {

using layout::MessageEvents;
using layout::Transfer;
using layout::TransferState;

/// Whose tell_in_background() this thread serves.
thread_local const MessageChannel* telling_here = nullptr;

/// A thread that has started a request mostly waits for it soon: until then the background thread keeps away.
constexpr auto kGrace = std::chrono::microseconds(100);

}  // namespace

void MessageChannel::Request::enter(Stage next) {
  TORCH_INTERNAL_ASSERT(next > stage);
  stage = next;
}

MessageChannel::MessageChannel(std::shared_ptr<GroupMembers> members,
                               std::optional<WireMessages::Members> members_on_hosts)
    : members_(std::move(members)), rank_(members_on_hosts ? members_on_hosts->rank : members_->rank()) {
  if (members_on_hosts) {
    wire_ = std::make_unique<WireMessages>(members_->transport(), *std::move(members_on_hosts), own_events());
  }
  peers_.resize(wire_ ? wire_->members().places.size() : static_cast<size_t>(members_->size()));
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
  for (int rank = 0; wire_ && rank < static_cast<int>(peers_.size()); ++rank) {
    if ((request->peer == rank || request->peer == kAnySource) && is_remote(rank)) wire_->open(rank);
  }
  requests_.push_back(request);
  if (!request->is_send) {
    for (Peer& peer : peers_) peer.unreadable = nullptr;
    // Among the messages that came before; matched messages leave the list.
    for (auto arrived = arrived_.begin(); arrived != arrived_.end() && request->stage == Stage::kStarted;) {
      arrived = match(*request, *arrived) ? arrived_.erase(arrived) : std::next(arrived);
    }
  }
  advance();
  // A thread that sleeps does not know of the new request, nor that its own may be done.
  if (driving_) own_events().notify();
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
  while (!request->done() && !until.expired()) {
    if (!driving_) {
      drive(lock, request.get(), until);
    } else {
      // The background thread gives way, another waiter advances this request too.
      if (waiters_ == 1) own_events().notify();
      wait_interruptibly(changed_, lock, until);
    }
  }
  return request->done();
}

bool MessageChannel::is_done(const Handle& request) {
  Lock lock(mutex_);
  if (!request->done() && !driving_) {
    advance();
    run_callbacks(lock);
  }
  return request->done();
}

void MessageChannel::set_deadline(const Handle& request, const Deadline& deadline) {
  Lock lock(mutex_);
  if (request->done()) return;
  request->deadline = deadline;
  request->timeout = deadline.remaining();
  if (driving_) own_events().notify();  // a thread that sleeps until the next deadline
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
  const auto error = std::make_exception_ptr(
      ChannelError(FailureKind::kAborted, "the process group was destroyed before this was done"));
  for (const Handle& request : requests_) give_up(*request, error);
  remove_done();
  run_callbacks(lock);
  own_events().notify();
  changed_.notify_all();
  changed_.wait(lock, [this] { return !serving_ && !driving_ && telling_ == 0; });
}

// ---- Which thread advances the requests.

void MessageChannel::advance_in_background() {
  Lock lock(mutex_);
  if (serving_ || !busy() || closed_) return;
  // A task waits for the lock. Without a thread the requests move where they are waited for.
  serving_ = run_in_background([this] { serve(); });
}

void MessageChannel::tell_in_background(std::function<void()> tell) {
  {
    Lock lock(mutex_);
    ++telling_;
  }
  const auto run = [this](std::function<void()>& tell) {
    const auto before = std::exchange(telling_here, this);
    tell();
    tell = nullptr;  // what it holds goes without the lock
    telling_here = before;
    Lock lock(mutex_);
    --telling_;
    changed_.notify_all();
  };
  if (!run_in_background([run, tell]() mutable { run(tell); })) run(tell);
}

bool MessageChannel::is_telling_here() const {
  return telling_here == this;
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

/// Advances everything until `request` is done; without one, until nothing is left or another thread waits.
void MessageChannel::drive(Lock& lock, const Request* request, const Deadline& until) {
  driving_ = true;
  const int64_t began_ns = monotonic_ns();
  const auto stop = c10::make_scope_exit([this] {
    driving_ = false;
    changed_.notify_all();
  });
  while (true) {
    const bool moved = advance();
    run_callbacks(lock);
    if (request != nullptr ? request->done() || until.expired() : !busy() || waiters_ > 0 || closed_) break;
    if (!moved) sleep(lock, until, request, began_ns);
  }
}

/// `request`: the one that the caller waits for since then, if any.
void MessageChannel::sleep(Lock& lock, const Deadline& until, const Request* request, int64_t began_ns) {
  const uint64_t seen = seen_events_;
  const int peer = request != nullptr ? request->peer : kAnySource;
  Deadline nearest = until;
  for (const Handle& request : requests_) {
    if (request->deadline.remaining() < nearest.remaining()) nearest = request->deadline;
  }
  const std::vector<int> awaited = wire_ ? awaited_peers() : std::vector<int>();
  lock.unlock();
  const auto relock = c10::make_scope_exit([&lock] { lock.lock(); });
  if (wire_) {
    const Deadline again = members_->transport().expect(awaited);
    if (again.remaining() < nearest.remaining()) nearest = again;
  }
  MessageEvents& own = own_events();
  std::optional<RecordedWait> recorded;
  wait_until(
      own.doorbell, request == nullptr ? background_policy_ : foreground_policy_, nearest,
      [&] {
        if (events() != seen) return true;
        if (wire_) wire_->progress();
        return wire_ && events() != seen;
      },
      [&] {
        if (wire_) wire_->before_sleep();
        if (peer != kAnySource && !recorded) {
          members_->record_wait_for(recorded, transport_rank(peer), members_->rank(), &own.count, seen + 1,
                                    began_ns);
        }
      });
}

/// The transport's ranks with which requests are in progress.
std::vector<int> MessageChannel::awaited_peers() const {
  std::vector<int> awaited;
  for (const Handle& request : requests_) {
    if (request->peer != kAnySource) {
      awaited.push_back(transport_rank(request->peer));
      continue;
    }
    for (int peer = 0; peer < static_cast<int>(peers_.size()); ++peer)
      awaited.push_back(transport_rank(peer));
  }
  return awaited;
}

uint64_t MessageChannel::events() const {
  // Acquire: what was changed before an event was counted is visible to a thread that sees the count.
  return own_events().count.load(std::memory_order_acquire);
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
    if (!request->done()) moved |= advance(*request);
  }
  if (!moved) moved = end_hopeless();
  remove_done();
  return moved;
}

/// What this rank lacks for one message fails that message alone: not another one's caller, nor the thread.
bool MessageChannel::advance(Request& request) {
  try {
    return request.is_send ? advance_send(request) : advance_receive(request);
  } catch (...) {
    give_up(request, std::current_exception());
    return true;
  }
}

void MessageChannel::remove_done() {
  requests_.remove_if([](const Handle& request) { return request->done(); });
  given_up_.remove_if([this](Transfer* transfer) {
    if (transfer->state.load(std::memory_order_acquire) != TransferState::kDropped) return false;
    members_->transport().arena().deallocate(transfer);
    return true;
  });
}

void MessageChannel::finish(Request& request, std::exception_ptr error) {
  request.enter(Stage::kDone);
  request.error = std::move(error);
  if (request.on_done) {
    auto same = std::find_if(requests_.begin(), requests_.end(),
                             [&](const Handle& handle) { return handle.get() == &request; });
    finished_.push_back(*same);
  }
  changed_.notify_all();
}

}  // namespace lockstep::transport
