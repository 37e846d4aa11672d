#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include <lockstep/base/log.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/collectives/backend/internal/below_autograd.h>
#include <lockstep/collectives/backend/internal/device_copies.h>
#include <lockstep/collectives/backend/internal/shared_tensor.h>

namespace lockstep::collectives::internal {
namespace {

using transport::ChannelError;
using transport::FailureKind;
using transport::GroupChannel;

/// Pauses of a thread that polls: short at first, then a small part of what it has waited already. Events
/// have no wait with a time limit, and a wait without one could not end when the group fails.
class Pauses {
 public:
  void pause() {
    const auto waited = std::chrono::steady_clock::now() - began_;
    if (waited < std::chrono::microseconds(20)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(waited / 16, std::chrono::microseconds(200)));
    }
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

/// Runs `copy` with `stream` as the current one, and records `event` after what it has started, also if it
/// threw half-way.
template <class Copy>
void enqueue(const c10::Stream& stream, DeviceEvent& event, Copy&& copy) {
  const BelowAutograd guard;
  const c10::StreamGuard current(stream);
  try {
    copy();
  } catch (...) {
    try {
      event.record(stream);
    } catch (...) {  // the first error says more
    }
    throw;
  }
  event.record(stream);
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

c10::impl::VirtualGuardImpl backend_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

/// Torch 2.11 can't tell; the device itself then refuses what a graph can't capture, in its own words.
template <class Guard>
bool is_capturing(const Guard& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    return false;
  }
}

c10::Stream uncaptured_current_stream(c10::Device device) {
  const auto backend = backend_of(device);
  const c10::Stream stream = backend.getStream(device);
  TORCH_CHECK_VALUE(
      !is_capturing(backend, stream), "the lockstep backend takes tensors on ", device,
      " by way of the host, which a graph can't capture; leave the collective out of the capture, "
      "or use the backend \"nccl\"");
  return stream;
}

}  // namespace

// ---- events and results

DeviceEvent::~DeviceEvent() {
  if (!event_->was_marked_for_recording()) return;
  try {
    const c10::DeviceGuard current(device_);
    event_.reset();
  } catch (...) {  // the driver is going
  }
}

void DeviceEvent::record(const c10::Stream& stream) {
  const c10::DeviceGuard current(device_);
  event_->record(stream);
}

void DeviceEvent::block(const c10::Stream& stream) const {
  const c10::DeviceGuard current(device_);
  event_->block(stream);
}

bool DeviceEvent::passed_or_lost() const noexcept {
  try {
    return passed();
  } catch (...) {
    return true;  // it copies no more
  }
}

void DeviceResults::order_current_stream() const {
  const auto backend = backend_of(device());
  const c10::Stream stream = backend.getStream(device());
  copied_.block(stream);
  for (const at::Tensor& tensor : made_) backend.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

void DeviceResults::complete(c10::ivalue::Future& future, const std::function<c10::IValue()>& value) const {
  // On a stream that has nothing else to do: the future's event is then recorded where the results are.
  c10::OptionalStreamGuard current;
  c10::IValue made;
  try {
    const c10::Stream stream = backend_of(device()).getStreamFromGlobalPool(device());
    current.reset_stream(stream);
    order_current_stream();
    made = value();
  } catch (...) {
    future.setError(std::current_exception());
    return;
  }
  future.markCompleted(std::move(made));
}

// ---- what the group has

at::Tensor StagingArea::allocate(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  at::Tensor memory = allocate_shared(arena_, c10::multiply_integers(sizes), dtype);
  if (memory.numel() > 0) {                  // else it has no address
    const c10::DeviceGuard current(device);  // locking may make a context, on whichever device is current
    arena_->page_lock(memory.const_data_ptr(), device.type());
  }
  return memory.view(sizes);
}

void StagingArea::announce(const at::Tensor& tensor, const std::shared_ptr<DeviceResults>& results) {
  std::lock_guard lock(mutex_);
  announcements_.push_back({span_of(tensor), results});
}

std::vector<std::shared_ptr<DeviceResults>> StagingArea::announced(const at::Tensor& tensor) {
  const MemorySpan memory = span_of(tensor);
  std::vector<std::shared_ptr<DeviceResults>> found;
  std::lock_guard lock(mutex_);
  std::erase_if(announcements_, [&](const Announcement& one) {
    const auto results = one.results.lock();
    if (!results || (results->begun() && results->arrived())) return true;
    if (one.memory.overlaps(memory)) found.push_back(results);
    return false;
  });
  return found;
}

StagingArea::Streams StagingArea::streams(c10::Device device) {
  std::lock_guard lock(mutex_);
  for (const auto& [known, streams] : streams_) {
    if (known == device) return streams;
  }
  const auto backend = backend_of(device);
  const Streams streams{backend.getStreamFromGlobalPool(device, /*isHighPriority=*/true),
                        backend.getStreamFromGlobalPool(device, /*isHighPriority=*/true)};
  streams_.emplace_back(device, streams);
  return streams;
}

void StagingArea::keep(std::shared_ptr<DeviceCopies> copies) noexcept {
  if (copies->done()) return;
  try {
    std::lock_guard lock(mutex_);
    kept_.push_back(std::move(copies));
  } catch (...) {
    // There is no memory for the list's element. The buffers are leaked, for a device may still write to them.
    DeviceCopies& lost = *copies;
    lost.itself_ = std::move(copies);
  }
}

void StagingArea::release_done() {
  std::list<std::shared_ptr<DeviceCopies>> done;  // destroyed after the lock: tensors' ends may run any code
  std::lock_guard lock(mutex_);
  for (auto one = kept_.begin(); one != kept_.end();) {
    const auto next = std::next(one);
    if ((*one)->done()) done.splice(done.end(), kept_, one);
    one = next;
  }
}

void StagingArea::close(const Deadline& deadline) {
  Pauses pauses;
  while (true) {
    release_done();
    {
      std::lock_guard lock(mutex_);
      if (kept_.empty() || closed_) return;
      if (deadline.expired()) {
        closed_ = true;  // a second call does not wait
        LOCKSTEP_LOG(kWarning) << "a device has not finished the copies of " << kept_.size()
                               << " operations of a group that ends; their memory is not given back";
        return;
      }
    }
    pauses.pause();
  }
}

// ---- one operation's copies

DeviceCopies::DeviceCopies(std::shared_ptr<StagingArea> area, c10::Device device)
    : area_(std::move(area)),
      streams_(area_->streams(device)),
      called_(device),
      fetched_(device),
      results_(std::make_shared<DeviceResults>(device)) {
  area_->release_done();
  called_.record(uncaptured_current_stream(device));
  called_.block(streams_.down);
}

at::Tensor DeviceCopies::host(at::IntArrayRef sizes, at::ScalarType dtype) {
  return used_.emplace_back(area_->allocate(sizes, dtype, device()));
}

/// Starts the copy, or has it started when the group's earlier operations are done, if they will write what
/// it reads: the tensors then hold what a CPU's would.
void DeviceCopies::start_fetch(const std::vector<at::Tensor>& from, std::function<void()> copy) {
  sources_.insert(sources_.end(), from.begin(), from.end());
  bool later = !deferred_.empty();
  for (const at::Tensor& tensor : from) {
    for (auto& results : area_->announced(tensor)) {
      if (results == results_) continue;
      later = later || !results->begun();
      after_.push_back(std::move(results));
    }
  }
  if (later) {
    deferred_.push_back(std::move(copy));
    return;
  }
  for (const auto& results : std::exchange(after_, {})) results->block(streams_.down);
  enqueue(streams_.down, fetched_, copy);
}

at::Tensor DeviceCopies::fetch(const at::Tensor& tensor) {
  at::Tensor buffer = host(tensor.sizes(), tensor.scalar_type());
  start_fetch({tensor}, [this, buffer, tensor] {
    buffer.copy_(sources_.emplace_back(plain(tensor)), /*non_blocking=*/true);
  });
  return buffer;
}

at::Tensor DeviceCopies::fetch_flat(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors) numel += tensor.numel();
  at::Tensor buffer = host({numel}, tensors.front().scalar_type());
  // Put together on the device: one copy instead of one for each tensor.
  start_fetch(tensors, [this, buffer, tensors] {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : tensors) parts.push_back(plain(tensor).view(-1));
    buffer.copy_(sources_.emplace_back(at::cat(parts)), /*non_blocking=*/true);
  });
  return buffer;
}

at::Tensor DeviceCopies::fetch_sparse(const at::Tensor& tensor, const GroupChannel& channel,
                                      const Deadline& deadline) {
  const BelowAutograd guard;
  // coalesce() has to know a number that only the device can tell; this wait for it has an end.
  if (!await(called_, channel, deadline)) return {};
  at::Tensor mine;
  {
    const c10::StreamGuard current(streams_.down);
    mine = tensor.detach().coalesce();
  }
  const at::Tensor indices = fetch(mine._indices());
  const at::Tensor values = fetch(mine._values());
  if (!await_fetched(channel, deadline)) return {};
  return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), values.options().layout(c10::kSparse),
                                       /*is_coalesced=*/true);
}

bool DeviceCopies::await_fetched(const GroupChannel& channel, const Deadline& deadline) {
  for (const auto& results : std::exchange(after_, {})) results->block(streams_.down);
  for (const auto& copy : std::exchange(deferred_, {})) enqueue(streams_.down, fetched_, copy);
  if (!await(fetched_, channel, deadline)) return false;
  sources_.clear();
  return true;
}

bool DeviceCopies::await(const DeviceEvent& event, const GroupChannel& channel,
                         const Deadline& deadline) const {
  Pauses pauses;
  auto asked = std::chrono::steady_clock::now();
  while (!event.passed()) {
    if (channel.failed()) return false;
    if (deadline.expired()) {
      std::ostringstream text;
      text
          << "what the current stream of " << device()
          << " was given before this call is not done yet, so that its tensors can't be read; is it held up?";
      throw ChannelError(FailureKind::kTimeout, text.str());
    }
    if (std::chrono::steady_clock::now() - asked > kInterruptInterval) {
      check_interrupts();
      asked = std::chrono::steady_clock::now();
    }
    pauses.pause();
  }
  return true;
}

/// The caller's stream may still read what is about to be overwritten.
void DeviceCopies::begin_to_bring() {
  if (bringing_) return;
  called_.block(streams_.up);
  bringing_ = true;
}

/// The user may drop the tensor while it is being written; its memory must not be given to others then.
void DeviceCopies::use_on_up_stream(const at::Tensor& tensor) const {
  backend_of(device()).recordDataPtrOnStream(tensor.storage().data_ptr(), streams_.up);
}

void DeviceCopies::bring(const at::Tensor& to, const at::Tensor& from) {
  begin_to_bring();
  enqueue(streams_.up, results_->copied_, [&] {
    use_on_up_stream(to);
    const at::Tensor values = from.view(to.sizes());
    // By way of the device's memory where elements must be spread: that is the device's work, not the host's.
    to.copy_(is_plain(to) ? values : on_device(values), /*non_blocking=*/true);
  });
}

void DeviceCopies::bring_flat(const std::vector<at::Tensor>& to, const at::Tensor& from) {
  begin_to_bring();
  enqueue(streams_.up, results_->copied_, [&] {
    const at::Tensor flat = on_device(from);
    std::vector<at::Tensor> parts;
    int64_t at = 0;
    for (const at::Tensor& tensor : to) {
      use_on_up_stream(tensor);
      parts.push_back(flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
    at::_foreach_copy_(to, parts);
  });
}

void DeviceCopies::bring_sparse(const at::Tensor& to, const at::Tensor& from) {
  begin_to_bring();
  enqueue(streams_.up, results_->copied_, [&] {
    used_.insert(used_.end(), {from._indices(), from._values()});
    to.copy_(at::_sparse_coo_tensor_unsafe(on_device(from._indices()), on_device(from._values()), to.sizes(),
                                           to.options().requires_grad(false), /*is_coalesced=*/true));
    results_->made_ = {to._indices(), to._values()};
  });
}

/// Memory of the stream up, kept until it is done.
at::Tensor DeviceCopies::on_device(const at::Tensor& from) {
  return used_.emplace_back(from.to(device(), from.scalar_type(), /*non_blocking=*/true));
}

bool DeviceCopies::done() const noexcept {
  return fetched_.passed_or_lost() && results_->arrived();
}

}  // namespace lockstep::collectives::internal
