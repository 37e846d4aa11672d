#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unistd.h>
#include <utility>

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/monotonic_ns.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/flight/internal/observers.h>
#include <lockstep/flight/internal/record_directory.h>
#include <lockstep/flight/internal/signal_watcher.h>
#include <lockstep/flight/recorder.h>
#include <lockstep/flight/records.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep::flight {

using internal::Observers;
using internal::record_directory;
using internal::SignalWatcher;
using internal::write_record;

namespace {

constexpr int64_t kDefaultEntries = 2000;  // as PyTorch's TORCH_FR_BUFFER_SIZE
constexpr size_t kMaxTensors = 64;         // kept of one side of an operation
constexpr size_t kMaxError = 4096;         // bytes

int64_t realtime_ns() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// When the program loaded the library: a record that was written before is of another run.
const int64_t loaded_ns = realtime_ns();

int64_t ring_size() {
  for (const char* name : {"LOCKSTEP_FLIGHT_RECORDS", "TORCH_FR_BUFFER_SIZE"}) {
    if (auto size = environment::integer(name, 0, kMaxEntries)) return *size;
  }
  return kDefaultEntries;
}

/// Sizes and dtypes of some tensors, in place unless there are many. Keeps what it allocated when reused.
class TensorList {
 public:
  void assign(const std::vector<at::Tensor>* tensors) {
    dtypes_.clear();
    dims_.clear();
    sizes_.clear();
    if (tensors == nullptr) return;
    for (const at::Tensor& tensor : *tensors) {
      if (dtypes_.size() == kMaxTensors) break;
      if (!tensor.defined()) continue;
      const at::IntArrayRef sizes = tensor.sizes();
      dtypes_.push_back(tensor.scalar_type());
      dims_.push_back(static_cast<uint8_t>(std::min<size_t>(sizes.size(), 64)));
      sizes_.append(sizes.begin(), sizes.begin() + dims_.back());
    }
  }

  Tensors tensors() const {
    Tensors result;
    const int64_t* next = sizes_.begin();
    for (size_t i = 0; i < dims_.size(); ++i) {
      result.sizes.emplace_back(next, next + dims_[i]);
      result.dtypes.emplace_back(c10::toString(dtypes_[i]));
      next += dims_[i];
    }
    return result;
  }

 private:
  c10::SmallVector<c10::ScalarType, 8> dtypes_;
  c10::SmallVector<uint8_t, 8> dims_;
  c10::SmallVector<int64_t, 8> sizes_;  // of all tensors, one after the other
};

/// An operation as the ring holds it.
struct Slot {
  uint64_t id = 0;
  std::shared_ptr<const ObservedGroup> group;
  const char* kind = "";
  uint64_t sequence = 0;
  std::string detail;
  int peer = -1;
  int tag = 0;
  bool point_to_point = false;
  bool asynchronous = false;
  State state = State::kScheduled;
  TensorList inputs;
  TensorList outputs;
  int64_t created_ns = 0;
  int64_t started_ns = 0;
  int64_t ended_ns = 0;
  int64_t timeout_ms = 0;
  CodePlace where;
  std::string purpose;
  std::string error;
};

/// Lets a burst through, then a few a second. Under its user's lock.
class RateLimit {
 public:
  /// Zero when the next one is allowed now, else how long to wait.
  int64_t wait_ns(int64_t now) const {
    return std::max<int64_t>(next_ns_ - (kBurst - 1) * kIntervalNs - now, 0);
  }
  void count(int64_t now) { next_ns_ = std::max(next_ns_, now) + kIntervalNs; }

 private:
  static constexpr int64_t kIntervalNs = 250'000'000;
  static constexpr int64_t kBurst = 4;
  int64_t next_ns_ = 0;
};

/// The ring and what was written of it. One for each process; a forked child makes its own.
class Recorder {
 public:
  Recorder() : slots_(static_cast<size_t>(ring_size())) {}

  bool in_forked_child() const { return fork_guard_.in_forked_child(); }
  bool on() const { return !slots_.empty(); }
  bool has_records() {
    std::lock_guard lock(ring_mutex_);
    return last_id_ > before_world_;
  }

  /// Gives the next id; keeps nothing when the recorder is off.
  uint64_t schedule(const std::shared_ptr<const ObservedGroup>& group, const ObservedOperation& operation);
  /// False for an operation that has ended, or come so far, before; true if the ring does not know it any more.
  bool advance(uint64_t id, State state, const std::string* error);
  std::string dump(const std::string& reason, bool forced = false);
  void watch();
  void unwatch();

  Observers& observers() { return observers_; }

 private:
  RankRecord snapshot() const;  // under ring_mutex_
  void begin_world();
  std::string write(const std::string& reason);
  void serve(bool signalled);

  ForkGuard fork_guard_;
  std::mutex ring_mutex_;
  std::vector<Slot> slots_;
  uint64_t last_id_ = 0;
  uint64_t before_world_ = 0;  // ids up to here are of an earlier world of this process
  uint64_t changes_ = 0;

  Observers observers_;

  // What concerns the file; never taken while ring_mutex_ is held.
  std::mutex file_mutex_;
  bool joined_ = false;
  std::optional<WorldDefaults> place_;  // kept: the group may be gone when the record is written
  RateLimit limit_;
  std::string reasons_;
  std::string path_;          // of the last file written
  uint64_t written_ = 0;      // changes_ at that time
  int64_t last_line_ns_ = 0;  // when the log last said so; 0: never
  std::string owed_;          // reason of a dump that came too soon after others
};

uint64_t Recorder::schedule(const std::shared_ptr<const ObservedGroup>& group,
                            const ObservedOperation& operation) {
  const int64_t now = monotonic_ns();
  std::lock_guard lock(ring_mutex_);
  const uint64_t id = ++last_id_;
  if (!on()) return id;
  ++changes_;
  Slot& slot = slots_[(id - 1) % slots_.size()];
  slot.id = id;
  if (slot.group != group) slot.group = group;
  slot.kind = operation.kind;
  slot.sequence = operation.sequence;
  slot.detail = operation.detail;
  slot.peer = operation.peer;
  slot.tag = operation.tag;
  slot.point_to_point = operation.point_to_point;
  slot.asynchronous = operation.asynchronous;
  slot.state = State::kScheduled;
  slot.inputs.assign(operation.inputs);
  slot.outputs.assign(operation.outputs);
  slot.created_ns = now;
  slot.started_ns = 0;
  slot.ended_ns = 0;
  slot.timeout_ms = operation.timeout.count();
  slot.where = operation.where;
  slot.purpose = operation.purpose;
  slot.error.clear();
  return id;
}

bool Recorder::advance(uint64_t id, State state, const std::string* error) {
  if (!on()) return true;
  const int64_t now = monotonic_ns();
  std::lock_guard lock(ring_mutex_);
  Slot& slot = slots_[(id - 1) % slots_.size()];
  if (slot.id != id) return true;
  if (slot.state >= state || slot.ended_ns != 0) return false;
  ++changes_;
  slot.state = state;
  (state == State::kStarted ? slot.started_ns : slot.ended_ns) = now;
  if (error != nullptr) slot.error.assign(*error, 0, kMaxError);
  return true;
}

RankRecord Recorder::snapshot() const {
  RankRecord record;
  const uint64_t lost = last_id_ - std::min<uint64_t>(last_id_, slots_.size());
  const uint64_t first = std::max(lost, before_world_) + 1;
  record.overwritten = first - 1 - before_world_;
  std::map<const ObservedGroup*, int> numbers;
  for (uint64_t id = first; id <= last_id_; ++id) {
    const Slot& slot = slots_[(id - 1) % slots_.size()];
    const auto [number, fresh] = numbers.emplace(slot.group.get(), static_cast<int>(numbers.size()));
    if (fresh) {
      const ObservedGroup& group = *slot.group;
      record.groups.push_back(
          {group.key.empty() ? group.name : group.key, group.name, group.ranks, group.hosts});
      if (!group.hosts.empty()) record.host = group.hosts.at(static_cast<size_t>(group.rank));
    }
    record.entries.push_back({.record_id = id,
                              .group = number->second,
                              .operation = slot.kind,
                              .detail = slot.detail,
                              .point_to_point = slot.point_to_point,
                              .sequence = slot.sequence,
                              .peer = slot.peer,
                              .tag = slot.tag,
                              .asynchronous = slot.asynchronous,
                              .inputs = slot.inputs.tensors(),
                              .outputs = slot.outputs.tensors(),
                              .state = slot.state,
                              .created_ns = slot.created_ns,
                              .started_ns = slot.started_ns,
                              .ended_ns = slot.ended_ns,
                              .timeout_ms = slot.timeout_ms,
                              .error = slot.error,
                              .file = slot.where.file,
                              .line = slot.where.line,
                              .function = slot.where.function,
                              .purpose = slot.purpose});
  }
  return record;
}

/// Where the records' ranks are those of the job at its start.
std::optional<WorldDefaults> place_in_job() {
  auto place = world_defaults();
  if (place && place->job_rank >= 0) place = WorldDefaults{place->job_rank, place->job_size};
  return place;
}

/// Operations of an earlier world of this process are forgotten: its ranks meant something else.
void Recorder::begin_world() {
  {
    std::lock_guard lock(ring_mutex_);
    before_world_ = last_id_;
  }
  place_ = place_in_job();
  reasons_.clear();
  path_.clear();
  owed_.clear();
  joined_ = true;
}

std::string Recorder::write(const std::string& reason) {
  RankRecord record;
  uint64_t changes = 0;
  {
    std::lock_guard lock(ring_mutex_);
    record = snapshot();
    changes = changes_;
    record.monotonic_ns = monotonic_ns();
    record.realtime_ns = realtime_ns();
    if (!place_ && last_id_ > before_world_) {
      // Groups used without init_process_group: the place is as the last of them says.
      const ObservedGroup& group = *slots_[(last_id_ - 1) % slots_.size()].group;
      const int rank = group.ranks.at(static_cast<size_t>(group.rank));
      place_ = WorldDefaults{rank, *std::max_element(group.ranks.begin(), group.ranks.end()) + 1};
    }
  }
  if (reasons_.find(reason) == std::string::npos) reasons_ += (reasons_.empty() ? "" : ", ") + reason;
  record.rank = place_ ? place_->rank : 0;
  record.world_size = place_ ? place_->world_size : 1;
  record.pid = ::getpid();
  const HostIdentity host = this_host();
  if (record.host.empty()) record.host = host.hostname;  // else as messages call it: no two hosts alike
  record.boot_id = host.boot_id;
  record.program = ::program_invocation_name;
  record.reason = reasons_;
  record.loaded_ns = loaded_ns;
  path_ = write_record(file_name(record.rank), to_json(record));
  written_ = changes;
  return path_;
}

/// `forced`: even if nothing changed, and without regard to the rate.
std::string Recorder::dump(const std::string& reason, bool forced) {
  constexpr int64_t kQuietNs = 10'000'000'000;  // a job that fails in many places says once where the file is
  std::lock_guard lock(file_mutex_);
  if (auto place = place_in_job()) place_ = place;
  {
    std::lock_guard ring_lock(ring_mutex_);
    if (!joined_ && last_id_ == before_world_) return {};  // nothing happened here, as in a forked child
    if (!forced && !path_.empty() && written_ == changes_) return path_;
  }
  const int64_t now = monotonic_ns();
  if (limit_.wait_ns(now) > 0 && !forced) {
    owed_ = reason;
    SignalWatcher::wake();
    return path_;
  }
  limit_.count(now);
  owed_.clear();
  const std::string path = write(reason);
  // `lockstep run` tells once, after the cause, where all ranks' records are.
  const bool launcher_tells = !forced && environment::text("LOCKSTEP_RUN") == "1";
  if (launcher_tells) {
    LOCKSTEP_LOG(kInfo) << "flight record (" << reason << ") written to " << path;
  } else if (forced || last_line_ns_ == 0 || now - last_line_ns_ > kQuietNs) {
    last_line_ns_ = now;
    LOCKSTEP_LOG(kWarning) << "flight record (" << reason << ") written to " << path
                           << "; read it with: lockstep inspect flight " << path.substr(0, path.rfind('/'));
  } else {
    LOCKSTEP_LOG(kInfo) << "flight record (" << reason << ") written to " << path;
  }
  return path;
}

/// In the watcher's thread: what the signal asks for, and what dump() left out.
void Recorder::serve(bool signalled) {
  while (true) {
    std::string owed;
    int64_t wait_ns = 0;
    {
      std::lock_guard lock(file_mutex_);
      owed = owed_;
      wait_ns = limit_.wait_ns(monotonic_ns());
    }
    if (!signalled && owed.empty()) return;
    if (wait_ns == 0) {
      dump(signalled ? "SIGUSR1" : owed, signalled);
      return;
    }
    std::this_thread::sleep_for(std::chrono::nanoseconds(wait_ns));
  }
}

void Recorder::watch() {
  const bool wanted =
      !environment::text("LOCKSTEP_FLIGHT_SIGNAL") || environment::flag("LOCKSTEP_FLIGHT_SIGNAL");
  {
    std::lock_guard lock(file_mutex_);
    if (!on() || joined_) return;
    begin_world();
  }
  if (!wanted) return;
  const auto action = [this](bool signalled) {
    try {
      serve(signalled);
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kError) << "the flight record could not be written: " << lockstep::text_of(error);
    }
  };
  if (!SignalWatcher::start(action)) {
    LOCKSTEP_LOG(kInfo) << "SIGUSR1 is not watched for the flight recorder: this program handles it itself";
  }
}

void Recorder::unwatch() {
  {
    std::lock_guard lock(file_mutex_);
    if (!joined_) return;
    joined_ = false;
  }
  SignalWatcher::stop();  // without the lock, which its thread may want
}

/// This process's recorder. Never destroyed: threads may record while the process exits.
Recorder& recorder() {
  static std::atomic<Recorder*> current{new Recorder};
  Recorder* recorder = current.load(std::memory_order_acquire);
  if (!recorder->in_forked_child()) return *recorder;
  // The parent's may be locked by a thread that does not exist here.
  auto* fresh = new Recorder;
  if (current.compare_exchange_strong(recorder, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *recorder;
}

template <class Call>
void step(uint64_t id, State state, const std::string* error, const Call& call) {
  if (id == 0) return;
  Recorder& own = recorder();
  if (own.advance(id, state, error)) own.observers().tell(call);
}

}  // namespace

bool is_watching() {
  Recorder& own = recorder();
  return own.on() || own.observers().any();
}

uint64_t scheduled(const std::shared_ptr<const ObservedGroup>& group, const ObservedOperation& operation) {
  if (!is_watching()) return 0;
  Recorder& own = recorder();
  const uint64_t id = own.schedule(group, operation);
  own.observers().tell([&](OperationObserver& observer) { observer.scheduled(id, *group, operation); });
  return id;
}

void started(uint64_t id) {
  step(id, State::kStarted, nullptr, [id](OperationObserver& observer) { observer.started(id); });
}

void completed(uint64_t id) {
  step(id, State::kCompleted, nullptr, [id](OperationObserver& observer) { observer.ended(id, nullptr); });
}

void failed(uint64_t id, const std::string& error) {
  step(id, State::kFailed, &error, [&](OperationObserver& observer) { observer.ended(id, &error); });
}

void attach(std::shared_ptr<OperationObserver> observer) {
  recorder().observers().attach(std::move(observer));
}

void detach(const std::shared_ptr<OperationObserver>& observer) {
  recorder().observers().detach(observer);
}

bool has_records() {
  return recorder().has_records();
}

std::string dump(const std::string& reason) {
  try {
    Recorder& own = recorder();
    return own.on() ? own.dump(reason) : "";
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "the flight record could not be written: " << lockstep::text_of(error);
  }
  return {};
}

std::string write_beside(const std::string& name, const std::string& content) {
  try {
    return write_record(name, content);
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << name << " could not be written: " << lockstep::text_of(error);
  }
  return {};
}

void watch_signal() {
  recorder().watch();
}

void unwatch_signal() {
  recorder().unwatch();
}

}  // namespace lockstep::flight
