#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/device/accelerator.h>
#include <lockstep/profiler/internal/call_stacks.h>
#include <lockstep/profiler/internal/held_memory.h>
#include <lockstep/profiler/internal/kineto.h>
#include <lockstep/profiler/internal/operation_log.h>
#include <lockstep/profiler/internal/running_profilers.h>
#include <lockstep/profiler/internal/thread_scopes.h>
#include <lockstep/profiler/internal/trace_file.h>
#include <lockstep/profiler/internal/trace_names.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep {

using profiler::ProfilerAction;
using profiler::ProfilerActivity;

namespace {

bool has_cuda() {
  return accelerator() == c10::DeviceType::CUDA && accelerator_count() > 0;
}

using nlohmann::ordered_json;

/// As torch writes it. With line breaks and a blank after each colon, for HTA looks for `"rank": 0` with a blank.
std::string distributed_info(const WorldDefaults& world, const std::vector<flight::ObservedGroup>& groups) {
  std::vector<int> all(static_cast<size_t>(world.world_size));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  ordered_json configuration = ordered_json::array();
  const auto add = [&](const std::string& name, const std::string& description,
                       const std::vector<int>& ranks) {
    configuration.push_back({{"pg_name", name},
                             {"pg_desc", description},
                             {"backend_config", "cpu:lockstep"},
                             {"pg_size", ranks.size()},
                             {"ranks", ranks}});
  };
  add("0", "default_pg", all);
  for (const flight::ObservedGroup& group : groups) {
    if (group.ranks != all) add(group.name, group.name, group.ranks);
  }
  return ordered_json{{"backend", "lockstep"},
                      {"rank", world.rank},
                      {"world_size", world.world_size},
                      {"pg_count", configuration.size()},
                      {"pg_config", configuration}}
      .dump(1);
}

std::string process_info(const std::optional<profiler::internal::HeldByDevice>& held) {
  const HostIdentity host = this_host();
  ordered_json info = {{"pid", ::getpid()}, {"host", host.hostname}, {"boot_id", host.boot_id}};
  if (held) info[profiler::internal::kHeldField] = profiler::internal::json_of_held(*held);
  return json_text(info);
}

bool records_in(std::optional<ProfilerAction> action) {
  return action == ProfilerAction::kRecord || action == ProfilerAction::kRecordAndSave;
}

/// Kineto records for one at a time.
PerProcess<std::atomic<bool>> a_profiler_records;

}  // namespace

namespace profiler {

std::set<ProfilerActivity> supported_activities() {
  std::set<ProfilerActivity> activities = {ProfilerActivity::kCpu};
  if (has_cuda()) activities.insert(ProfilerActivity::kCuda);
  return activities;
}

}  // namespace profiler

/// What lives while a cycle is made ready and recorded.
struct Profiler::Recording {
  Recording() {
    TORCH_CHECK(!a_profiler_records.get().exchange(true),
                "Profiler: another one records; a process can have one at a time");
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() { a_profiler_records.get() = false; }

  profiler::internal::KinetoOptions kineto;
  bool begun = false;
  std::optional<WorldDefaults> world;  // a program may have left its group before it exports
  std::optional<profiler::internal::HeldByDevice> held;  // at its begin, with profile_memory
  std::shared_ptr<profiler::internal::OperationLog> operations;
  std::unique_ptr<profiler::internal::ThreadScopes> scopes;
  std::unique_ptr<profiler::internal::CallStacks> stacks;
  std::unique_ptr<profiler::RecordFunction> step;  // the scope of the step that is under way
};

/// What a cycle has brought.
struct Profiler::Cycle {
  std::unique_ptr<profiler::internal::KinetoTrace> trace;
  profiler::internal::TraceAdditions additions;
  std::optional<WorldDefaults> world;
  std::optional<profiler::internal::HeldByDevice> held;
  std::vector<profiler::FunctionEvent> with_stacks;            // Kineto's; empty without stacks
  std::optional<std::vector<profiler::FunctionEvent>> events;  // once they were asked for
  bool exported = false;
};

Profiler::Profiler(ProfilerOptions options)
    : options_(std::move(options)),
      activities_(options_.activities.value_or(profiler::supported_activities())),
      current_(action(0)) {
  TORCH_CHECK_VALUE(!activities_.empty(), "Profiler: there is no activity to record; leave .activities out");
  TORCH_CHECK_VALUE(!activities_.contains(ProfilerActivity::kCuda) || has_cuda(),
                    "Profiler: .activities has kCuda, but this process has no card");
  start();
}

Profiler::~Profiler() {
  stop_at_last(Reason::kUnknown);
}

void profiler::internal::end_explained(std::unique_ptr<Profiler> profiler) {
  if (profiler) profiler->stop_at_last(Profiler::Reason::kInLog);
}

void Profiler::stop_at_last(Reason reason) noexcept {
  try {
    stop(reason);
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "the profile could not be written: " << text_of(error);
  }
}

ProfilerAction Profiler::action(int64_t step) const {
  return options_.schedule ? options_.schedule(step) : ProfilerAction::kRecord;
}

void Profiler::start() {
  if (running_) return;
  if (auto* give_way = profiler::internal::before_profiler_starts.load(std::memory_order_acquire)) give_way();
  transit(ProfilerAction::kNone, current_);
  running_ = true;
  ++profiler::internal::running_profilers;
}

void Profiler::stop() {
  stop(Reason::kUnknown);
}

void Profiler::stop(Reason reason) {
  if (!running_) return;
  running_ = false;
  --profiler::internal::running_profilers;
  if (recording_) recording_->step.reset();
  transit(current_, std::nullopt);
  if (options_.on_trace_ready && !cycle_ && reason == Reason::kUnknown) {
    LOCKSTEP_LOG(kWarning) << "Profiler: " << nothing_recorded();
  }
}

std::string Profiler::nothing_recorded() const {
  return "the schedule records none of the first " + std::to_string(step_num_ + 1) +
         " steps, and there were no more: is its wait too long, or step() not called?";
}

void Profiler::step() {
  TORCH_CHECK(running_, "Profiler: step() after stop()");
  const ProfilerAction next = action(step_num_ + 1);
  if (recording_) recording_->step.reset();
  ++step_num_;
  transit(std::exchange(current_, next), next);
}

/// What lies between two steps; `to` is none at the end. The table is torch's (torch/profiler/profiler.py, action_map).
void Profiler::transit(ProfilerAction from, std::optional<ProfilerAction> to) {
  const bool goes_on = (from == ProfilerAction::kRecord && records_in(to)) ||
                       (from == ProfilerAction::kWarmup && to == ProfilerAction::kWarmup);
  if (!goes_on) {
    try {
      leave(from, to);
    } catch (...) {  // the handler's; the next cycle is recorded nevertheless
      enter(to);
      mark_step();
      throw;
    }
    enter(to);
  }
  mark_step();
}

void Profiler::leave(ProfilerAction from, std::optional<ProfilerAction> to) {
  const bool recorded = records_in(from), records = records_in(to);
  if (to && ((from == ProfilerAction::kRecord && !records) ||
             (from == ProfilerAction::kWarmup && to == ProfilerAction::kNone))) {
    LOCKSTEP_LOG(kWarning)
        << "Profiler: the schedule leaves a cycle before its last step, so it is not saved";
  }
  if (recorded && recording_ && recording_->begun) {
    end();
    // A schedule that leaves a cycle early has not asked for a trace; the end of the profile has.
    const bool saved = from == ProfilerAction::kRecordAndSave || !to;
    if (saved && options_.on_trace_ready) options_.on_trace_ready(*this);
  } else if (from == ProfilerAction::kWarmup && !records && recording_) {
    // Kineto, once ready, has no other way back.
    profiler::internal::start_kineto(std::exchange(recording_, nullptr)->kineto);
    profiler::internal::stop_kineto();
  }
}

void Profiler::enter(std::optional<ProfilerAction> to) {
  if (!to || to == ProfilerAction::kNone) return;
  if (!recording_) prepare();
  if (records_in(to)) begin();
}

void Profiler::prepare() {
  auto recording = std::make_unique<Recording>();
  recording->kineto = {
      .cpu = activities_.contains(ProfilerActivity::kCpu),
      .cuda = activities_.contains(ProfilerActivity::kCuda),
      .record_shapes = options_.record_shapes || options_.with_flops,  // which are made of them
      .profile_memory = options_.profile_memory,
      .with_flops = options_.with_flops};
  profiler::internal::prepare_kineto(recording->kineto);
  recording_ = std::move(recording);
}

void Profiler::begin() {
  if (options_.profile_memory) recording_->held = profiler::internal::held_memory();
  profiler::internal::start_kineto(recording_->kineto);
  recording_->begun = true;
  recording_->world = world_defaults();
  if (options_.with_stack) recording_->stacks = std::make_unique<profiler::internal::CallStacks>();
  recording_->scopes = std::make_unique<profiler::internal::ThreadScopes>();
  recording_->operations = std::make_shared<profiler::internal::OperationLog>();
  flight::attach(recording_->operations);
}

void Profiler::end() {
  const auto recording = std::exchange(recording_, nullptr);
  flight::detach(recording->operations);
  if (recording->kineto.cuda) {  // what was enqueued belongs to the cycle
    for (int i = 0; i < accelerator_count(); ++i) {
      synchronize(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(i)));
    }
  }
  if (recording->stacks) recording->stacks->end();
  auto cycle = std::make_unique<Cycle>();
  cycle->trace = profiler::internal::stop_kineto();
  cycle->world = recording->world ? recording->world : world_defaults();
  cycle->held = recording->held;
  cycle->additions.scopes = recording->scopes->take();
  cycle->additions.operations = recording->operations->take();
  cycle->additions.collectives_as = options_.collectives_as;
  if (recording->stacks) {
    cycle->with_stacks = cycle->trace->raw_events();
    recording->stacks->give_to(cycle->with_stacks);
  }
  cycle_ = std::move(cycle);
}

void Profiler::mark_step() {
  if (!options_.schedule || !recording_ || !recording_->begun) return;
  recording_->step = std::make_unique<profiler::RecordFunction>("ProfilerStep#" + std::to_string(step_num_));
}

Profiler::Cycle& Profiler::cycle() const {
  TORCH_CHECK(cycle_, "Profiler: no cycle has ended yet; ",
              running_ ? "call stop(), or wait for on_trace_ready" : nothing_recorded());
  return *cycle_;
}

const std::vector<profiler::FunctionEvent>& Profiler::events() {
  Cycle& latest = cycle();
  if (!latest.events) {
    latest.events = latest.trace->events(latest.with_stacks);
    profiler::build_tree(*latest.events);
  }
  return *latest.events;
}

profiler::KeyAverages Profiler::key_averages(const profiler::KeyAveragesOptions& options) {
  return profiler::key_averages(events(), options,
                                {.device = activities_.contains(ProfilerActivity::kCuda) ? "CUDA" : "",
                                 .profile_memory = options_.profile_memory,
                                 .with_flops = options_.with_flops});
}

void Profiler::export_chrome_trace(const std::string& path) {
  Cycle& latest = cycle();
  TORCH_CHECK(
      !latest.exported,
      "Profiler: the trace of this cycle has been exported already, or was lost when that failed: Kineto "
      "writes each once");
  profiler::internal::TraceAdditions& additions = latest.additions;
  additions.metadata = metadata_;
  additions.metadata[profiler::internal::kProcessField] = process_info(latest.held);
  if (options_.record_shapes) additions.metadata["record_shapes"] = "1";
  if (options_.profile_memory) additions.metadata["profile_memory"] = "1";
  if (options_.with_stack) additions.metadata["with_stack"] = "1";
  for (const profiler::FunctionEvent& event : latest.with_stacks) {
    if (!event.stack.empty()) additions.stacks[event.id] = c10::Join(";", event.stack);
  }
  if (options_.with_flops) additions.metadata["with_flops"] = "1";
  if (latest.world) {
    additions.metadata["distributedInfo"] = distributed_info(*latest.world, additions.operations.groups);
  }
  // Looked for before Kineto gives its trace away.
  std::error_code unknown;
  const std::filesystem::file_status former = std::filesystem::status(path, unknown);
  TORCH_CHECK(!std::filesystem::exists(former) || std::filesystem::is_regular_file(former), path,
              " can't be written: it is no file, but a folder, a device or a pipe");
  // Kineto wants a name that ends so.
  const std::string raw = path + "." + std::to_string(::getpid()) + ".kineto.json";
  TORCH_CHECK(std::ofstream(raw).is_open(), path, " can't be written: ", std::strerror(errno));
  try {
    latest.trace->save(raw);
    latest.exported = true;
    profiler::internal::write_trace(raw, path, additions);
  } catch (...) {
    std::remove(raw.c_str());
    std::remove((raw + ".tmp").c_str());  // what newer Kinetos could not write whole
    throw;
  }
  std::remove(raw.c_str());
}

void Profiler::add_metadata(const std::string& key, const std::string& value) {
  add_metadata_json(key, json_text<ordered_json>(value));
}

void Profiler::add_metadata_json(const std::string& key, const std::string& value) {
  metadata_[key] = value;
}

}  // namespace lockstep
