#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/pipeline/internal/tensor_messages.h>

namespace lockstep::pipeline::internal {
namespace {

/// The message in front: three words, the description unless that is too long, and the tensors' bytes if all of them fit.
constexpr int64_t kFrontBytes = 1024;
constexpr int64_t kWordBytes = sizeof(int64_t);
enum FrontWord : int64_t { kDescriptionWords, kTensors, kHasPayload, kFrontWords };

/// Of a tensor: one word, then its sizes and strides.
constexpr int64_t kDefined = 1;
constexpr int64_t kRequiresGrad = 2;
constexpr int kTypeShift = 2;
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

void describe_tensor(const at::Tensor& tensor, bool requires_grad, std::vector<int64_t>& words) {
  if (!tensor.defined()) {
    words.push_back(0);
    return;
  }
  words.push_back(kDefined | (requires_grad ? kRequiresGrad : 0) |
                  static_cast<int64_t>(tensor.scalar_type()) << kTypeShift | tensor.dim() << kDimensionShift);
  words.insert(words.end(), tensor.sizes().begin(), tensor.sizes().end());
  words.insert(words.end(), tensor.strides().begin(), tensor.strides().end());
}

bool has_bytes(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0;
}

/// Of a tensor without gaps, in their order in memory.
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

TensorMessages::TensorMessages(const ProcessGroup& group)
    : group_(group), backend_(lockstep_backend_of(*group_)) {
  TORCH_CHECK_VALUE(backend_, "the pipeline's group '", group_->getGroupName(),
                    "' has no Lockstep backend for CPU tensors; make it with \"lockstep\" or \"nccl\"");
}

TensorMessages::~TensorMessages() = default;

bool TensorMessages::is_far(int rank) const {
  const auto& layout = backend_->channel().layout();
  return layout.host_of[rank] != layout.host();
}

// Within a host the receiver needs no help of the sender's, and the sender none of its background thread, which would contend
// with the thread that computes.
void TensorMessages::start_send(const at::Tensor& memory, int to, int tag, int64_t bytes) {
  auto work = backend_->message(/*is_send=*/true, memory, to, tag, /*background=*/is_far(to));
  sending_.push_back({std::move(work), tag, bytes});
  bytes_in_flight_ += bytes;
}

c10::intrusive_ptr<c10d::Work> TensorMessages::start_receive(const at::Tensor& memory, int from, int tag) {
  return backend_->message(/*is_send=*/false, memory, from, tag, /*background=*/is_far(from));
}

void TensorMessages::send(const Tensors& tensors, int to, int tag) {
  const c10::NoGradGuard no_grad;
  Tensors sent;
  std::vector<int64_t> words;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    sent.push_back(tensor.defined() ? as_sent(tensor) : tensor);
    describe_tensor(sent.back(), tensor.defined() && tensor.requires_grad(), words);
    if (tensor.defined()) bytes += static_cast<int64_t>(sent.back().nbytes());
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
  const int64_t head[kFrontWords] = {count, static_cast<int64_t>(tensors.size()), has_payload ? 1 : 0};
  put(head, sizeof(head));
  if (is_short) put(words.data(), words.size() * kWordBytes);
  for (const at::Tensor& tensor : sent) {
    if (!has_payload || !has_bytes(tensor)) continue;
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
    if (has_payload || !has_bytes(tensor)) continue;
    const auto size = static_cast<int64_t>(tensor.nbytes());
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

void TensorMessages::abort(const std::string& reason) {
  backend_->abort(reason);
}

// ---- receiving

std::shared_ptr<TensorMessages::Receipt> TensorMessages::receive(int from, int tag) {
  return std::shared_ptr<Receipt>(new Receipt(*this, from, tag));
}

TensorMessages::Receipt::Receipt(TensorMessages& messages, int from, int tag)
    : messages_(messages), from_(from), tag_(tag), front_(at::empty({kFrontBytes}, at::kByte)) {
  works_.push_back(messages_.start_receive(front_, from_, tag_));
}

bool TensorMessages::Receipt::arrived(bool waits) {
  for (const auto& work : works_) {
    if (!waits && !work->isCompleted()) return false;
    work->wait();
  }
  works_.clear();
  return true;
}

void TensorMessages::Receipt::advance(bool waits) {
  while (state_ != State::kDone && arrived(waits)) {
    const auto* words = static_cast<const int64_t*>(front_.const_data_ptr());
    const int64_t count = words[kDescriptionWords];
    switch (state_) {
      case State::kFront:
        if ((kFrontWords + count) * kWordBytes <= kFrontBytes) {
          describe(words + kFrontWords, count);
          break;
        }
        description_ = at::empty({count}, at::kLong);
        works_.push_back(messages_.start_receive(description_, from_, tag_));
        state_ = State::kDescription;
        break;
      case State::kDescription:
        describe(static_cast<const int64_t*>(description_.const_data_ptr()), count);
        break;
      case State::kTensors:
      case State::kDone:
        state_ = State::kDone;
        break;
    }
  }
}

void TensorMessages::Receipt::describe(const int64_t* words, int64_t count) {
  const auto* front = static_cast<const int64_t*>(front_.const_data_ptr());
  const int64_t* next = words;
  for (int64_t i = 0; i < front[kTensors]; ++i) {
    const int64_t word = *next++;
    requires_grad_.push_back((word & kRequiresGrad) != 0);
    if ((word & kDefined) == 0) {
      tensors_.emplace_back();
      continue;
    }
    const auto type = static_cast<at::ScalarType>(word >> kTypeShift & ((1 << kTypeBits) - 1));
    const auto dimensions = static_cast<size_t>(word >> kDimensionShift);
    tensors_.push_back(at::empty_strided(at::IntArrayRef(next, dimensions),
                                         at::IntArrayRef(next + dimensions, dimensions), type));
    next += 2 * dimensions;
  }
  TORCH_INTERNAL_ASSERT(next == words + count);
  state_ = State::kTensors;
  if (front[kHasPayload] != 0) return unpack(reinterpret_cast<const std::byte*>(next));
  for (const at::Tensor& tensor : tensors_) {
    if (has_bytes(tensor)) works_.push_back(messages_.start_receive(bytes_of(tensor), from_, tag_));
  }
}

void TensorMessages::Receipt::unpack(const std::byte* payload) {
  for (const at::Tensor& tensor : tensors_) {
    if (!has_bytes(tensor)) continue;
    std::memcpy(tensor.data_ptr(), payload, tensor.nbytes());
    payload += tensor.nbytes();
  }
}

TensorMessages::Tensors TensorMessages::Receipt::take(const c10::Device& device) {
  advance(/*waits=*/true);
  Tensors taken;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    at::Tensor tensor = std::move(tensors_[i]);
    if (tensor.defined() && !device.is_cpu()) tensor = tensor.to(device);
    if (requires_grad_[i]) tensor.requires_grad_();
    taken.push_back(std::move(tensor));
  }
  return taken;
}

}  // namespace lockstep::pipeline::internal
