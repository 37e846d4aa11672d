#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <lockstep/profiler/internal/trace_names.h>
#include <lockstep/profiler/internal/trace_profile.h>

namespace lockstep::profiler::internal {
namespace {

using nlohmann::json;

/// Between two backward functions, or two operators, the program does what belongs to them: nothing is idle there.
constexpr int64_t kBetweenBackwardNs = 100'000;
constexpr int64_t kBetweenOperatorsNs = 20'000;

bool has_prefix(const std::string& name, std::initializer_list<std::string_view> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

/// Operators and scopes by which torch and we show communication.
bool names_communication(const std::string& name) {
  return has_prefix(name,
                    {"lockstep:", "gloo:", "nccl:", "nccl", "ncclDevKernel", "c10d::", "record_param_comms"});
}

/// What a scope of this name is, by torch's names, ours, and the plain words; none: nothing that is known.
std::optional<Phase> phase_of_scope(const std::string& name) {
  if (name == "data" || has_prefix(name, {"enumerate(DataLoader)"})) return Phase::kData;
  if (name == "optimizer" || has_prefix(name, {"Optimizer.step#", "Optimizer.zero_grad#"}))
    return Phase::kOptimizer;
  if (name == "forward" || has_prefix(name, {"DistributedDataParallel.forward",
                                             "FullyShardedDataParallel.forward", "DataParallel.forward"})) {
    return Phase::kForward;
  }
  if (name == "backward") return Phase::kBackward;
  return std::nullopt;
}

/// A call of an operator, for the time that it takes itself.
struct Call {
  Span span;
  const std::string* name;  // a key of `operators`
};

struct Allocation {
  int64_t at_ns;
  std::string device;
  int64_t bytes;  // negative: given back
  int64_t address;
};

constexpr size_t kNever = std::numeric_limits<size_t>::max();

/// From an allocation to what gives it back: their places among all.
struct Block {
  size_t begin = 0;
  size_t end = kNever;
};

/// What the events of a file are, one after the other.
class Gatherer {
 public:
  explicit Gatherer(FileProfile& file) : file_(file) {}

  void take(const json& event) {
    learn_process(file_.origin, event);
    const std::string phase = text_of(event, "ph");
    if (phase == "i" && text_of(event, "name") == "[memory]") take_memory(event);
    if (phase != "X") return;
    const double begin = number_of(event, "ts");
    take_span(event, {since_1970(begin, file_.origin), since_1970(begin + duration_of(event), file_.origin)});
  }

  void finish() {
    const Cover computing(kernels_.empty() ? operators_ : kernels_);
    const Cover communication(own_communication_.empty() ? communication_ : own_communication_);
    choose_steps();
    const int64_t thread = step_thread_;
    const auto scope = [&](Phase phase) { return Cover(std::move(scopes_[{phase, thread}])); };
    const Cover data = scope(Phase::kData);
    const Cover optimizer = scope(Phase::kOptimizer);
    const Cover forward = scope(Phase::kForward);
    const Cover backward = Cover(std::move(backward_), kBetweenBackwardNs) | scope(Phase::kBackward);
    const Cover busy(operators_, kBetweenOperatorsNs);
    for (StepProfile& step : file_.steps) {
      const Cover parts[] = {
          data.within(step.span), communication.within(step.span) - computing.within(step.span),
          backward.within(step.span), optimizer.within(step.span), forward.within(step.span)};
      step.hidden_ns = (communication.within(step.span) & computing.within(step.span)).length();
      Cover rest(std::vector<Span>{step.span});
      Cover thread_rest = rest;
      const auto assign = [&](Phase phase, const Cover& cover) {
        const Cover own = rest & cover;
        rest = rest - own;
        step.ns[static_cast<size_t>(phase)] += own.length();
        if (phase == Phase::kCommunication) return own;
        const Cover of_thread = thread_rest & cover;
        thread_rest = thread_rest - of_thread;
        for (const Span& span : of_thread.spans()) segments_.emplace_back(span, phase);
        return own;
      };
      assign(Phase::kData, parts[0]);
      const Cover exposed = assign(Phase::kCommunication, parts[1]);
      exposed_.insert(exposed_.end(), exposed.spans().begin(), exposed.spans().end());
      assign(Phase::kBackward, parts[2]);
      assign(Phase::kOptimizer, parts[3]);
      assign(Phase::kForward, parts[4]);
      const auto& last = parts[2].spans();
      const int64_t turn = last.empty() ? step.span.end : last.back().end;
      assign(Phase::kForward, busy.within({step.span.begin, turn}));
      assign(Phase::kOptimizer, busy.within({turn, step.span.end}));
      assign(Phase::kIdle, rest);
    }
    file_.exposed = Cover(std::move(exposed_));
    std::sort(segments_.begin(), segments_.end(),
              [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
    add_up_operators();
    find_peaks();
  }

 private:
  void take_span(const json& event, const Span& span) {
    bounds_.begin = std::min(bounds_.begin, span.begin);
    bounds_.end = std::max(bounds_.end, span.end);
    const int64_t thread = integer_of(event, "tid");
    if (auto operation = operation_of(event, file_.origin)) {
      learn_rank(file_.origin, operation->rank);
      own_communication_.push_back(span);
      file_.operations.push_back(std::move(*operation));
      return;
    }
    const std::string name = text_of(event, "name");
    const std::string category = text_of(event, "cat");
    const bool communicates = names_communication(name);
    if (communicates) communication_.push_back(span);
    if (category == "user_annotation") {
      if (name.starts_with("ProfilerStep#")) {
        marked_steps_.push_back(span);
        step_thread_ = thread;
      } else if (const auto phase = phase_of_scope(name)) {
        scopes_[{*phase, thread}].push_back(span);
      }
    } else if (category == "cpu_op") {
      if (name.starts_with("autograd::engine::evaluate_function")) backward_.push_back(span);
      if (communicates) return;
      operators_.push_back(span);
      if (first_thread_ < 0) first_thread_ = thread;
      add_call(name, thread, span);
    } else if ((category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset") &&
               !communicates) {
      kernels_.push_back(span);
    }
  }

  void add_call(const std::string& name, int64_t thread, const Span& span) {
    const auto place = file_.operators.try_emplace(name).first;
    calls_[thread].push_back({span, &place->first});
  }

  void take_memory(const json& event) {
    constexpr int64_t kMostBytes = int64_t{1} << 40;  // sums don't overflow
    const json& arguments = arguments_of(event);
    allocations_.push_back(
        {since_1970(number_of(event, "ts"), file_.origin),
         name_of_device(integer_of(arguments, "Device Type"), integer_of(arguments, "Device Id")),
         std::clamp(integer_of(arguments, "Bytes"), -kMostBytes, kMostBytes), integer_of(arguments, "Addr")});
  }

  void choose_steps() {
    file_.has_step_marks = !marked_steps_.empty();
    if (!file_.has_step_marks) {
      if (bounds_.begin < bounds_.end) marked_steps_.push_back(bounds_);
      step_thread_ = first_thread_;
    }
    std::sort(marked_steps_.begin(), marked_steps_.end(),
              [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (const Span& span : marked_steps_) file_.steps.push_back({.span = span});
  }

  bool in_a_step(int64_t at) const {
    const auto next = std::partition_point(file_.steps.begin(), file_.steps.end(),
                                           [&](const StepProfile& step) { return step.span.begin <= at; });
    return next != file_.steps.begin() && at < std::prev(next)->span.end;
  }

  /// Thread by thread: what lies within an operator is no time of its own.
  void add_up_operators() {
    for (auto& [thread, calls] : calls_) {
      std::stable_sort(calls.begin(), calls.end(), [](const Call& a, const Call& b) {
        return std::pair(a.span.begin, -a.span.end) < std::pair(b.span.begin, -b.span.end);
      });
      std::vector<const Call*> open;
      for (const Call& call : calls) {
        while (!open.empty() && open.back()->span.end < call.span.end) open.pop_back();
        while (!open.empty() && open.back()->span.end <= call.span.begin) open.pop_back();
        const int64_t length = call.span.end - call.span.begin;
        if (in_a_step(call.span.begin)) {
          OperatorSum& sum = file_.operators.at(*call.name);
          ++sum.calls;
          sum.self_ns += static_cast<double>(length);
          if (!open.empty() && in_a_step(open.back()->span.begin)) {
            file_.operators.at(*open.back()->name).self_ns -= static_cast<double>(length);
          }
        }
        open.push_back(&call);
      }
    }
    std::erase_if(file_.operators, [](const auto& one) { return one.second.calls == 0; });
  }

  /// What the thread does, whatever communicates beside it.
  Phase phase_at(int64_t at) const {
    const auto next = std::partition_point(segments_.begin(), segments_.end(),
                                           [&](const auto& segment) { return segment.first.begin <= at; });
    if (next == segments_.begin() || std::prev(next)->first.end <= at) return Phase::kIdle;
    return std::prev(next)->second;
  }

  /// Whether a part of the phase, or a step where there is no phase, begins within the block's life.
  bool is_kept_until(std::optional<Phase> phase, const Block& block) const {
    if (block.end == kNever) return true;
    const int64_t begin_ns = allocations_[block.begin].at_ns;
    const int64_t end_ns = allocations_[block.end].at_ns;
    if (!phase) {
      const auto next = std::ranges::upper_bound(file_.steps, begin_ns, {},
                                                 [](const StepProfile& step) { return step.span.begin; });
      return next != file_.steps.end() && next->span.begin <= end_ns;
    }
    auto next = std::ranges::upper_bound(segments_, begin_ns, {},
                                         [](const auto& segment) { return segment.first.begin; });
    for (; next != segments_.end() && next->first.begin <= end_ns; ++next) {
      if (next->second == *phase) return true;
    }
    return false;
  }

  MemoryUse use_of(const Block& block) const {
    const auto kept = [&](std::optional<Phase> until, MemoryUse use) {
      return is_kept_until(until, block) ? use : MemoryUse::kTemporary;
    };
    switch (phase_at(allocations_[block.begin].at_ns)) {
      case Phase::kData:
        return MemoryUse::kInputs;
      case Phase::kForward:
        return kept(Phase::kBackward, MemoryUse::kActivations);
      case Phase::kBackward:
        return kept(Phase::kOptimizer, MemoryUse::kGradients);
      case Phase::kOptimizer:
        return kept(std::nullopt, MemoryUse::kOptimizerState);
      default:
        return MemoryUse::kOther;
    }
  }

  void find_peaks() {
    struct Device {
      std::vector<Block> blocks;
      std::unordered_map<int64_t, size_t> live;  // by address: index in blocks
      int64_t bytes = 0;
      int64_t peak_bytes = 0;
      size_t peak = 0;  // place in allocations_
    };
    std::stable_sort(allocations_.begin(), allocations_.end(),
                     [](const Allocation& a, const Allocation& b) { return a.at_ns < b.at_ns; });
    std::map<std::string, Device> devices;
    for (size_t i = 0; i < allocations_.size(); ++i) {
      const Allocation& allocation = allocations_[i];
      Device& device = devices[allocation.device];
      // What was there before the recording is not known; what another thread has given back is seen when its place is reused.
      if (const auto known = device.live.find(allocation.address); known != device.live.end()) {
        Block& block = device.blocks[known->second];
        block.end = i;
        device.bytes -= allocations_[block.begin].bytes;
        device.live.erase(known);
      }
      if (allocation.bytes < 0) continue;
      device.live[allocation.address] = device.blocks.size();
      device.blocks.push_back({.begin = i});
      device.bytes += allocation.bytes;
      if (device.bytes <= device.peak_bytes) continue;
      device.peak_bytes = device.bytes;
      device.peak = i;
    }
    for (const auto& [name, device] : devices) {
      PeakMemory peak{.bytes = device.peak_bytes};
      for (const Block& block : device.blocks) {
        if (block.begin <= device.peak && device.peak < block.end)
          peak.by_use[static_cast<size_t>(use_of(block))] += allocations_[block.begin].bytes;
      }
      if (peak.bytes > 0) file_.memory[name] = peak;
    }
  }

  FileProfile& file_;
  Span bounds_{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  int64_t step_thread_ = -1;
  int64_t first_thread_ = -1;
  std::vector<Span> marked_steps_;
  std::vector<Span> own_communication_;  // as our operations tell it; else
  std::vector<Span> communication_;      // by names
  std::vector<Span> operators_, kernels_, backward_, exposed_;
  std::map<std::pair<Phase, int64_t>, std::vector<Span>> scopes_;  // by phase and thread
  std::map<int64_t, std::vector<Call>> calls_;                     // by thread
  std::vector<Allocation> allocations_;
  std::vector<std::pair<Span, Phase>> segments_;
};

}  // namespace

FileProfile profile_of(const std::string& path) {
  TraceReader reader(path);
  FileProfile file;
  file.path = path;
  file.origin = origin_of(reader);
  if (const auto found = reader.header().find(kProcessField);
      found != reader.header().end() && found->is_object() && found->contains(kHeldField)) {
    file.held = held_of_json((*found)[kHeldField]);
  }
  Gatherer gatherer(file);
  json event;
  while (reader.next(event)) gatherer.take(event);
  gatherer.finish();
  return file;
}

}  // namespace lockstep::profiler::internal
