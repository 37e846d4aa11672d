#include <c10/util/Exception.h>

#include <lockstep/transport/wire/ucx_engine.h>

#if LOCKSTEP_UCX
#include <algorithm>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <new>
#include <poll.h>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/transport/internal/ucx_library.h>
#include <lockstep/transport/internal/ucx_worker.h>

namespace lockstep::transport::wire {

using internal::UcxLibrary;
using internal::UcxWorker;

namespace {

class UcxEngine;
struct UcxPeer;

/// A message, from its start until UCX has done with it, which may be after its operation is done.
///
/// UCX takes and brings the bytes by pack() and unpack() (a generic datatype), not by itself: it can't cancel
/// a send, nor a receive of which a part has come, but functions of ours can be told to let the memory be.
struct UcxTransfer {
  UcxPeer* peer = nullptr;
  Operation* operation = nullptr;  // none once it is done
  bool is_send = false;
  bool is_data = false;       // not a control message
  std::byte* data = nullptr;  // null: no longer to be touched
  size_t bytes = 0;
  size_t moved = 0;                  // of a receive: how far; what UCX tells of it is not always set
  std::vector<std::byte> copy = {};  // of a cancelled send
  void* request = nullptr;
  std::list<UcxTransfer>::iterator place = {};
};

struct UcxPeer {
  /// What this rank has sent. In the order in which they follow each other; some may be left out.
  enum class Phase : uint8_t {
    kSilent,          // no message
    kSpeaking,        // messages
    kAwaitingAnswer,  // its farewell after them
    kAnswered,        // and the peer has said that it has all
    kLost,            // the connection is lost, or was closed: nothing more is sent or received
  };

  UcxEngine* engine = nullptr;
  int rank = -1;
  std::string address = {};
  ucp_ep_h endpoint = nullptr;
  Phase phase = Phase::kSilent;
  bool has_left = false;      // the peer has said farewell
  uint8_t word = 0;           // a UcxWord that has come
  void* listening = nullptr;  // the receive of the next
  std::list<UcxTransfer> transfers = {};

  bool lost() const { return phase == Phase::kLost; }
  /// The one place where the phase changes, which never goes back.
  void enter(Phase next) {
    TORCH_INTERNAL_ASSERT(next > phase);
    phase = next;
  }
};

// UCX's tags: channel, sender, number.
constexpr int kUcxNumberBits = 32;
constexpr int kUcxRankBits = 12;
static_assert(Engine::kMaxRanks == 1 << kUcxRankBits);
constexpr uint32_t kUcxOwnChannel = Tag::kMaxChannel + 1;

uint64_t ucx_tag(int sender, Tag tag) {
  return uint64_t{tag.channel} << (kUcxNumberBits + kUcxRankBits) |
         static_cast<uint64_t>(sender) << kUcxNumberBits | tag.number;
}

/// A word from engine to engine, as a message of one byte.
enum class UcxWord : uint8_t {
  kHello,     // connects a rank that only receives: it could not see its peer's end otherwise
  kFarewell,  // the last message: answer it
  kAnswer,    // all that came before the farewell is here
};

class UcxEngine final : public Engine {
 public:
  UcxEngine(const UcxLibrary& ucx, int rank, const UcxOptions& options)
      : ucx_(ucx), rank_(rank), setup_(ucx, options.interface, kTransferType) {}
  ~UcxEngine() override;

  std::string describe() const override { return setup_.description(); }
  std::string address() const override { return setup_.address(); }
  void connect(int rank, const std::string& address) override;
  void send(Operation& operation, Tag tag, const void* data, size_t bytes) override;
  void receive(Operation& operation, Tag tag, void* data, size_t bytes) override;
  void cancel(Operation& operation) override;
  void abandon(int rank, const std::string& reason) override;
  bool progress() override;
  bool arm() override { return words_.empty() && errors_.empty() && ucx_.ucp_worker_arm(worker_) == UCS_OK; }
  int event_fd() const override { return setup_.event_fd(); }

 private:
  bool ensure_endpoint(UcxPeer& peer);
  UcxTransfer& add_transfer(UcxPeer& peer, Operation& operation, bool is_send, const void* data,
                            size_t bytes);
  void end_transfer(UcxTransfer& transfer, ucs_status_t status);
  void detach(UcxTransfer& transfer, RequestStatus status);
  void send_word(UcxPeer& peer, UcxWord word);
  void listen_for_word(UcxPeer& peer);
  void heed_words();
  void heed_errors();
  void lose(UcxPeer& peer, const std::string& reason);
  void close_endpoint(UcxPeer& peer);
  void progress_until(const Deadline& deadline, const std::function<bool()>& done);

  static void* start_pack(void*, const void* transfer, size_t) { return const_cast<void*>(transfer); }
  static void* start_unpack(void*, void* transfer, size_t) { return transfer; }
  static size_t packed_size(void* transfer) { return static_cast<UcxTransfer*>(transfer)->bytes; }
  static size_t pack(void* transfer, size_t offset, void* to, size_t most);
  static ucs_status_t unpack(void* transfer, size_t offset, const void* from, size_t bytes);
  static void end_packing(void*) {}
  static constexpr ucp_generic_dt_ops_t kTransferType{start_pack, start_unpack, packed_size,
                                                      pack,       unpack,       end_packing};
  static void on_sent(void* request, ucs_status_t status, void* transfer);
  static void on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* transfer);
  static void on_word_sent(void* request, ucs_status_t status, void* engine);
  static void on_word(void* request, ucs_status_t status, const ucp_tag_recv_info_t* info, void* peer);
  static void on_closed(void* request, ucs_status_t status, void* peer);
  static void on_error(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  const UcxLibrary& ucx_;
  const int rank_;
  std::map<int, UcxPeer> peers_;
  uint64_t ended_ = 0;  // calls from UCX that a message is over: may come before it returns the message
  // Noted in calls from UCX, and heeded outside of it.
  std::vector<UcxPeer*> words_;
  std::vector<std::pair<UcxPeer*, ucs_status_t>> errors_;
  const UcxWorker setup_;  // goes before what is above: it may give messages back
  const ucp_worker_h worker_ = setup_.worker();
};

UcxEngine::~UcxEngine() {
  on_done = nullptr;
  on_peer_lost = nullptr;
  for (auto& [rank, peer] : peers_) {
    for (auto at = peer.transfers.begin(); at != peer.transfers.end();) {
      UcxTransfer& transfer = *at++;
      if (transfer.operation != nullptr) cancel(*transfer.operation);
    }
  }
  // The end of a connection may destroy what is still under way, so the others say when they have it.
  for (auto& [rank, peer] : peers_) {
    if (peer.phase != UcxPeer::Phase::kSpeaking) continue;
    peer.enter(UcxPeer::Phase::kAwaitingAnswer);
    send_word(peer, UcxWord::kFarewell);
  }
  const auto each = [this](auto is_done) {
    return std::all_of(peers_.begin(), peers_.end(),
                       [&](const auto& entry) { return is_done(entry.second); });
  };
  progress_until(Deadline::after(std::chrono::seconds(1)), [&] {
    return each([](const UcxPeer& peer) { return peer.phase != UcxPeer::Phase::kAwaitingAnswer; });
  });
  for (auto& [rank, peer] : peers_) {
    if (!peer.lost()) lose(peer, "");
  }
  // What UCX does not give back by then, a message that has come in part, goes with the worker.
  progress_until(Deadline::after(std::chrono::milliseconds(100)), [&] {
    return each([](const UcxPeer& peer) { return peer.transfers.empty() && peer.endpoint == nullptr; });
  });
}

void UcxEngine::progress_until(const Deadline& deadline, const std::function<bool()>& done) {
  while (!done() && !deadline.expired()) {
    if (progress() || !arm()) continue;
    pollfd events{setup_.event_fd(), POLLIN, 0};
    ::poll(&events, 1, deadline.poll_milliseconds());
  }
}

void UcxEngine::connect(int rank, const std::string& address) {
  TORCH_CHECK_WITH(DistBackendError, rank >= 0 && rank < kMaxRanks, "rank ", rank,
                   ": a job over several hosts has at most ", kMaxRanks, " ranks");
  UcxPeer& peer = peers_[rank];
  peer.engine = this;
  peer.rank = rank;
  peer.address = address;
  listen_for_word(peer);
}

/// False if the peer is lost, or is found to be.
bool UcxEngine::ensure_endpoint(UcxPeer& peer) {
  if (peer.lost() || peer.endpoint != nullptr) return !peer.lost();
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {on_error, &peer};
  const ucs_status_t status = ucx_.ucp_ep_create(worker_, &params, &peer.endpoint);
  if (status == UCS_OK) return true;
  peer.endpoint = nullptr;
  errors_.emplace_back(&peer, status);
  return false;
}

UcxTransfer& UcxEngine::add_transfer(UcxPeer& peer, Operation& operation, bool is_send, const void* data,
                                     size_t bytes) {
  peer.transfers.emplace_front();
  UcxTransfer& transfer = peer.transfers.front();
  transfer.place = peer.transfers.begin();
  transfer.peer = &peer;
  transfer.operation = &operation;
  transfer.is_send = is_send;
  transfer.data = static_cast<std::byte*>(const_cast<void*>(data));  // of a send, only read
  transfer.bytes = bytes;
  operation.engine_data = &transfer;
  return transfer;
}

void UcxEngine::send(Operation& operation, Tag tag, const void* data, size_t bytes) {
  UcxPeer& peer = peers_.at(operation.peer);
  if (!ensure_endpoint(peer)) return finish(operation, RequestStatus::kPeerLost);
  if (peer.phase == UcxPeer::Phase::kSilent) peer.enter(UcxPeer::Phase::kSpeaking);
  UcxTransfer& transfer = add_transfer(peer, operation, true, data, bytes);
  transfer.is_data = tag.channel != 0;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE;
  params.cb.send = on_sent;
  params.user_data = &transfer;
  params.datatype = setup_.datatype();
  const uint64_t before = ended_;
  void* request = ucx_.ucp_tag_send_nbx(peer.endpoint, &transfer, 1, ucx_tag(rank_, tag), &params);
  if (ended_ != before) return;
  if (UCS_PTR_IS_PTR(request)) {
    transfer.request = request;
    return;
  }
  const ucs_status_t status = UCS_PTR_STATUS(request);
  if (status != UCS_OK && status != UCS_ERR_NO_MEMORY) errors_.emplace_back(&peer, status);
  end_transfer(transfer, status);
}

void UcxEngine::receive(Operation& operation, Tag tag, void* data, size_t bytes) {
  UcxPeer& peer = peers_.at(operation.peer);
  if (peer.endpoint == nullptr && ensure_endpoint(peer)) send_word(peer, UcxWord::kHello);
  UcxTransfer& transfer = add_transfer(peer, operation, false, data, bytes);
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE;
  params.cb.recv = on_received;
  params.user_data = &transfer;
  params.datatype = setup_.datatype();
  const uint64_t before = ended_;
  void* request =
      ucx_.ucp_tag_recv_nbx(worker_, &transfer, 1, ucx_tag(operation.peer, tag), ~uint64_t{0}, &params);
  if (ended_ != before) return;
  if (!UCS_PTR_IS_PTR(request)) return end_transfer(transfer, UCS_PTR_STATUS(request));
  transfer.request = request;
  if (!peer.lost()) return;
  detach(transfer, RequestStatus::kPeerLost);
  ucx_.ucp_request_cancel(worker_, request);
}

/// Ends the operation; UCX goes on with the transfer, which does not touch the operation's memory any more.
void UcxEngine::detach(UcxTransfer& transfer, RequestStatus status) {
  Operation* operation = std::exchange(transfer.operation, nullptr);
  if (transfer.copy.empty()) transfer.data = nullptr;
  if (operation != nullptr) finish(*operation, status);
}

void UcxEngine::cancel(Operation& operation) {
  UcxTransfer& transfer = *static_cast<UcxTransfer*>(operation.engine_data);
  if (!transfer.is_send) {
    void* request = transfer.request;
    detach(transfer, RequestStatus::kCancelled);
    ucx_.ucp_request_cancel(worker_, request);
    return;
  }
  // The receiver may get the message, and must not get anything else.
  try {
    transfer.copy.assign(transfer.data, transfer.data + transfer.bytes);
  } catch (const std::bad_alloc&) {
    return lose(*transfer.peer, "there is no memory to cancel a message to it");
  }
  transfer.data = transfer.copy.data();
  detach(transfer, RequestStatus::kCancelled);
}

void UcxEngine::abandon(int rank, const std::string& reason) {
  UcxPeer& peer = peers_.at(rank);
  if (!peer.lost()) lose(peer, reason);
}

size_t UcxEngine::pack(void* transfer, size_t offset, void* to, size_t most) {
  const auto& self = *static_cast<const UcxTransfer*>(transfer);
  const size_t bytes = std::min(most, self.bytes - offset);
  // Bytes leave as long as the other end makes room for them.
  if (self.is_data) self.peer->engine->note_activity(self.peer->rank);
  if (self.data != nullptr) {
    std::memcpy(to, self.data + offset, bytes);
  } else {
    std::memset(to, 0, bytes);  // its peer is lost
  }
  return bytes;
}

ucs_status_t UcxEngine::unpack(void* transfer, size_t offset, const void* from, size_t bytes) {
  auto& self = *static_cast<UcxTransfer*>(transfer);
  if (offset > self.bytes || bytes > self.bytes - offset) return UCS_ERR_MESSAGE_TRUNCATED;
  self.moved = std::max(self.moved, offset + bytes);
  self.peer->engine->note_activity(self.peer->rank);
  if (self.data != nullptr) std::memcpy(self.data + offset, from, bytes);
  return UCS_OK;
}

void UcxEngine::end_transfer(UcxTransfer& transfer, ucs_status_t status) {
  Operation* operation = transfer.operation;
  const size_t bytes = transfer.is_send ? transfer.bytes : transfer.moved;
  transfer.peer->transfers.erase(transfer.place);
  if (operation == nullptr) return;
  switch (status) {
    case UCS_OK:
      return finish(*operation, RequestStatus::kSucceeded, bytes);
    case UCS_ERR_MESSAGE_TRUNCATED:
    case UCS_ERR_NO_MEMORY:
      return finish(*operation, RequestStatus::kFailed);
    default:
      return finish(*operation, RequestStatus::kPeerLost);
  }
}

void UcxEngine::on_sent(void* request, ucs_status_t status, void* transfer) {
  auto& self = *static_cast<UcxTransfer*>(transfer);
  UcxEngine& engine = *self.peer->engine;
  ++engine.ended_;
  engine.end_transfer(self, status);
  engine.ucx_.ucp_request_free(request);
}

void UcxEngine::on_received(void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* transfer) {
  auto& self = *static_cast<UcxTransfer*>(transfer);
  UcxEngine& engine = *self.peer->engine;
  ++engine.ended_;
  engine.end_transfer(self, status);
  engine.ucx_.ucp_request_free(request);
}

void UcxEngine::on_error(void* peer, ucp_ep_h, ucs_status_t status) {
  auto& self = *static_cast<UcxPeer*>(peer);
  self.engine->errors_.emplace_back(&self, status);
}

void UcxEngine::send_word(UcxPeer& peer, UcxWord word) {
  static constexpr uint8_t kWords[] = {0, 1, 2};
  if (!ensure_endpoint(peer)) return;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.send = on_word_sent;
  params.user_data = this;
  ucx_.ucp_tag_send_nbx(peer.endpoint, &kWords[static_cast<int>(word)], 1,
                        ucx_tag(rank_, {kUcxOwnChannel, 0}), &params);
}

void UcxEngine::on_word_sent(void* request, ucs_status_t, void* engine) {
  static_cast<UcxEngine*>(engine)->ucx_.ucp_request_free(request);
}

void UcxEngine::listen_for_word(UcxPeer& peer) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.cb.recv = on_word;
  params.user_data = &peer;
  const uint64_t before = ended_;
  void* request = ucx_.ucp_tag_recv_nbx(worker_, &peer.word, 1, ucx_tag(peer.rank, {kUcxOwnChannel, 0}),
                                        ~uint64_t{0}, &params);
  if (ended_ != before) return;
  peer.listening = UCS_PTR_IS_PTR(request) ? request : nullptr;
  if (request == nullptr) words_.push_back(&peer);
}

void UcxEngine::on_word(void* request, ucs_status_t status, const ucp_tag_recv_info_t*, void* peer) {
  auto& self = *static_cast<UcxPeer*>(peer);
  ++self.engine->ended_;
  self.listening = nullptr;
  if (status == UCS_OK) self.engine->words_.push_back(&self);
  self.engine->ucx_.ucp_request_free(request);
}

void UcxEngine::heed_words() {
  for (UcxPeer* peer : std::exchange(words_, {})) {
    if (peer->lost()) continue;
    switch (static_cast<UcxWord>(peer->word)) {
      case UcxWord::kHello:
        break;
      case UcxWord::kFarewell:
        peer->has_left = true;
        send_word(*peer, UcxWord::kAnswer);
        break;
      case UcxWord::kAnswer:
        if (peer->phase == UcxPeer::Phase::kAwaitingAnswer) peer->enter(UcxPeer::Phase::kAnswered);
        break;
    }
    listen_for_word(*peer);
  }
}

bool UcxEngine::progress() {
  bool moved = ucx_.ucp_worker_progress(worker_) != 0;
  if (!words_.empty()) {
    heed_words();
    moved = true;
  }
  if (!errors_.empty()) {
    heed_errors();
    moved = true;
  }
  return moved;
}

void UcxEngine::heed_errors() {
  // What lies in the sockets was sent before the connection ended.
  constexpr int kMostRounds = 10'000;
  for (int round = 0; round < kMostRounds && ucx_.ucp_worker_progress(worker_) != 0; ++round) {
  }
  for (const auto& [peer, status] : std::exchange(errors_, {})) {
    if (peer->lost()) continue;
    lose(*peer, peer->has_left
                    ? "it has closed the connection"
                    : std::string("the connection is lost (UCX: ") + ucx_.ucs_status_string(status) + ")");
  }
}

/// Ends all that has to do with a peer. UCX itself never completes receives of a lost one.
void UcxEngine::lose(UcxPeer& peer, const std::string& reason) {
  peer.enter(UcxPeer::Phase::kLost);
  for (auto at = peer.transfers.begin(); at != peer.transfers.end();) {
    UcxTransfer& transfer = *at++;  // which the cancelling may end
    detach(transfer, RequestStatus::kPeerLost);
    if (!transfer.is_send) ucx_.ucp_request_cancel(worker_, transfer.request);
  }
  if (peer.listening != nullptr) ucx_.ucp_request_cancel(worker_, peer.listening);
  if (peer.endpoint != nullptr) close_endpoint(peer);
  if (on_peer_lost) on_peer_lost(peer.rank, reason);
}

void UcxEngine::close_endpoint(UcxPeer& peer) {
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  params.cb.send = on_closed;
  params.user_data = &peer;
  if (!UCS_PTR_IS_PTR(ucx_.ucp_ep_close_nbx(peer.endpoint, &params))) peer.endpoint = nullptr;
}

void UcxEngine::on_closed(void* request, ucs_status_t, void* peer) {
  auto& self = *static_cast<UcxPeer*>(peer);
  self.endpoint = nullptr;
  self.engine->ucx_.ucp_request_free(request);
}

}  // namespace

std::unique_ptr<Engine> make_ucx_engine(int rank, const UcxOptions& options) {
  // UCX connects in a thread that it has once for the process. A forked child lacks it, and nothing would come there.
  static const ForkGuard first_use;
  TORCH_CHECK_WITH(
      DistBackendError, !first_use.in_forked_child(),
      "this process was forked from one that has used UCX, which can't be used in its children: fork "
      "before the parent joins a job over several hosts, or start processes without fork "
      "(multiprocessing's start method \"spawn\")");
  return std::make_unique<UcxEngine>(UcxLibrary::load(options.port_range), rank, options);
}

std::string why_no_ucx() {
  try {
    UcxLibrary::load("");
    return "";
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
}

}  // namespace lockstep::transport::wire

#else

namespace lockstep::transport::wire {

std::unique_ptr<Engine> make_ucx_engine(int, const UcxOptions&) {
  C10_THROW_ERROR(DistBackendError, why_no_ucx());
}

std::string why_no_ucx() {
  return "a job over several hosts needs UCX, and this build of Lockstep has no UCX: install libucx-dev "
         "(Fedora: ucx-devel) and build it again";
}

}  // namespace lockstep::transport::wire

#endif
