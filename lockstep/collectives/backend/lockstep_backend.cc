#include <array>
#include <sstream>
#include <utility>

#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/collectives/backend/internal/message_work.h>
#include <lockstep/collectives/backend/internal/monitored_barrier.h>
#include <lockstep/collectives/backend/internal/planned_operation.h>
#include <lockstep/collectives/backend/internal/shared_tensor.h>
#include <lockstep/collectives/backend/internal/tensor_check.h>
#include <lockstep/collectives/backend/lockstep_backend.h>

// What all operations have in common; the single collectives stand in lockstep_reductions.cc and
// lockstep_exchanges.cc.
namespace lockstep {

using namespace collectives::internal;

namespace {

using transport::ChannelError;
using transport::FailureKind;
using transport::GroupChannel;

thread_local const CallSite* call_site = nullptr;
std::atomic<CallSite::Finder> call_finder{nullptr};

/// What devices get to finish their copies when a group ends.
constexpr std::chrono::seconds kDevicePatience{10};

/// The group's error in the terms of the operation that met it.
std::string describe_failure(const ChannelError& error, const GroupChannel& channel,
                             const Signature& signature, uint64_t number, const std::string& group,
                             bool earlier) {
  std::ostringstream text;
  text << to_string(signature.kind) << " (sequence " << number << ", " << signature.describe()
       << ") failed on rank " << channel.job_rank(channel.rank()) << " of group '" << group << "': ";
  if (earlier) text << "the group had failed before: ";
  text << error.what();
  if (error.kind() == FailureKind::kMismatch) {
    // Also of an earlier operation: nothing is announced any more after a failure.
    const std::string calls = describe_announcements(channel);
    if (!calls.empty()) text << ": " << calls;
  }
  return text.str();
}

const char* to_string(FailureKind kind) {
  switch (kind) {
    case FailureKind::kTimeout:
      return "timeout";
    case FailureKind::kAborted:
      return "abort";
    case FailureKind::kMismatch:
      return "mismatch";
    default:
      return "failure";
  }
}

/// "lockstep:all_reduce", the operation's name in profiles; there a reader looks for the name that he gave
/// the backend.
const char* profiling_title(CollectiveKind kind, bool as_gloo) {
  static const auto titles = [] {
    std::array<std::array<std::string, static_cast<size_t>(CollectiveKind::kNewGroup) + 1>, 2> all;
    for (size_t i = 0; i < all[0].size(); ++i) {
      const char* name = lockstep::to_string(static_cast<CollectiveKind>(i));
      all[false][i] = std::string("lockstep:") + name;
      all[true][i] = std::string("gloo:") + name;
    }
    return all;
  }();
  return titles[as_gloo][static_cast<size_t>(kind)].c_str();
}

const char* profiling_title(bool is_send, bool from_any, bool as_gloo) {
  if (as_gloo) return is_send ? "gloo:send" : from_any ? "gloo:recvAnySource" : "gloo:recv";
  return is_send ? "lockstep:send" : from_any ? "lockstep:recvAnySource" : "lockstep:recv";
}

}  // namespace

static_assert(kToldPurposes[1] == CallSite::kCheckpoint);

CallSite::CallSite(std::string_view purpose, const std::source_location& where)
    : before_(std::exchange(call_site, this)),
      purpose_(purpose.empty() && before_ != nullptr ? before_->purpose_ : purpose),
      where_(where) {
  set_purpose(purpose_);
}
CallSite::~CallSite() {
  call_site = before_;
  set_purpose(before_ == nullptr ? "" : before_->purpose_);
}
std::string_view CallSite::purpose() {
  return call_site == nullptr ? std::string_view() : call_site->purpose_;
}
void CallSite::tell(flight::ObservedOperation& operation) {
  if (call_site == nullptr) {
    const Finder find = call_finder.load(std::memory_order_relaxed);
    if (find != nullptr && flight::is_watching()) operation.where = find();
    return;
  }
  operation.where = call_site->where_;
  operation.purpose = call_site->purpose_;
}
void CallSite::set_finder(Finder finder) {
  call_finder.store(finder, std::memory_order_relaxed);
}

LockstepBackend::LockstepBackend(std::shared_ptr<GroupChannel> channel, Settings settings)
    : Backend(channel->rank(), channel->size()),
      channel_(std::move(channel)),
      settings_(std::move(settings)),
      timeout_ms_(settings_.timeout.count()),
      staging_(std::make_shared<StagingArea>(channel_->transport().shared_arena())),
      queue_(std::make_shared<OperationQueue>()) {
  // A store's server lives as long as its last user, and a backend longer than its group: a group that is made again at the
  // same port is to find a new store.
  if (!channel_->spans_hosts()) settings_.store.reset();
  if (settings_.global_ranks.empty()) {
    for (int rank = 0; rank < size_; ++rank) settings_.global_ranks.push_back(channel_->job_rank(rank));
  }
  options_ = c10::make_intrusive<GroupOptions>("lockstep", settings_.timeout);
  options_->group_name = settings_.name;
  options_->between_hosts = settings_.between_hosts;
  options_->global_ranks_in_group.assign(settings_.global_ranks.begin(), settings_.global_ranks.end());
  flight::ObservedGroup group{settings_.name, settings_.global_ranks, rank_};
  if (channel_->transport().spans_hosts()) {
    for (int rank = 0; rank < size_; ++rank) group.hosts.push_back(channel_->host_name(rank));
  }
  flight_group_ = std::make_shared<const flight::ObservedGroup>(std::move(group));
}

LockstepBackend::~LockstepBackend() {
  end();
}

c10::intrusive_ptr<LockstepBackend> LockstepBackend::make(std::shared_ptr<GroupChannel> channel,
                                                          Settings settings) {
  if (settings.make_subclass != nullptr)
    return settings.make_subclass(std::move(channel), std::move(settings));
  return c10::make_intrusive<LockstepBackend>(std::move(channel), std::move(settings));
}

std::chrono::milliseconds LockstepBackend::timeout_or_default(std::chrono::milliseconds timeout) const {
  if (timeout > std::chrono::milliseconds(0)) return timeout;
  return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
}

int LockstepBackend::checked_root(int64_t root, const char* operation, const char* role) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, operation, ": ", role, " rank ", root,
                    " is not in the group, which has ", size_, " ranks");
  return static_cast<int>(root);
}

void LockstepBackend::check_not_forked() const {
  // Here, because a thread of the parent may have held any lock of the group when it forked.
  TORCH_CHECK_WITH(DistBackendError, !channel_->transport().in_forked_child(), "process group '",
                   settings_.name,
                   "' belongs to the parent of this forked process and can't be used here; make a group of "
                   "its own, or start processes without fork (multiprocessing's start method \"spawn\")");
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::submit(PlannedOperation operation) {
  check_not_forked();
  // Known once the operation stands in the queue, before it can run.
  struct Identity {
    uint64_t number = 0;
    uint64_t record = 0;
  };
  const auto identity = std::make_shared<Identity>();
  const auto timeout = timeout_or_default(operation.timeout);
  const Signature signature = operation.signature;
  auto feedback = signature.compression() == HostCompression::kInt8 ? BetweenHosts::feedback() : nullptr;
  auto run = [identity, channel = channel_, group = flight_group_, signature, timeout,
              as_gloo = settings_.stands_in_for_gloo, operands = operation.operands,
              feedback = std::move(feedback), wire_model = settings_.wire_model,
              body = std::move(operation.body)](bool background) {
    const uint64_t before = channel->sequence();
    flight::started(identity->record);
    const Deadline deadline = Deadline::after(timeout);
    try {
      if (operands) operands->start(deadline);
      body({.deadline = deadline,
            .background = background,
            .feedback = feedback.get(),
            .wire_model = wire_model});
      if (operands) operands->finish();
      flight::completed(identity->record);
    } catch (const ChannelError& error) {
      const bool earlier = channel->sequence() == before && channel->failed();
      // An operation that this rank's device has kept from beginning is one that the others wait for.
      if (!channel->failed()) channel->abort();
      // A peer that is only late may still write into these tensors' memory: it must not be reused.
      if (!earlier && operands) channel->release_after_close([operands] {});
      auto text = describe_failure(error, *channel, signature, identity->number, group->name, earlier);
      flight::failed(identity->record, text);
      // After a peer's end, launchers say more than records can.
      const bool telling = error.kind() == FailureKind::kTimeout || error.kind() == FailureKind::kMismatch ||
                           error.kind() == FailureKind::kAborted;
      if (telling) flight::dump(to_string(error.kind()));
      if (as_gloo) text += gloos_words(error.kind(), timeout);
      if (error.kind() == FailureKind::kTimeout) LOCKSTEP_THROW_TIMEOUT(text);
      C10_THROW_ERROR(DistBackendError, text);
    } catch (const std::exception& error) {
      // Not the group's failure but this rank's (no memory, say, or a signal). Half-way through an operation
      // it becomes the group's, or the others would wait for the rest of it.
      const bool on_device = operands && operands->device_results();
      if (on_device || channel->sequence() != before) {
        channel->abort();
        if (operands) channel->release_after_close([operands] {});
      }
      flight::failed(identity->record, text_of(error));
      throw;
    }
    if (auto interruption = channel->take_interruption())
      throw InterruptedAfterSuccess{std::move(interruption)};
  };
  flight::ObservedOperation record;
  CallSite::tell(record);  // here, because the queue numbers operations under its lock
  const auto numbered = [&](uint64_t number) {
    identity->number = number;
    record.kind = lockstep::to_string(signature.kind);
    record.sequence = number;
    record.peer = signature.root;
    if (signature.operation != Signature::kNoOperation)
      record.detail = lockstep::to_string(static_cast<ReduceOperation>(signature.operation));
    record.inputs = &operation.inputs;
    record.outputs = &operation.outputs;
    record.timeout = timeout;
    record.asynchronous = operation.asynchronous;
    identity->record = flight::scheduled(flight_group_, record);
    LOCKSTEP_LOG(kDebug) << "group '" << settings_.name << "' sequence " << number << ": "
                         << signature.describe();
  };
  auto work = c10::make_intrusive<OperationWork>(
      queue_, rank_, profiling_title(signature.kind, settings_.stands_in_for_gloo), operation,
      std::move(run));
  queue_->submit(work, operation.asynchronous, numbered);
  return work;
}

// ---- point to point

c10::intrusive_ptr<c10d::Work> LockstepBackend::message(bool is_send, const at::Tensor& tensor, int peer,
                                                        int tag, bool background, TimedFrom timed_from) {
  check_not_forked();
  const char* name = is_send ? "send" : "recv";
  check_contiguous(tensor, name, "the tensor");
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(), name,
      ": the tensor is a lazy conjugate or negative view; call .resolve_conj() or .resolve_neg()");
  TORCH_CHECK_VALUE(tag >= 0, name, ": Tag must be nonnegative, not ", tag);
  const bool any = !is_send && peer == transport::MessageChannel::kAnySource;
  TORCH_CHECK_VALUE(any || (peer >= 0 && peer < size_), name, ": rank ", peer,
                    " is not in the group, which has ", size_, " ranks");
  const std::vector<at::Tensor> tensors{tensor};
  const auto timeout = timeout_or_default({});
  MessageWork::Message message{.title = profiling_title(is_send, any, settings_.stands_in_for_gloo),
                               .is_send = is_send,
                               .tensor = tensor,
                               .peer = peer,
                               .tag = tag,
                               .timeout = timeout,
                               .timed_from_wait = timed_from == TimedFrom::kWait,
                               .group_name = settings_.name,
                               .number = messages_.fetch_add(1, std::memory_order_relaxed) + 1,
                               .gloos_words = settings_.stands_in_for_gloo};
  flight::ObservedOperation record;
  record.kind = name;
  record.sequence = message.number;
  record.point_to_point = true;
  record.peer = peer;
  record.tag = tag;
  (is_send ? record.inputs : record.outputs) = &tensors;
  record.timeout = timeout;
  record.asynchronous = background;
  CallSite::tell(record);
  return MessageWork::start(channel_, staging_, std::move(message), flight::scheduled(flight_group_, record),
                            background);
}

namespace {

const at::Tensor& only_message(const std::vector<at::Tensor>& tensors, const char* operation) {
  TORCH_CHECK_VALUE(tensors.size() == 1, operation, " takes one tensor, not ", tensors.size());
  return tensors.front();
}

}  // namespace

c10::intrusive_ptr<c10d::Work> LockstepBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  return message(true, only_message(tensors, "send"), to, tag, /*background=*/true);
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  TORCH_CHECK_VALUE(from >= 0, "recv: rank ", from, " is not in the group, which has ", size_, " ranks");
  return message(false, only_message(tensors, "recv"), from, tag, /*background=*/true);
}

c10::intrusive_ptr<c10d::Work> LockstepBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return message(false, only_message(tensors, "recv"), transport::MessageChannel::kAnySource, tag,
                 /*background=*/true);
}

void LockstepBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  check_not_forked();
  // 0 is a timeout here, as with Gloo, which passes at once.
  const bool unset = options.timeout == c10d::kUnsetTimeout;
  monitored_barrier(*channel_, unset ? timeout_or_default({}) : options.timeout, wait_all_ranks,
                    monitored_barriers_.fetch_add(1, std::memory_order_relaxed));
}

// ---- memory and end

at::Tensor LockstepBackend::allocateTensor(long size, at::TensorOptions options) {
  check_not_forked();
  TORCH_CHECK_VALUE(size >= 0, "allocateTensor: ", size, " elements");
  TORCH_CHECK_VALUE(options.device().is_cpu(),
                    "allocateTensor: the lockstep backend has memory for CPU tensors, "
                    "not for ones on ",
                    options.device(), ", which it copies in any case; take at::empty()");
  return allocate_shared(channel_->transport().shared_arena(), size, options);
}

void LockstepBackend::abort(const std::string& reason) {
  const bool first = !channel_->failed();
  channel_->abort(reason);
  // An error before the first operation is none that a record could explain.
  if (first && flight::has_records()) flight::dump("abort");
}

void LockstepBackend::finish() {
  queue_->finish();
}

void LockstepBackend::close_at_exit(bool by_exception) {
  if (channel_->transport().in_forked_child()) return;
  if (by_exception) channel_->abort();
  if (queue_->busy() && !by_exception) {
    LOCKSTEP_LOG(kWarning) << "the process ends while operations of group '" << settings_.name
                           << "' are not done, and they fail on all ranks; wait() for them, or call "
                              "destroy_process_group() first";
    abort();
  }
  end();
}

bool LockstepBackend::is_in_callback() const {
  return queue_->is_telling_here() || channel_->messages().is_telling_here();
}

void LockstepBackend::check_not_in_callback() const {
  TORCH_CHECK_WITH(DistBackendError, !is_in_callback(), "process group '", settings_.name,
                   "' can't be destroyed in a callback of one of its own futures, which the end of the group "
                   "waits for; destroy it where the future is waited for");
}

void LockstepBackend::shutdown() {
  if (channel_->transport().in_forked_child()) return;
  check_not_in_callback();
  end();
}

void LockstepBackend::end() {
  if (channel_->transport().in_forked_child()) return;
  settings_.store.reset();
  const auto end = [queue = queue_, channel = channel_, staging = staging_] {
    queue->stop();
    channel->messages().close();
    channel->leave();
    // Copies to devices, which nothing but the devices can hold up.
    staging->close(Deadline::after(kDevicePatience));
  };
  if (is_in_callback()) {
    run_in_background(end);  // without a thread it stays open: this one can't wait for itself
  } else {
    end();
  }
}

c10::intrusive_ptr<LockstepBackend> lockstep_backend_of(c10d::ProcessGroup& group) {
  return c10::dynamic_intrusive_pointer_cast<LockstepBackend>(group.getBackend(c10::kCPU));
}

}  // namespace lockstep
