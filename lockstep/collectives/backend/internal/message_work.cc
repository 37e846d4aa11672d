#include <optional>
#include <sstream>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/algorithms/signature.h>
#include <lockstep/collectives/backend/internal/device_copies.h>
#include <lockstep/collectives/backend/internal/message_work.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::collectives::internal {

using transport::ChannelError;
using transport::FailureKind;
using transport::GroupChannel;
using transport::MessageChannel;
using transport::MessageKind;
using transport::MessageMismatch;

namespace {

std::string describe_kind(const MessageKind& kind) {
  const auto type = static_cast<at::ScalarType>(kind.type);
  return c10::str(kind.bytes / c10::elementSize(type), " elements of ", c10::toString(type));
}

}  // namespace

std::string gloos_words(FailureKind kind, std::chrono::milliseconds timeout) {
  switch (kind) {
    case FailureKind::kTimeout:
      return ". Timed out waiting " + std::to_string(timeout.count()) + "ms for the operation to complete";
    case FailureKind::kPeerEnded:
    case FailureKind::kPeerLeft:
      return ". Connection closed by peer";
    default:
      return "";
  }
}

std::string describe_message(const MessageWork::Message& message, const GroupChannel& channel) {
  std::ostringstream text;
  text << (message.is_send ? "send" : "recv") << " (number " << message.number << ", "
       << message.tensor.scalar_type() << ' ' << message.tensor.sizes()
       << (message.is_send ? " to " : " from ");
  if (message.peer == MessageChannel::kAnySource) {
    text << "any rank";
  } else {
    text << "rank " << channel.job_rank(message.peer);
  }
  text << ", tag " << message.tag << ") failed on rank " << channel.job_rank(channel.rank()) << " of group '"
       << message.group_name << "': ";
  return text.str();
}

MessageWork::MessageWork(std::shared_ptr<GroupChannel> channel, Message message, uint64_t record)
    : Work(channel->rank(), message.is_send                              ? c10d::OpType::SEND
                            : message.peer == MessageChannel::kAnySource ? c10d::OpType::RECVANYSOURCE
                                                                         : c10d::OpType::RECV),
      channel_(std::move(channel)),
      message_(std::move(message)),
      record_(record),
      profiled_(message_.title, {message_.tensor}),
      memory_(message_.tensor) {}

MessageWork::~MessageWork() {
  // To be kept for as long as the device uses the memory, whatever became of the message.
  if (copies_) copies_->area()->keep(std::move(copies_));
}

/// Puts memory on the host in the place of a tensor on a device.
void MessageWork::stage(const std::shared_ptr<StagingArea>& area, const Deadline& deadline) {
  const at::Tensor& tensor = message_.tensor;
  copies_ = std::make_shared<DeviceCopies>(area, tensor.device());
  results_ = copies_->results();
  if (message_.is_send) {
    memory_ = copies_->fetch(tensor);
    copies_->await_fetched(*channel_, deadline);  // or the group has failed, and the channel throws
  } else {
    memory_ = copies_->host(tensor.sizes(), tensor.scalar_type());
  }
}

c10::intrusive_ptr<MessageWork> MessageWork::start(std::shared_ptr<GroupChannel> channel,
                                                   const std::shared_ptr<StagingArea>& area, Message message,
                                                   uint64_t record, bool background) {
  auto work = c10::make_intrusive<MessageWork>(std::move(channel), std::move(message), record);
  const Message& m = work->message_;
  const MessageKind kind{m.tensor.nbytes(), static_cast<uint32_t>(m.tensor.scalar_type())};
  const Deadline deadline = m.timed_from_wait ? Deadline::never() : Deadline::after(m.timeout);
  MessageChannel& messages = work->channel_->messages();
  flight::started(record);
  // Keeps the work, and with it the tensor, until the channel is done with it.
  const auto on_done = [work](const std::exception_ptr& error) { work->complete(error); };
  // A peer would wait for what this rank's device keeps from coming.
  const auto tell_peers = [&] {
    if (!m.tensor.is_cpu() && !work->channel_->failed()) work->channel_->abort();
  };
  try {
    if (!m.tensor.is_cpu()) work->stage(area, deadline);
    const at::Tensor& memory = work->memory_;
    work->handle_ = m.is_send
                        ? messages.send(memory.const_data_ptr(), kind, m.peer, m.tag, deadline, on_done)
                        : messages.receive(memory.mutable_data_ptr(), kind, m.peer, m.tag, deadline, on_done);
  } catch (const ChannelError&) {
    const auto error = work->in_words(std::current_exception());
    tell_peers();
    std::rethrow_exception(error);
  } catch (const std::exception& error) {  // no memory, say, for a tensor on a device
    flight::failed(record, text_of(error));
    tell_peers();
    throw;
  } catch (...) {  // an interruption
    flight::failed(record, "interrupted");
    tell_peers();
    throw;
  }
  if (background && !messages.is_done(work->handle_)) messages.advance_in_background();
  return work;
}

void MessageWork::complete(const std::exception_ptr& error) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::call_once(completed_, [&] {
    std::exception_ptr told = error ? in_words(error) : nullptr;
    if (!told && copies_ && !message_.is_send) told = bring();
    { const WorkRecord::Bar bar(profiled_); }
    if (!told) flight::completed(record_);
    std::lock_guard lock(mutex_);
    done_ = true;
    error_ = told;
    duration_ = std::chrono::steady_clock::now() - started_;
    future = future_;
  });
  if (!future) return;
  // The future's callbacks may wait, for other messages or for Python's GIL: not in this thread, which may be
  // a user's who is about to do what they wait for.
  channel_->messages().tell_in_background([self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this),
                                           future] { self->tell(*future, self->error_); });
}

/// Starts copying what has come to the device.
std::exception_ptr MessageWork::bring() const {
  try {
    copies_->bring(message_.tensor, memory_);
    return nullptr;
  } catch (...) {
    return in_words(std::current_exception());
  }
}

void MessageWork::tell(c10::ivalue::Future& future, const std::exception_ptr& error) const {
  const auto value = [this] { return c10::IValue(std::vector<at::Tensor>{message_.tensor}); };
  if (error) {
    future.setError(error);
  } else if (results_) {
    results_->complete(future, value);
  } else {
    future.markCompleted(value());
  }
}

/// The channel's error in the terms of this operation, for the user and for the flight recorder.
std::exception_ptr MessageWork::in_words(const std::exception_ptr& error) const {
  std::string text = describe_message(message_, *channel_);
  FailureKind kind = FailureKind::kMismatch;
  try {
    std::rethrow_exception(error);
  } catch (const MessageMismatch& mismatch) {
    const int other = channel_->job_rank(mismatch.peer);
    text += message_.is_send
                ? "rank " + std::to_string(other) + " expects " + describe_kind(mismatch.expected)
                : "rank " + std::to_string(other) + " sent " + describe_kind(mismatch.sent);
  } catch (const ChannelError& channel_error) {
    text += channel_error.what();
    kind = channel_error.kind();
    const std::string calls = kind == FailureKind::kMismatch ? describe_announcements(*channel_) : "";
    if (!calls.empty()) text += ": " + calls;
  } catch (const std::exception& other) {
    text += text_of(other);
  }
  flight::failed(record_, text);
  if (kind == FailureKind::kTimeout) flight::dump("timeout");
  if (message_.gloos_words) text += internal::gloos_words(kind, message_.timeout);
  try {
    if (kind == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text);
    C10_THROW_ERROR(DistBackendError, text);
  } catch (...) {
    return std::current_exception();
  }
}

bool MessageWork::isCompleted() {
  if (!channel_->messages().is_done(handle_)) return false;
  complete(channel_->messages().error(handle_));
  return !results_ || results_->arrived();
}

bool MessageWork::isSuccess() const {
  std::lock_guard lock(mutex_);
  return done_ && !error_;
}

std::exception_ptr MessageWork::exception() const {
  std::lock_guard lock(mutex_);
  return error_;
}

int MessageWork::sourceRank() const {
  TORCH_CHECK(!message_.is_send, "sourceRank() is for receives");
  return channel_->messages().source(handle_);
}

float MessageWork::getDuration() const {
  std::lock_guard lock(mutex_);
  return std::chrono::duration<float, std::milli>(duration_).count();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  const Deadline until = timeout == kNoTimeout ? Deadline::never() : Deadline::after(timeout);
  const WorkRecord::Bar bar(profiled_);
  if (message_.timed_from_wait) {
    std::call_once(waited_,
                   [&] { channel_->messages().set_deadline(handle_, Deadline::after(message_.timeout)); });
  }
  std::optional<WaitingPhase> waiting;
  if (!channel_->messages().is_done(handle_)) waiting.emplace();
  if (!channel_->messages().wait(handle_, until)) {
    LOCKSTEP_THROW_TIMEOUT("wait() gave up after " + std::to_string(timeout.count()) +
                           " ms; the operation itself goes on");
  }
  complete(channel_->messages().error(handle_));
  {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }
  if (results_) results_->order_current_stream();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> MessageWork::getFuture() {
  std::unique_lock lock(mutex_);
  if (future_) return future_;
  std::vector<c10::Device> devices;
  if (results_) devices.push_back(results_->device());
  auto future = future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), std::move(devices));
  if (!done_) return future;
  const auto error = error_;
  lock.unlock();
  tell(*future, error);
  return future;
}

}  // namespace lockstep::collectives::internal
