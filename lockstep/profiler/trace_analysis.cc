#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <ranges>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

#include <lockstep/base/training/where_lead_lies.h>
#include <lockstep/base/upper_median.h>
#include <lockstep/profiler/internal/trace_profile.h>
#include <lockstep/profiler/trace_analysis.h>

namespace lockstep::profiler {
namespace {

using internal::Cover;
using internal::FileProfile;
using internal::kPhases;
using internal::MemoryUse;
using internal::OperationParts;
using internal::Phase;
using internal::StepProfile;
using internal::TracedOperation;

/// How much longer than the others' median a rank takes that is called slow.
constexpr double kSlow = 0.05;

double ms(int64_t ns) {
  return static_cast<double>(ns) / 1e6;
}

double& part_of(TracePhaseTimes& times, Phase phase) {
  switch (phase) {
    case Phase::kData:
      return times.data;
    case Phase::kCommunication:
      return times.communication;
    case Phase::kBackward:
      return times.backward;
    case Phase::kOptimizer:
      return times.optimizer;
    case Phase::kForward:
      return times.forward;
    default:
      return times.idle;
  }
}

void add(TracePhaseTimes& sum, const TracePhaseTimes& times, double factor) {
  for (double TracePhaseTimes::*part :
       {&TracePhaseTimes::data, &TracePhaseTimes::forward, &TracePhaseTimes::backward,
        &TracePhaseTimes::communication, &TracePhaseTimes::optimizer, &TracePhaseTimes::idle,
        &TracePhaseTimes::hidden_communication, &TracePhaseTimes::waiting}) {
    sum.*part += factor * (times.*part);
  }
}

/// The operations of all files.
struct Operations {
  explicit Operations(const std::vector<FileProfile>& files) {
    for (size_t i = 0; i < files.size(); ++i) {
      all.insert(all.end(), files[i].operations.begin(), files[i].operations.end());
      file_of.resize(all.size(), i);
    }
    clocks = internal::offsets_between(all, files.front().origin.clock);
    matched = internal::match_operations(all, clocks);
  }
  std::vector<TracedOperation> all;
  std::vector<size_t> file_of;
  std::map<std::string, flight::ClockOffset> clocks;
  std::vector<OperationParts> matched;
};

/// Steps of which other ranks lack all collectives. A single one they may lack in the same step: what NCCL has not ended
/// when the recording ends has no end, and is left out of a trace.
std::set<StepProfile*> steps_of_one_rank(std::vector<FileProfile>& files, const Operations& operations) {
  std::map<std::string, std::set<int64_t>> members;  // that have traces, by group
  for (const TracedOperation& one : operations.all) members[one.group].insert(one.rank);
  std::vector<bool> complete(operations.all.size(), false);
  for (const OperationParts& parts : operations.matched) {
    const size_t all = members.at(operations.all[parts.parts.front()].group).size();
    for (const size_t part : parts.parts) complete[part] = parts.parts.size() == all;
  }
  std::set<StepProfile*> steps, shared;
  for (size_t i = 0; i < operations.all.size(); ++i) {
    const TracedOperation& one = operations.all[i];
    FileProfile& file = files[operations.file_of[i]];
    if (one.point_to_point || members.at(one.group).size() == 1 || !file.has_step_marks) continue;
    for (StepProfile& step : file.steps) {
      if (step.span.begin <= one.start_ns && one.start_ns < step.span.end)
        (complete[i] ? shared : steps).insert(&step);
    }
  }
  for (StepProfile* step : shared) steps.erase(step);
  return steps;
}

/// Leaves out steps that not all ranks have recorded, as where a signal has found them one step apart: for whom a rank has
/// waited in them is not known. False where it is not known of any: a rank would have none left, and all stay, or the
/// traces are Python's.
bool leave_out_steps(std::vector<FileProfile>& files, const Operations& operations, TraceAnalysis& analysis) {
  if (operations.all.empty()) return false;
  const std::set<StepProfile*> steps = steps_of_one_rank(files, operations);
  std::set<int64_t> all_ranks, ranks;  // with steps, and with those that stay
  for (FileProfile& file : files) {
    for (StepProfile& step : file.steps) {
      all_ranks.insert(file.origin.rank);
      if (!steps.contains(&step)) ranks.insert(file.origin.rank);
    }
  }
  if (ranks != all_ranks) {
    analysis.notes.push_back(
        "the ranks have recorded different steps, so for whom they have waited is not known: record more "
        "of them (active)");
    return false;
  }
  for (StepProfile* step : steps) step->left_out = true;
  if (!steps.empty()) {
    analysis.notes.push_back(std::to_string(steps.size()) +
                             " steps are left out of the times, for not all ranks have recorded them");
  }
  return true;
}

/// How long each file's rank has waited for others while it computed nothing; milliseconds.
std::vector<double> waiting_of(const std::vector<FileProfile>& files, const Operations& operations) {
  std::vector<std::vector<internal::Span>> spans(files.size());
  for (const OperationParts& parts : operations.matched) {
    for (const size_t part : parts.parts) {
      const int64_t waited = internal::waited_ns(parts, part, operations.all, operations.clocks);
      const int64_t start = operations.all[part].start_ns;
      if (waited > 0) spans[operations.file_of[part]].push_back({start, start + waited});
    }
  }
  std::vector<double> waiting;
  for (size_t i = 0; i < files.size(); ++i) {
    std::vector<internal::Span> steps;
    for (const StepProfile& step : files[i].steps) {
      if (!step.left_out) steps.push_back(step.span);
    }
    waiting.push_back(ms((Cover(std::move(spans[i])) & files[i].exposed & Cover(std::move(steps))).length()));
  }
  return waiting;
}

MemoryPeak peak_of(const std::string& device, const internal::PeakMemory& peak) {
  const auto bytes = [&](MemoryUse use) { return peak.by_use[static_cast<size_t>(use)]; };
  return {.device = device,
          .bytes = peak.bytes,
          .inputs = bytes(MemoryUse::kInputs),
          .activations = bytes(MemoryUse::kActivations),
          .gradients = bytes(MemoryUse::kGradients),
          .optimizer_state = bytes(MemoryUse::kOptimizerState),
          .temporary = bytes(MemoryUse::kTemporary),
          .other = bytes(MemoryUse::kOther)};
}

/// By device, also of those of which nothing but what was there before is known.
std::vector<MemoryPeak> peaks_of(const FileProfile& file) {
  std::map<std::string, MemoryPeak> peaks;
  for (const auto& [device, peak] : file.memory) peaks[device] = peak_of(device, peak);
  for (const auto& [device, held] : file.held) {
    peaks[device].device = device;
    peaks[device].held = held;
  }
  std::vector<MemoryPeak> all;
  for (auto& [device, peak] : peaks) all.push_back(std::move(peak));
  return all;
}

/// Sums of all files of a rank; mean() of them is what is told.
struct RankSums {
  RankProfile profile;  // times are sums
  std::map<std::string, MemoryPeak> memory;
};

std::map<int64_t, RankSums> sums_of(const std::vector<FileProfile>& files, const Operations& operations) {
  const std::vector<double> waiting = waiting_of(files, operations);
  std::map<int64_t, RankSums> ranks;
  for (size_t i = 0; i < files.size(); ++i) {
    const FileProfile& file = files[i];
    RankSums& sums = ranks[file.origin.rank];
    sums.profile.rank = file.origin.rank;
    sums.profile.host = file.origin.host;
    for (const StepProfile& step : file.steps) {
      if (step.left_out) continue;
      ++sums.profile.steps;
      for (size_t phase = 0; phase < kPhases; ++phase) {
        part_of(sums.profile.mean, static_cast<Phase>(phase)) += ms(step.ns[phase]);
      }
      sums.profile.mean.hidden_communication += ms(step.hidden_ns);
    }
    sums.profile.mean.waiting += waiting[i];
    for (MemoryPeak& peak : peaks_of(file)) {
      MemoryPeak& known = sums.memory[peak.device];
      if (peak.bytes + peak.held.total() >= known.bytes + known.held.total()) known = std::move(peak);
    }
  }
  return ranks;
}

std::string in_ms(double value) {
  std::ostringstream text;
  text.precision(value < 10 ? 2 : 1);
  text << std::fixed << value << " ms";
  return text.str();
}

struct NamedPhase {
  const char* name;
  double (*part)(const TracePhaseTimes& times);
};
/// The last is a rank's own only where waiting is known.
constexpr std::array<NamedPhase, 6> kOwnPhases = {
    {{"waiting for data", [](const TracePhaseTimes& times) { return times.data; }},
     {"forward", [](const TracePhaseTimes& times) { return times.forward; }},
     {"backward", [](const TracePhaseTimes& times) { return times.backward; }},
     {"the optimizer", [](const TracePhaseTimes& times) { return times.optimizer; }},
     {"nothing that is recorded", [](const TracePhaseTimes& times) { return times.idle; }},
     {"exposed communication",
      [](const TracePhaseTimes& times) { return times.communication - times.waiting; }}}};

/// The rank that takes longest without what it waits for others; in a synchronous job the steps of all take equally long.
/// Where waiting is not known, communication counts as that.
void find_slowest(TraceAnalysis& analysis) {
  if (analysis.ranks.size() < 2) return;
  const auto without =
      analysis.waiting_is_known ? &TracePhaseTimes::waiting : &TracePhaseTimes::communication;
  const auto own = [&](const RankProfile& rank) { return rank.mean.total() - rank.mean.*without; };
  const auto slowest =
      std::max_element(analysis.ranks.begin(), analysis.ranks.end(),
                       [&](const RankProfile& a, const RankProfile& b) { return own(a) < own(b); });
  const auto others = [&](const auto& value) {
    std::vector<double> values;
    for (const RankProfile& rank : analysis.ranks) {
      if (&rank != &*slowest) values.push_back(value(rank));
    }
    return upper_median(std::move(values));
  };
  const double usual = others(own);
  if (own(*slowest) <= (1 + kSlow) * usual) return;
  analysis.slowest = slowest->rank;
  const NamedPhase* most = nullptr;
  double excess = 0, usual_part = 0;
  for (const NamedPhase& phase :
       kOwnPhases | std::views::take(kOwnPhases.size() - (analysis.waiting_is_known ? 0 : 1))) {
    const double of_others = others([&](const RankProfile& rank) { return phase.part(rank.mean); });
    if (phase.part(slowest->mean) - of_others <= excess) continue;
    excess = phase.part(slowest->mean) - of_others;
    usual_part = of_others;
    most = &phase;
  }
  analysis.why = "it takes " + in_ms(own(*slowest)) + " a step without " +
                 (analysis.waiting_is_known ? "waiting" : "communication") + ", the others " + in_ms(usual);
  if (most != nullptr) {
    analysis.why += where_lead_lies(excess, own(*slowest) - usual) + most->name + " (" +
                    in_ms(most->part(slowest->mean)) + " and " + in_ms(usual_part) + ")";
  }
}

void add_operators(const std::vector<FileProfile>& files, TraceAnalysis& analysis) {
  std::map<std::string, internal::OperatorSum> sums;
  double steps = 0, total = 0;
  for (const FileProfile& file : files) {
    steps += static_cast<double>(file.steps.size());
    for (const auto& [name, sum] : file.operators) {
      sums[name].calls += sum.calls;
      sums[name].self_ns += sum.self_ns;
      total += sum.self_ns;
    }
  }
  for (const auto& [name, sum] : sums) {
    analysis.operators.push_back({.name = name,
                                  .calls = static_cast<double>(sum.calls) / steps,
                                  .self_ms = sum.self_ns / 1e6 / steps,
                                  .share = total > 0 ? sum.self_ns / total : 0});
  }
  std::stable_sort(analysis.operators.begin(), analysis.operators.end(),
                   [](const OperatorTime& a, const OperatorTime& b) { return a.self_ms > b.self_ms; });
}

/// What promises most, by how much of the step it is about.
void advise(TraceAnalysis& analysis) {
  const TracePhaseTimes& mean = analysis.mean;
  const double step = mean.total();
  if (step <= 0) return;
  std::vector<std::pair<double, std::string>> advice;
  const auto consider = [&](double share, double from, const std::string& text) {
    if (share >= from) advice.emplace_back(share, text);
  };
  consider(mean.data / step, 0.05,
           "the step waits for data: give the DataLoader more num_workers, or a larger prefetch_factor, or "
           "do less for each sample (the loaders' rows show what takes their time)");
  const std::string slow = !analysis.waiting_is_known && analysis.slowest
                               ? "ranks wait for rank " + std::to_string(*analysis.slowest) + ", or "
                               : "";
  consider(
      (mean.communication - mean.waiting) / step, 0.05,
      slow +
          "communication is not hidden: overlap it with backward (DistributedDataParallel's bucket_cap_mb, "
          "smaller units of FullyShardedDataParallel, more chunks of a pipeline), communicate less often "
          "(GradientAccumulation), or fewer bytes (a compression hook, MixedPrecision's reduce_dtype)");
  consider(mean.waiting / step, 0.05,
           analysis.slowest
               ? "ranks wait for rank " + std::to_string(*analysis.slowest) +
                     ": look at what it does longer than the others, and at its host"
               : "ranks wait for each other, now for one, now for another: give each the same work, and as "
                 "many cores as it has threads (lockstep doctor)");
  consider(mean.optimizer / step, 0.2,
           "the optimizer takes long: shard it over the ranks (ZeroRedundancyOptimizer), or let it run "
           "beside backward (register_fused_optim)");
  consider(
      mean.idle / step, 0.15,
      "for a part of the step nothing is recorded: put profiler::RecordFunction around what the program does "
      "between operators, and look for printing, item(), checkpoints and validation");
  if (!analysis.operators.empty()) {
    const OperatorTime& first = analysis.operators.front();
    const double compute = (mean.forward + mean.backward) / step;
    if (first.share >= 0.4) {
      consider(compute * first.share, 0.2,
               first.name + " is " + std::to_string(std::lround(first.share * 100)) +
                   " % of all operators' time: a narrower dtype (autocast), larger batches, or more threads "
                   "for each rank make it faster");
    }
  }
  std::stable_sort(advice.begin(), advice.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  for (auto& [share, text] : advice) {
    analysis.advice.push_back(std::to_string(std::lround(share * 100)) + " %: " + text);
  }
}

int64_t world_of(const std::vector<FileProfile>& files) {
  int64_t world = -1;
  for (const FileProfile& file : files) world = std::max(world, file.origin.world_size);
  return world;
}

void note_ranks(const std::vector<FileProfile>& files, TraceAnalysis& analysis) {
  const int64_t world = world_of(files);
  std::set<int64_t> steps;
  for (const FileProfile& file : files) {
    if (!file.has_step_marks) {
      analysis.notes.push_back(file.path + " has no marks of steps, so it is taken for one; call step()");
    }
  }
  for (const RankProfile& rank : analysis.ranks) steps.insert(rank.steps);
  if (world > static_cast<int64_t>(analysis.ranks.size())) {
    analysis.notes.push_back("traces of " + std::to_string(analysis.ranks.size()) + " of " +
                             std::to_string(world) + " ranks are here");
  }
  if (steps.size() > 1) analysis.notes.push_back("the ranks have recorded unequally many steps");
}

}  // namespace

TraceAnalysis analyze_traces(const std::string& directory) {
  std::vector<FileProfile> files;
  for (const std::string& path : internal::trace_files(directory)) {
    files.push_back(internal::profile_of(path));
  }
  std::vector<internal::TraceOrigin*> origins;
  for (FileProfile& file : files) origins.push_back(&file.origin);
  TraceAnalysis analysis;
  analysis.notes = internal::complete_ranks(origins);
  int64_t steps = 0;
  const Operations operations(files);
  const bool matched = leave_out_steps(files, operations, analysis);
  for (auto& [rank, sums] : sums_of(files, operations)) {
    RankProfile& profile = sums.profile;
    steps += profile.steps;
    add(analysis.mean, profile.mean, 1);
    if (profile.steps > 0) {
      const TracePhaseTimes sum = std::exchange(profile.mean, {});
      add(profile.mean, sum, 1 / static_cast<double>(profile.steps));
    }
    for (auto& [device, peak] : sums.memory) profile.memory.push_back(std::move(peak));
    analysis.ranks.push_back(std::move(profile));
  }
  if (steps > 0) {
    const TracePhaseTimes sum = std::exchange(analysis.mean, {});
    add(analysis.mean, sum, 1 / static_cast<double>(steps));
    add_operators(files, analysis);
  }
  const int64_t world = world_of(files);
  analysis.waiting_is_known = analysis.ranks.size() < 2 ? world < 2 : matched;
  find_slowest(analysis);
  advise(analysis);
  note_ranks(files, analysis);
  return analysis;
}

}  // namespace lockstep::profiler
