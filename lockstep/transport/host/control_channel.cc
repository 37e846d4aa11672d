#include <cerrno>
#include <cstring>
#include <sys/eventfd.h>
#include <thread>

#include <c10/util/Exception.h>

#include <lockstep/transport/host/control_channel.h>

namespace lockstep::transport {

ControlChannel::ControlChannel(wire::Wire& wire, int ranks)
    : wire_(wire), peers_(ranks), event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  TORCH_CHECK_WITH(DistBackendError, event_, "eventfd failed: ", std::strerror(errno));
}

void ControlChannel::send(int rank, const ControlMessage& message) {
  const auto kept = std::make_shared<const ControlMessage>(message);
  const uint32_t number = peers_[rank].sent.fetch_add(1, std::memory_order_relaxed);
  wire_.send(rank, {0, number}, kept.get(), kept->bytes(), nullptr, [kept](wire::RequestStatus) {});
}

void ControlChannel::receive_from(int rank) {
  Peer& peer = peers_[rank];
  if (!peer.incoming) peer.incoming = std::make_unique<ControlMessage>();
  *peer.incoming = {};
  wire_.receive(rank, {0, peer.received++}, peer.incoming.get(), sizeof *peer.incoming, nullptr,
                [this, rank](wire::RequestStatus status) {
                  if (status == wire::RequestStatus::kCancelled) return;  // this rank ends
                  std::lock_guard lock(inbox_mutex_);
                  inbox_.emplace_back(rank, status);
                  unheard_.fetch_add(1, std::memory_order_relaxed);
                  ::eventfd_write(event_.get(), 1);
                });
}

void ControlChannel::hear(const std::function<void(int, const ControlMessage&)>& on_message,
                          const std::function<void(int, bool)>& on_lost) {
  eventfd_t ignored = 0;
  ::eventfd_read(event_.get(), &ignored);
  std::vector<std::pair<int, wire::RequestStatus>> inbox;
  {
    std::lock_guard lock(inbox_mutex_);
    inbox.swap(inbox_);
  }
  for (const auto& [from, status] : inbox) {
    // An end counts only now, when all is heard that the rank had told before: why a group has failed, say.
    if (status == wire::RequestStatus::kSucceeded) {
      const ControlMessage message = *peers_[from].incoming;
      receive_from(from);
      on_message(from, message);
    } else {
      on_lost(from, status == wire::RequestStatus::kFailed);
    }
    unheard_.fetch_sub(1, std::memory_order_release);
  }
}

void ControlChannel::await_heard() {
  wire_.await_told();
  while (unheard_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
}

uint32_t ControlChannel::add_listener(ControlListener& listener) {
  std::lock_guard lock(listeners_mutex_);
  TORCH_CHECK_WITH(
      DistBackendError, next_number_ <= wire::Tag::kMaxChannel - kChannelsPerGroup,
      "this rank has made so many groups over several hosts that no channel is left for another");
  const uint32_t number = next_number_;
  next_number_ += kChannelsPerGroup;
  listeners_[number] = &listener;
  return number;
}

void ControlChannel::remove_listener(uint32_t number, const std::optional<ControlMessage>& failure_message) {
  std::lock_guard lock(listeners_mutex_);
  listeners_.erase(number);
  if (failure_message) failure_messages_.emplace(number, *failure_message);
}

void ControlChannel::pass_on(int from, const ControlMessage& message) {
  std::lock_guard lock(listeners_mutex_);
  const auto listener = listeners_.find(message.group);
  if (listener != listeners_.end()) return listener->second->on_control(from, message);
  if (message.kind != ControlMessage::Kind::kMeet) return;
  // A group that was closed here.
  ControlMessage answer;
  if (const auto failed = failure_messages_.find(message.group); failed != failure_messages_.end()) {
    answer = failed->second;
    answer.group = message.number;
    send(from, answer);
  }
  answer.kind = ControlMessage::Kind::kLeave;
  answer.sequence = 0;
  answer.group = message.number;
  send(from, answer);
}

}  // namespace lockstep::transport
