#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/device/streams.h>
#include <lockstep/parallel/pipeline/internal/tensor_messages.h>

namespace lockstep::pipeline::internal {
namespace {

/// The message in front: four words, the description unless that is too long, and the tensors' bytes if all of them fit.
constexpr int64_t kFrontBytes = 1024;
constexpr int64_t kWordBytes = sizeof(int64_t);
enum FrontWord : int64_t { kTag, kDescriptionWords, kTensors, kHasPayload, kFrontWords };

/// A tensor's description is one word, then its sizes and strides.
constexpr int64_t kDefined = 1;
constexpr int64_t kRequiresGrad = 2;
constexpr int64_t kByLink = 4;
constexpr int kTypeShift = 3;
constexpr int kTypeBits = 8;
constexpr int kDimensionShift = kTypeShift + kTypeBits;

at::Tensor as_sent(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.layout() == c10::kStrided && !tensor.is_quantized(),
      "stages of a pipeline pass each other dense tensors, not sparse or quantized ones; this one is ",
      tensor.toString());
  const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  // Kernels may give other bits for another order in memory, so it is kept; gaps are not.
  return plain.is_non_overlapping_and_dense() ? plain : plain.contiguous();
}

void describe_tensor(const at::Tensor& tensor, bool requires_grad, bool by_link,
                     std::vector<int64_t>& words) {
  if (!tensor.defined()) {
    words.push_back(0);
    return;
  }
  words.push_back(kDefined | (requires_grad ? kRequiresGrad : 0) | (by_link ? kByLink : 0) |
                  static_cast<int64_t>(tensor.scalar_type()) << kTypeShift | tensor.dim() << kDimensionShift);
  words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
}

bool has_bytes(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0;
}

/// The tensor has no gaps; its bytes keep their order in memory.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())}, [tensor](void* /*memory*/) {},
      at::TensorOptions(at::kByte));
}

/// From whatever device.
void copy_to(const at::Tensor& tensor, std::byte* memory) {
  const at::Tensor target =
      at::from_blob(memory, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  target.copy_(tensor);
}

}  // namespace

/// One list on its way here. Between hosts a callback of the message in front asks for the tensors, also while the owner
/// computes. Therefore a background thread of the group may advance an Arrival, too, and may be the last to hold it.
class TensorMessages::Arrival : public std::enable_shared_from_this<Arrival> {
 public:
  /// `links`: of messages on devices, for which the owner alone advances it, and which outlive it; null: tensors on a device
  /// come through the host's memory.
  static std::shared_ptr<Arrival> start(c10::intrusive_ptr<LockstepBackend> backend, const DeviceLinks* links,
                                        int from, int tag);
  /// For start().
  Arrival(c10::intrusive_ptr<LockstepBackend> backend, const DeviceLinks* links, int from, int tag);
  /// Goes on as far as it can without waiting, or until all is there; on a device, in the order of its current stream.
  void advance(bool waits) { reach(State::kDone, waits); }
  /// Until its tensors are being received; false if that takes waiting.
  bool describe(bool waits) { return reach(State::kTensors, waits); }
  int tag() const { return static_cast<int>(front()[kTag]); }
  Tensors take(const c10::Device& device);
  /// Of the tensors, once they are described.
  int64_t bytes() const;

 private:
  enum class State { kFront, kDescription, kTensors, kDone };
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  const int64_t* front() const { return static_cast<const int64_t*>(front_.const_data_ptr()); }
  c10::intrusive_ptr<c10d::Work> start_receive(const at::Tensor& memory) const;
  bool reach(State end, bool waits);
  void call_when_done(c10d::Work& work);
  // In the thread that makes the step:
  State step(Works& works);
  void read(const int64_t* words, int64_t count, Works& works);
  void unpack(const std::byte* payload);

  const c10::intrusive_ptr<LockstepBackend> backend_;
  const DeviceLinks* const links_;
  const int from_;
  const int messages_tag_;
  const bool far_;
  const std::string purpose_;
  const at::Tensor front_;

  mutable std::mutex mutex_;  // of what follows; no thread starts a message with it, nor waits for one
  std::condition_variable stepped_;
  State state_ = State::kFront;
  Works works_;               // of the state
  bool stepping_ = false;     // a thread makes the next step
  std::exception_ptr error_;  // of a step
  int64_t bytes_ = 0;

  // Of the thread that makes a step, and of the owner when all is there:
  at::Tensor description_;  // where it does not fit into the message in front
  Tensors tensors_;
  std::vector<bool> requires_grad_;
};

namespace {

bool is_on_another_host(LockstepBackend& backend, int rank) {
  const auto& layout = backend.channel().layout();
  return layout.host_of[rank] != layout.host();
}

}  // namespace

TensorMessages::TensorMessages(const ProcessGroup& group, std::optional<c10::Device> device, int ordered_tag)
    : group_(group), backend_(lockstep_backend_of(*group_)), ordered_tag_(ordered_tag) {
  if (device) links_.emplace(group_, *device);
}

TensorMessages::~TensorMessages() = default;

bool TensorMessages::is_far(int rank) const {
  return is_on_another_host(*backend_, rank);
}

// Within a host the receiver needs no help of the sender's, and the sender none of its background thread, which would contend
// with the thread that computes.
void TensorMessages::start_send(const at::Tensor& memory, int to, int tag, int64_t bytes) {
  const CallSite site({});  // for what the caller says
  auto work =
      backend_->message(/*is_send=*/true, memory, to, tag_of_messages(tag), /*background=*/is_far(to));
  sending_.push_back({std::move(work), tag, bytes});
  bytes_in_flight_ += bytes;
}

void TensorMessages::send(const Tensors& tensors, int to, int tag) {
  const c10::NoGradGuard no_grad;
  Tensors sent;
  std::vector<int64_t> words;
  const auto by_link = [this](const at::Tensor& tensor) { return links_ && links_->takes(tensor); };
  int64_t bytes = 0;  // that pass through the host's memory
  for (const at::Tensor& tensor : tensors) {
    sent.push_back(tensor.defined() ? as_sent(tensor) : tensor);
    describe_tensor(sent.back(), tensor.defined() && tensor.requires_grad(), by_link(sent.back()), words);
    if (tensor.defined() && !by_link(sent.back())) bytes += static_cast<int64_t>(sent.back().nbytes());
  }
  const auto count = static_cast<int64_t>(words.size());
  const bool is_short = (kFrontWords + count) * kWordBytes <= kFrontBytes;
  const bool has_payload = (kFrontWords + count) * kWordBytes + bytes <= kFrontBytes;

  const at::Tensor front = at::empty({kFrontBytes}, at::kByte);
  auto* const begin = static_cast<std::byte*>(front.data_ptr());
  std::byte* next = begin;
  const auto put = [&](const void* data, size_t size) {
    if (size > 0) std::memcpy(next, data, size);
    next += size;
  };
  const int64_t head[kFrontWords] = {tag, count, static_cast<int64_t>(tensors.size()), has_payload ? 1 : 0};
  put(head, sizeof(head));
  if (is_short) put(words.data(), words.size() * kWordBytes);
  for (const at::Tensor& tensor : sent) {
    if (!has_payload || !has_bytes(tensor) || by_link(tensor)) continue;
    const at::Tensor here = tensor.cpu();
    put(here.const_data_ptr(), here.nbytes());
  }
  std::memset(next, 0, static_cast<size_t>(begin + kFrontBytes - next));
  start_send(front, to, tag, 0);
  if (!is_short) {
    const at::Tensor description = at::empty({count}, at::kLong);
    std::memcpy(description.data_ptr(), words.data(), words.size() * kWordBytes);
    start_send(description, to, tag, 0);
  }
  for (const at::Tensor& tensor : sent) {
    if (!has_bytes(tensor)) continue;
    const auto size = static_cast<int64_t>(tensor.nbytes());
    if (by_link(tensor)) {
      sending_.push_back({links_->send(tensor, to), tag, size, tensor});
      bytes_in_flight_ += size;
      continue;
    }
    if (has_payload) continue;
    if (is_far(to) && tensor.is_cpu()) {
      start_send(bytes_of(tensor), to, tag, size);
      continue;
    }
    const at::Tensor shared = backend_->allocateTensor(size, at::kByte);
    copy_to(tensor, static_cast<std::byte*>(shared.data_ptr()));
    start_send(shared, to, tag, size);
  }
}

void TensorMessages::collect_sends() {
  std::erase_if(sending_, [this](const Sending& sending) {
    if (!sending.work->isCompleted()) return false;
    sending.work->wait();  // throws its error
    bytes_in_flight_ -= sending.bytes;
    return true;
  });
}

void TensorMessages::finish_sends() {
  for (const Sending& sending : sending_) sending.work->wait();
  sending_.clear();
  bytes_in_flight_ = 0;
}

void TensorMessages::finish_sends(int tag) {
  for (const Sending& sending : sending_) {
    if (sending.tag == tag) sending.work->wait();
  }
  collect_sends();
}

// ---- receiving

std::shared_ptr<TensorMessages::Receipt> TensorMessages::receive(int from, int tag) {
  return std::shared_ptr<Receipt>(new Receipt(*this, from, tag));
}

TensorMessages::Receipt::Receipt(TensorMessages& messages, int from, int tag)
    : messages_(messages), from_(from), tag_(tag) {
  if (!messages_.links_) arrival_ = messages_.start_arrival(from_, tag_);
}

void TensorMessages::Receipt::advance() {
  if (!arrival_) arrival_ = messages_.find_arrival(from_, tag_, /*waits=*/false);
  if (arrival_) arrival_->advance(/*waits=*/false);
}

int64_t TensorMessages::Receipt::bytes() const {
  return arrival_ ? arrival_->bytes() : 0;
}

TensorMessages::Tensors TensorMessages::Receipt::take(const c10::Device& device) {
  if (!arrival_) arrival_ = messages_.find_arrival(from_, tag_, /*waits=*/true);
  return arrival_->take(device);
}

/// Looks through what has come from the rank, in its order; null if it is not there without waiting. It is called for lists that
/// are to come, so that no receive is left over when they are all there.
std::shared_ptr<TensorMessages::Arrival> TensorMessages::find_arrival(int from, int tag, bool waits) {
  Incoming& incoming = incoming_[from];
  for (;;) {
    if (const auto kept = incoming.kept.find(tag); kept != incoming.kept.end()) {
      auto arrival = std::move(kept->second.front());
      kept->second.pop_front();
      if (kept->second.empty()) incoming.kept.erase(kept);
      return arrival;
    }
    if (!incoming.next) incoming.next = start_arrival(from, ordered_tag_);
    if (!incoming.next->describe(waits)) return nullptr;
    const int tag_of_next = incoming.next->tag();
    incoming.kept[tag_of_next].push_back(std::exchange(incoming.next, nullptr));
  }
}

std::shared_ptr<TensorMessages::Arrival> TensorMessages::start_arrival(int from, int tag) {
  return Arrival::start(backend_, links_ ? &*links_ : nullptr, from, tag);
}

TensorMessages::Arrival::Arrival(c10::intrusive_ptr<LockstepBackend> backend, const DeviceLinks* links,
                                 int from, int tag)
    : backend_(std::move(backend)),
      links_(links),
      from_(from),
      messages_tag_(tag),
      far_(is_on_another_host(*backend_, from)),
      purpose_(CallSite::purpose()),
      front_(at::empty({kFrontBytes}, at::kByte)),
      works_{start_receive(front_)} {}

std::shared_ptr<TensorMessages::Arrival> TensorMessages::Arrival::start(
    c10::intrusive_ptr<LockstepBackend> backend, const DeviceLinks* links, int from, int tag) {
  auto arrival = std::make_shared<Arrival>(std::move(backend), links, from, tag);
  arrival->call_when_done(*arrival->works_.front());
  return arrival;
}

c10::intrusive_ptr<c10d::Work> TensorMessages::Arrival::start_receive(const at::Tensor& memory) const {
  const CallSite site(purpose_);
  // It may be asked for long before it is needed, and the others' waits for a late rank are to end in their order.
  return backend_->message(/*is_send=*/false, memory, from_, messages_tag_, /*background=*/far_,
                           LockstepBackend::TimedFrom::kWait);
}

/// Has it advanced once the message is there. With links the owner starts all receives, in their one order; within a host
/// the sender's tensors are where they are received from.
void TensorMessages::Arrival::call_when_done(c10d::Work& work) {
  if (!far_ || links_ != nullptr) return;
  work.getFuture()->addCallback([weak = weak_from_this()](c10::ivalue::Future& /*message*/) {
    const auto self = weak.lock();
    if (!self) return;
    try {
      self->describe(/*waits=*/false);
    } catch (...) {  // the owner gets it, too: of the message, or error_
    }
  });
}

/// Goes on until that state, in the owner's thread or in the group's; without waiting it may return false before.
bool TensorMessages::Arrival::reach(State end, bool waits) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (waits) stepped_.wait(lock, [this] { return !stepping_; });
    if (error_) std::rethrow_exception(error_);
    if (state_ >= end) return true;
    if (stepping_) return false;
    const State seen = state_;
    const Works works = works_;
    lock.unlock();
    for (const auto& work : works) {
      if (!waits && !work->isCompleted()) return false;
      work->wait();
    }
    lock.lock();
    if (stepping_ || state_ != seen) continue;
    stepping_ = true;
    lock.unlock();
    State next = seen;
    Works started;
    std::exception_ptr error;
    try {
      next = step(started);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    stepping_ = false;
    error_ = error;
    state_ = next;
    works_ = started;
    if (next == State::kTensors) {
      for (const at::Tensor& tensor : tensors_)
        bytes_ += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
    stepped_.notify_all();
    if (error || next != State::kDescription) continue;
    lock.unlock();
    call_when_done(*started.front());
    lock.lock();
  }
}

/// When what the state waits for is there; the next state, and what that waits for.
TensorMessages::Arrival::State TensorMessages::Arrival::step(Works& works) {
  const int64_t count = front()[kDescriptionWords];
  switch (state_) {
    case State::kFront:
      if ((kFrontWords + count) * kWordBytes > kFrontBytes) {
        description_ = at::empty({count}, at::kLong);
        works.push_back(start_receive(description_));
        return State::kDescription;
      }
      read(front() + kFrontWords, count, works);
      return State::kTensors;
    case State::kDescription:
      read(static_cast<const int64_t*>(description_.const_data_ptr()), count, works);
      return State::kTensors;
    case State::kTensors:
    case State::kDone:
      break;
  }
  return State::kDone;
}

/// Reads the tensors' descriptions, and begins to receive the tensors.
void TensorMessages::Arrival::read(const int64_t* words, int64_t count, Works& works) {
  const int64_t* next = words;
  std::vector<bool> by_link;
  for (int64_t i = 0; i < front()[kTensors]; ++i) {
    const int64_t word = *next++;
    requires_grad_.push_back((word & kRequiresGrad) != 0);
    by_link.push_back((word & kByLink) != 0);
    if ((word & kDefined) == 0) {
      tensors_.emplace_back();
      continue;
    }
    const auto type = static_cast<at::ScalarType>(word >> kTypeShift & ((1 << kTypeBits) - 1));
    const auto dimensions = static_cast<size_t>(word >> kDimensionShift);
    const c10::Device device = by_link.back() ? links_->device() : c10::Device(at::kCPU);
    tensors_.push_back(at::empty_strided(at::IntArrayRef(next, dimensions),
                                         at::IntArrayRef(next + dimensions, dimensions),
                                         at::TensorOptions(type).device(device)));
    next += 2 * dimensions;
  }
  TORCH_INTERNAL_ASSERT(next == words + count);
  const bool has_payload = front()[kHasPayload] != 0;
  if (has_payload) unpack(reinterpret_cast<const std::byte*>(front() + kFrontWords + count));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!has_bytes(tensors_[i])) continue;
    if (by_link[i]) {
      works.push_back(links_->receive(tensors_[i], from_));
    } else if (!has_payload) {
      works.push_back(start_receive(bytes_of(tensors_[i])));
    }
  }
}

void TensorMessages::Arrival::unpack(const std::byte* payload) {
  for (const at::Tensor& tensor : tensors_) {
    if (!has_bytes(tensor) || !tensor.is_cpu()) continue;
    std::memcpy(tensor.data_ptr(), payload, tensor.nbytes());
    payload += tensor.nbytes();
  }
}

int64_t TensorMessages::Arrival::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

TensorMessages::Tensors TensorMessages::Arrival::take(const c10::Device& device) {
  advance(/*waits=*/true);
  Tensors taken;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    at::Tensor tensor = std::move(tensors_[i]);
    if (tensor.defined() && tensor.device() != device) tensor = tensor.to(device);
    use_on_current_stream(tensor);
    if (requires_grad_[i]) tensor.requires_grad_();
    taken.push_back(std::move(tensor));
  }
  return taken;
}

}  // namespace lockstep::pipeline::internal
