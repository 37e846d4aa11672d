#include <ActivityType.h>
#include <algorithm>
#include <atomic>
#include <set>
#include <unordered_map>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/profiler/internal/kineto.h>

namespace lockstep::profiler::internal {
namespace {

using torch::autograd::profiler::KinetoEvent;
using torch::autograd::profiler::ProfilerResult;
using torch::profiler::impl::ActivityType;

std::set<ActivityType> activities_of(const KinetoOptions& options) {
  std::set<ActivityType> activities;
  if (options.cpu) activities.insert(ActivityType::CPU);
  if (options.cuda) activities.insert(ActivityType::CUDA);
  return activities;
}

/// Without Kineto's own stacks, which are Python's: they cost, and show nothing of C++.
torch::profiler::impl::ProfilerConfig config_of(const KinetoOptions& options) {
  torch::profiler::impl::ExperimentalConfig details;
  // What joins an operator with its kernels on a card.
  details.disable_external_correlation = !options.cuda;
  return torch::profiler::impl::ProfilerConfig(
      torch::profiler::impl::ProfilerState::KINETO, options.record_shapes, options.profile_memory,
      /*with_stack=*/false, options.with_flops, /*with_modules=*/false, details);
}

bool is_memory(const KinetoEvent& event) {
  const std::string name = event.name();
  return name == "[memory]" || name == "[OutOfMemory]";
}

bool is_on_device(c10::DeviceType type) {
  return type == c10::DeviceType::CUDA || type == c10::DeviceType::HIP || type == c10::DeviceType::XPU ||
         type == c10::DeviceType::PrivateUse1;
}

bool is_on_host(c10::DeviceType type) {
  return type == c10::DeviceType::CPU || type == c10::DeviceType::MKLDNN || type == c10::DeviceType::IDEEP;
}

bool has_type(const KinetoEvent& event, libkineto::ActivityType type) {
  return event.activityType() == static_cast<uint8_t>(type);
}

FunctionEvent function_event(const KinetoEvent& event, int64_t begin_ns) {
  FunctionEvent function;
  function.id = event.correlationId();
  function.name = event.name();
  function.thread = event.startThreadId();
  function.fwd_thread = event.fwdThreadId();
  function.start_ns = static_cast<int64_t>(event.startNs()) - begin_ns;
  function.end_ns = static_cast<int64_t>(event.endNs()) - begin_ns;
  for (const auto& shape : event.shapes()) function.input_shapes.push_back(shape);
  function.scope = event.scope();
  function.sequence_nr = event.sequenceNr();
  function.device_type = event.deviceType();
  function.is_async = event.isAsync() || event.startThreadId() != event.endThreadId();
  function.is_user_annotation = has_type(event, libkineto::ActivityType::USER_ANNOTATION) ||
                                has_type(event, libkineto::ActivityType::GPU_USER_ANNOTATION);
  function.flops = event.flops();
  return function;
}

/// What was allocated when, for sums over a span of time.
class MemoryRecords {
 public:
  MemoryRecords(const std::vector<KinetoEvent>& events, int64_t begin_ns) {
    for (const KinetoEvent& event : events) {
      if (event.name() != "[memory]") continue;
      records_.push_back({static_cast<int64_t>(event.startNs()) - begin_ns, &event, false});
    }
    std::stable_sort(records_.begin(), records_.end(),
                     [](const Record& a, const Record& b) { return a.at_ns < b.at_ns; });
  }

  /// Gives the event what was allocated while it ran.
  void give_to(FunctionEvent& event) {
    auto record = std::lower_bound(records_.begin(), records_.end(), event.start_ns,
                                   [](const Record& a, int64_t ns) { return a.at_ns < ns; });
    for (; record != records_.end() && record->at_ns <= event.end_ns; ++record) {
      add(*record->event, event);
      record->given = true;
    }
  }

  /// Those that no event has got.
  void append_rest(std::vector<FunctionEvent>& events, int64_t begin_ns) const {
    for (const Record& record : records_) {
      if (record.given) continue;
      FunctionEvent event = memory_event(*record.event, begin_ns);
      add(*record.event, event);
      events.push_back(std::move(event));
    }
  }

  static FunctionEvent memory_event(const KinetoEvent& record, int64_t begin_ns) {
    FunctionEvent event;
    event.name = record.name();
    event.thread = event.fwd_thread = record.startThreadId();
    event.start_ns = event.end_ns = static_cast<int64_t>(record.startNs()) - begin_ns;
    return event;
  }

 private:
  struct Record {
    int64_t at_ns;
    const KinetoEvent* event;
    bool given;
  };

  static void add(const KinetoEvent& record, FunctionEvent& event) {
    if (is_on_host(record.deviceType())) event.cpu_memory_usage += record.nBytes();
    if (is_on_device(record.deviceType())) event.device_memory_usage += record.nBytes();
  }

  std::vector<Record> records_;
};

class KinetoTraceOfProcess final : public KinetoTrace {
 public:
  explicit KinetoTraceOfProcess(std::unique_ptr<ProfilerResult> result)
      : result_(std::move(result)), begin_ns_(static_cast<int64_t>(result_->trace_start_ns())) {}

  std::vector<FunctionEvent> raw_events() const override {
    std::vector<FunctionEvent> events;
    events.reserve(result_->events().size());
    for (const KinetoEvent& event : result_->events()) events.push_back(function_event(event, begin_ns_));
    return events;
  }

  /// After _parse_kineto_results of torch/autograd/profiler.py.
  std::vector<FunctionEvent> events(const std::vector<FunctionEvent>& with_stacks) const override {
    const std::vector<KinetoEvent>& all = result_->events();
    MemoryRecords memory(all, begin_ns_);
    std::vector<FunctionEvent> events;
    std::unordered_map<uint64_t, size_t> callers;  // by their number
    std::vector<std::pair<uint64_t, const KinetoEvent*>>
        from_callers;            // kernels, and the calls that launch them
    std::vector<size_t> places;  // of each of those in `events`
    for (size_t i = 0; i < all.size(); ++i) {
      if (is_memory(all[i]) || all[i].isHiddenEvent()) continue;
      FunctionEvent event = function_event(all[i], begin_ns_);
      if (event.name.starts_with("ProfilerStep#")) event.name = "ProfilerStep*";
      if (!with_stacks.empty()) event.stack = with_stacks[i].stack;
      if (event.device_type == c10::DeviceType::CPU) memory.give_to(event);
      if (const uint64_t caller = all[i].linkedCorrelationId(); caller > 0) {
        from_callers.emplace_back(caller, &all[i]);
        places.push_back(events.size());
      } else if (event.device_type == c10::DeviceType::CPU && !event.is_async) {
        callers[all[i].correlationId()] = events.size();
      }
      events.push_back(std::move(event));
    }
    for (size_t i = 0; i < from_callers.size(); ++i) {
      const auto found = callers.find(from_callers[i].first);
      if (found == callers.end()) continue;
      FunctionEvent& caller = events[found->second];
      FunctionEvent& callee = events[places[i]];
      if (is_on_device(callee.device_type)) caller.kernel_ns += callee.end_ns - callee.start_ns;
      if (callee.device_type == c10::DeviceType::CPU) callee.thread = caller.thread;
    }
    memory.append_rest(events, begin_ns_);
    for (const KinetoEvent& event : all) {
      if (event.name() == "[OutOfMemory]") events.push_back(MemoryRecords::memory_event(event, begin_ns_));
    }
    return events;
  }

  void save(const std::string& path) override { result_->save(path); }

 private:
  std::unique_ptr<ProfilerResult> result_;
  int64_t begin_ns_;
};

/// This thread has begun a recording, and not ended it.
thread_local bool records_here = false;
/// A thread has. Another recording that began meanwhile would fail in torch when that thread ends.
PerProcess<std::atomic<bool>> records_somewhere;

/// Ends the recording with its thread, for the main one in exit(): what torch keeps of one that goes on fails in the
/// destructors of its libraries, and the process with it.
struct EndOfThread {
  EndOfThread() = default;
  EndOfThread(const EndOfThread&) = delete;
  EndOfThread& operator=(const EndOfThread&) = delete;
  ~EndOfThread() {
    if (!std::exchange(records_here, false) || fork_guard.in_forked_child()) return;
    try {
      torch::autograd::profiler::disableProfiler();
    } catch (...) {
    }
    records_somewhere.get() = false;
  }
  ForkGuard fork_guard;
};

}  // namespace

void quieten_kineto() {
  // By torch's function, which keeps torch's own threads from reading the environment meanwhile.
  [[maybe_unused]] static const bool quiet =
      (c10::utils::set_env("KINETO_LOG_LEVEL", "99", /*overwrite=*/false), true);
}

void prepare_kineto(const KinetoOptions& options) {
  TORCH_CHECK(
      !records_somewhere.get(),
      "Profiler: a recording that was ended in another thread than it was begun in goes on until that "
      "thread ends; call start(), step() and stop() in one thread");
  quieten_kineto();
  torch::autograd::profiler::prepareProfiler(config_of(options), activities_of(options));
}

void start_kineto(const KinetoOptions& options) {
  torch::autograd::profiler::enableProfiler(config_of(options), activities_of(options));
  thread_local const EndOfThread
      end_of_thread;  // made after what torch has in the thread, so it is destroyed before
  records_here = true;
  records_somewhere.get() = true;
}

std::unique_ptr<KinetoTrace> stop_kineto() {
  TORCH_CHECK(std::exchange(records_here, false),
              "Profiler: what it recorded is lost, for it was ended in another thread than it was begun in, "
              "or after "
              "that thread's end, as by exit(); call start(), step() and stop() in one thread");
  records_somewhere.get() = false;
  return std::make_unique<KinetoTraceOfProcess>(torch::autograd::profiler::disableProfiler());
}

}  // namespace lockstep::profiler::internal
