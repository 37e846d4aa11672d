#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sys/eventfd.h>
#include <tuple>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/transport/wire/thread_engine.h>

namespace lockstep::transport::wire {
namespace {

constexpr const char* kThreadClosed = "it has closed the connection";

using MessageKey = std::tuple<int, uint32_t, uint32_t>;  // the sender, channel and number

/// On its way from one rank to another.
struct ThreadMessage {
  MessageKey key;
  const void* data = nullptr;
  size_t bytes = 0;
  std::vector<std::byte> copy = {};  // of a short message, whose data may be gone
  Operation* operation = nullptr;    // the sender's, unless it is done
};

struct PostedReceive {
  Operation* operation;
  void* data;
  size_t bytes;
};

/// One rank's part of the hub.
struct RankBox {
  RankBox() : event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    TORCH_CHECK_WITH(DistBackendError, event, "eventfd failed: ", std::strerror(errno));
  }
  UniqueFd event;
  bool armed = false;
  bool sleeps = false;                                                    // see let_sleep()
  bool news = false;                                                      // for progress()
  std::map<MessageKey, std::deque<std::shared_ptr<ThreadMessage>>> come;  // and not received yet
  std::vector<std::pair<Operation*, RequestStatus>> sent;                 // operations of this rank
  std::vector<std::pair<int, std::string>> losses;                        // to be told
  std::set<int> lost;
  std::set<int> known;  // by connect(); of others nothing is told
};

class Hub final : public ThreadHub {
 public:
  explicit Hub(int ranks) : boxes_(ranks) {}

  std::unique_ptr<Engine> make_engine(int rank) override;
  void disconnect(int rank, int other) override {
    std::lock_guard lock(mutex_);
    disconnect_locked(rank, other, "disconnected");
  }

  void cut(int from, int to) override {
    std::lock_guard lock(mutex_);
    held_.try_emplace({from, to});
  }
  void heal(int from, int to) override {
    std::lock_guard lock(mutex_);
    const auto held = held_.extract({from, to});
    if (held.empty()) return;
    for (const auto& message : held.mapped().messages) deliver(to, message);
    if (held.mapped().end) lose_locked(to, from, kThreadClosed);
  }

  void let_sleep(int rank) override {
    std::lock_guard lock(mutex_);
    boxes_[rank].sleeps = true;
  }

  void disconnect_locked(int rank, int other, const std::string& reason) {
    lose_locked(other, rank, reason);
    lose_locked(rank, other, reason);
  }
  /// `rank` loses the other, which hears of it unless it is cut off.
  void leave_locked(int rank, int other, const std::string& reason) {
    lose_locked(rank, other, reason);
    const auto held = held_.find({rank, other});
    if (held == held_.end()) return lose_locked(other, rank, kThreadClosed);
    held->second.end = true;
  }
  void lose_locked(int rank, int other, const std::string& reason) {
    RankBox& box = boxes_[rank];
    if (box.lost.insert(other).second && box.known.count(other) != 0) tell_loss(box, other, reason);
  }

  /// Unless the way is cut.
  void send_locked(int to, std::shared_ptr<ThreadMessage> message) {
    const auto held = held_.find({std::get<0>(message->key), to});
    if (held == held_.end()) return deliver(to, std::move(message));
    held->second.messages.push_back(std::move(message));
  }
  void deliver(int to, std::shared_ptr<ThreadMessage> message) {
    if (boxes_[to].lost.count(std::get<0>(message->key)) != 0) return;
    boxes_[to].come[message->key].push_back(std::move(message));
    signal(boxes_[to]);
  }

  void tell_loss(RankBox& box, int rank, const std::string& reason) {
    box.losses.emplace_back(rank, reason);
    signal(box);
  }

  void signal(RankBox& box) {
    box.news = true;
    if (!box.armed || box.sleeps) return;
    box.armed = false;
    ::eventfd_write(box.event.get(), 1);
  }

  /// Takes a message that was not received back from its receiver; true if it was.
  bool withdraw(int to, const std::shared_ptr<ThreadMessage>& message) {
    const auto held = held_.find({std::get<0>(message->key), to});
    if (held != held_.end() && std::erase(held->second.messages, message) != 0) return true;
    auto& come = boxes_[to].come;
    const auto found = come.find(message->key);
    if (found == come.end() || std::erase(found->second, message) == 0) return false;
    if (found->second.empty()) come.erase(found);
    return true;
  }

  struct Held {
    std::vector<std::shared_ptr<ThreadMessage>> messages;
    bool end = false;  // and then the sender has closed the connection
  };

  std::mutex mutex_;                          // protects all boxes and messages
  std::map<std::pair<int, int>, Held> held_;  // on ways that are cut: from, to
  std::vector<RankBox> boxes_;
};

class ThreadEngine final : public Engine {
 public:
  ThreadEngine(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  ~ThreadEngine() override {
    std::lock_guard lock(hub_->mutex_);
    for (auto& [operation, message] : long_sends_) hub_->withdraw(operation->peer, message);
    const int ranks = static_cast<int>(hub_->boxes_.size());
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer != rank_) hub_->leave_locked(rank_, peer, kThreadClosed);
    }
    RankBox& box = hub_->boxes_[rank_];
    box.come.clear();
    box.sent.clear();
  }

  std::string describe() const override { return "threads of this process"; }
  std::string address() const override { return std::to_string(rank_); }
  void connect(int rank, const std::string& address) override {
    TORCH_CHECK_WITH(DistBackendError, address == std::to_string(rank), "rank ", rank,
                     " gave the address of rank '", address, "'");
    std::lock_guard lock(hub_->mutex_);
    RankBox& box = hub_->boxes_[rank_];
    box.known.insert(rank);
    if (box.lost.count(rank) != 0) hub_->tell_loss(box, rank, kThreadClosed);
  }

  void send(Operation& operation, Tag tag, const void* data, size_t bytes) override {
    std::unique_lock lock(hub_->mutex_);
    const int to = operation.peer;
    if (hub_->boxes_[rank_].lost.count(to) != 0) {
      lock.unlock();
      return finish(operation, RequestStatus::kPeerLost);
    }
    auto message = std::make_shared<ThreadMessage>();
    message->key = {rank_, tag.channel, tag.number};
    message->data = data;
    message->bytes = bytes;
    const bool eager = bytes <= ThreadHub::kEagerBytes;
    if (eager) {
      const auto* begin = static_cast<const std::byte*>(data);
      message->copy.assign(begin, begin + bytes);
      message->data = message->copy.data();
    } else {
      message->operation = &operation;
      long_sends_.emplace(&operation, message);
    }
    hub_->send_locked(to, std::move(message));
    lock.unlock();
    if (eager) finish(operation, RequestStatus::kSucceeded, bytes);
  }

  void receive(Operation& operation, Tag tag, void* data, size_t bytes) override {
    posted_[{operation.peer, tag.channel, tag.number}].push_back({&operation, data, bytes});
    std::lock_guard lock(hub_->mutex_);
    RankBox& box = hub_->boxes_[rank_];
    if (box.lost.count(operation.peer) != 0) {
      // Of a lost rank there is only what has come.
      match(operation.peer);
      fail_receives(operation.peer);
    } else {
      hub_->signal(box);
    }
  }

  void cancel(Operation& operation) override {
    const auto send = long_sends_.find(&operation);
    if (send != long_sends_.end()) {
      std::lock_guard lock(hub_->mutex_);
      hub_->withdraw(operation.peer, send->second);
      std::erase_if(hub_->boxes_[rank_].sent, [&](const auto& sent) { return sent.first == &operation; });
      long_sends_.erase(send);
    } else {
      for (auto& [key, receives] : posted_) {
        std::erase_if(receives, [&](const PostedReceive& posted) { return posted.operation == &operation; });
      }
    }
    finish(operation, RequestStatus::kCancelled);
  }

  void abandon(int rank, const std::string& reason) override {
    std::unique_lock lock(hub_->mutex_);
    hub_->leave_locked(rank_, rank, reason);
    lock.unlock();
    progress();
  }

  bool progress() override {
    std::lock_guard lock(hub_->mutex_);
    RankBox& box = hub_->boxes_[rank_];
    if (!std::exchange(box.news, false)) return false;
    for (const auto& [operation, status] : std::exchange(box.sent, {})) {
      const size_t bytes = long_sends_.at(operation)->bytes;
      note_activity(operation->peer);
      long_sends_.erase(operation);
      finish(*operation, status, bytes);
    }
    match(-1);
    for (const auto& [rank, reason] : std::exchange(box.losses, {})) {
      std::vector<Operation*> sends;
      for (const auto& [operation, message] : long_sends_) {
        if (operation->peer != rank) continue;
        hub_->withdraw(rank, message);
        sends.push_back(operation);
      }
      for (Operation* operation : sends) {
        long_sends_.erase(operation);
        finish(*operation, RequestStatus::kPeerLost);
      }
      fail_receives(rank);
      if (on_peer_lost) on_peer_lost(rank, reason);
    }
    return true;
  }

  bool arm() override {
    std::lock_guard lock(hub_->mutex_);
    RankBox& box = hub_->boxes_[rank_];
    if (box.news) return false;
    eventfd_t ignored;
    ::eventfd_read(box.event.get(), &ignored);
    box.armed = true;
    return true;
  }

  int event_fd() const override { return hub_->boxes_[rank_].event.get(); }

 private:
  /// Copies what has come (from one rank, or -1) to the receives that wait for it. Under the hub's lock.
  void match(int from) {
    auto& come = hub_->boxes_[rank_].come;
    for (auto at = posted_.begin(); at != posted_.end();) {
      auto& [key, receives] = *at;
      const auto found = from < 0 || std::get<0>(key) == from ? come.find(key) : come.end();
      while (found != come.end() && !receives.empty() && !found->second.empty()) {
        deliver(receives.front(), *found->second.front());
        receives.pop_front();
        found->second.pop_front();
      }
      if (found != come.end() && found->second.empty()) come.erase(found);
      at = receives.empty() ? posted_.erase(at) : std::next(at);
    }
  }

  void deliver(const PostedReceive& receive, const ThreadMessage& message) {
    if (message.operation != nullptr) {
      RankBox& sender = hub_->boxes_[std::get<0>(message.key)];
      sender.sent.emplace_back(message.operation, RequestStatus::kSucceeded);
      hub_->signal(sender);
    }
    if (message.bytes > receive.bytes) return finish(*receive.operation, RequestStatus::kFailed);
    if (message.bytes != 0) std::memcpy(receive.data, message.data, message.bytes);
    note_activity(std::get<0>(message.key));
    finish(*receive.operation, RequestStatus::kSucceeded, message.bytes);
  }

  void fail_receives(int from) {
    for (auto at = posted_.begin(); at != posted_.end();) {
      if (std::get<0>(at->first) != from) {
        ++at;
        continue;
      }
      for (const PostedReceive& posted : at->second) finish(*posted.operation, RequestStatus::kPeerLost);
      at = posted_.erase(at);
    }
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  std::map<MessageKey, std::deque<PostedReceive>> posted_;
  std::map<Operation*, std::shared_ptr<ThreadMessage>> long_sends_;  // that are not done
};

std::unique_ptr<Engine> Hub::make_engine(int rank) {
  return std::make_unique<ThreadEngine>(std::static_pointer_cast<Hub>(shared_from_this()), rank);
}

}  // namespace

std::shared_ptr<ThreadHub> ThreadHub::make(int ranks) {
  return std::make_shared<Hub>(ranks);
}

}  // namespace lockstep::transport::wire
