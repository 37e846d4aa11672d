#include <algorithm>
#include <unistd.h>
#include <utility>

#include <lockstep/base/host_name.h>
#include <lockstep/monitor/host_sampler.h>
#include <lockstep/monitor/nvml.h>
#include <lockstep/rendezvous/process_stat.h>
#include <lockstep/transport/host/rank_memory.h>

namespace lockstep::monitor {
namespace {

using transport::RankMemory;

/// A command line may have 2 MB, for which an agent's report has no room.
constexpr size_t kMostProgramBytes = 4096;

double seconds_since(int64_t then_ns, std::chrono::steady_clock::time_point now) {
  const int64_t now_ns = std::chrono::nanoseconds(now.time_since_epoch()).count();
  return static_cast<double>(std::max<int64_t>(now_ns - then_ns, 0)) * 1e-9;
}

/// Of a counter, which an interface that is taken away makes smaller.
double growth(uint64_t before, uint64_t after) {
  return after < before ? 0 : static_cast<double>(after - before);
}

/// The rank's process and those above it. In a container the first of all, 1, may be the job's launcher.
std::set<pid_t> line_of(pid_t pid) {
  std::set<pid_t> line;
  while (pid > 0 && line.insert(pid).second) {
    const auto stat = read_process_stat(pid);
    pid = stat ? stat->parent : 0;
  }
  return line;
}

std::string job_of(const std::map<std::string, std::string>& variables, pid_t first) {
  for (const char* name : {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}) {
    const auto found = variables.find(name);
    if (found != variables.end() && !found->second.empty() && found->second != "none") return found->second;
  }
  return std::to_string(first);
}

}  // namespace

bool LocalJob::has(pid_t pid) const {
  return std::any_of(lines.begin(), lines.end(),
                     [pid](const auto& line) { return line.second.count(pid) != 0; });
}

HostSampler::HostSampler() : nvml_(Nvml::load()) {
  host_.host = host_name();
}

HostSampler::~HostSampler() = default;

std::vector<LocalJob> HostSampler::look() {
  const auto now = std::chrono::steady_clock::now();
  const double seconds = looked_ ? std::chrono::duration<double>(now - looked_at_).count() : 0;
  looked_at_ = now;
  look_at_host(seconds);
  looked_ = true;
  const transport::RankMemories found = transport::read_rank_memories();
  other_versions_ = found.other_layout;
  std::map<std::pair<pid_t, uint64_t>, LocalJob> jobs;
  for (const RankMemory& memory : found.ranks) {
    LocalJob& job = jobs[{memory.first_pid, memory.pid_namespace}];
    HostReport& report = job.report;
    if (report.ranks.empty()) {
      report = host_;
      const auto variables = internal::environment_of(memory.pid);
      report.job = job_of(variables, memory.pid);
      for (const std::string& word : internal::words_of(memory.pid)) {
        report.program += (report.program.empty() ? "" : " ") + word;
      }
      report.program = report.program.substr(0, kMostProgramBytes);
      const auto pretended = variables.find("LOCKSTEP_TEST_HOST");
      if (pretended != variables.end()) report.host = pretended->second;
    }
    report.ranks.push_back(report_of(memory, seconds));
    job.lines[memory.pid] = line_of(memory.pid);
  }
  former_ = std::exchange(present_, {});
  std::vector<LocalJob> result;
  for (auto& [first, job] : jobs) {
    for (CardReport& card : job.report.cards) {
      std::erase_if(card.others, [&](const StrangerReport& other) {
        return std::any_of(job.report.ranks.begin(), job.report.ranks.end(),
                           [&](const RankReport& rank) { return rank.pid == other.pid; });
      });
    }
    result.push_back(std::move(job));
  }
  return result;
}

void HostSampler::look_at_host(double seconds) {
  const auto counters = internal::read_host_counters();
  const auto memory = internal::read_host_memory();
  host_.cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  host_.memory_used = memory.used;
  host_.memory_total = memory.total;
  if (seconds > 0) {
    const double all = growth(counters_.cpu_all, counters.cpu_all);
    if (all > 0) host_.cpu_percent = 100 * growth(counters_.cpu_busy, counters.cpu_busy) / all;
    host_.received_per_second = growth(counters_.received, counters.received) / seconds;
    host_.sent_per_second = growth(counters_.sent, counters.sent) / seconds;
  }
  counters_ = counters;
  host_.cards.clear();
  on_card_.clear();
  card_memory_.clear();
  if (!nvml_) return;
  for (const Card& card : nvml_->cards()) {
    CardReport& report = host_.cards.emplace_back();
    report.index = card.index;
    report.name = card.name;
    report.used_percent = card.used_percent;
    report.memory_used = card.memory_used;
    report.memory_total = card.memory_total;
    for (const CardProcess& process : card.processes) {
      on_card_[card.index].push_back(process.pid);
      card_memory_[{card.index, process.pid}] = process.memory;
      const auto stat = read_process_stat(process.pid);
      report.others.push_back({.pid = process.pid,
                               .name = stat ? stat->name : std::string(),
                               .user = internal::user_of(process.pid),
                               .memory = process.memory});
    }
  }
}

RankReport HostSampler::report_of(const RankMemory& memory, double seconds) {
  RankReport report;
  report.rank = memory.rank;
  report.world_size = memory.world_size;
  report.pid = memory.pid;
  if (memory.told_step || memory.steps > 0)
    report.step = memory.told_step.value_or(static_cast<int64_t>(memory.steps));
  report.loss = memory.loss;
  report.phase = to_string(memory.phase);
  if (memory.since_ns > 0) report.phase_seconds = seconds_since(memory.since_ns, looked_at_);
  report.waits_for = memory.awaited;
  const auto stat = read_process_stat(memory.pid);
  Former present{
      .steps = memory.steps, .samples = memory.step_samples, .step_began_ns = memory.step_began_ns};
  const auto known = former_.find(memory.pid);
  const Former* former =
      known != former_.end() && stat && known->second.started == stat->start ? &known->second : nullptr;
  if (stat) {
    present.started = stat->start;
    present.cpu_ticks = stat->cpu_ticks;
    report.stopped = stat->state == 'T' || stat->state == 't';
    report.memory = static_cast<int64_t>(stat->resident_pages) * ::sysconf(_SC_PAGESIZE);
    if (former != nullptr && seconds > 0) {
      const double ticks = growth(former->cpu_ticks, stat->cpu_ticks);
      report.cpu_percent = 100 * ticks / static_cast<double>(::sysconf(_SC_CLK_TCK)) / seconds;
    }
  }
  if (memory.times) report.step_seconds = memory.times->step * 1e-9;
  // Between two steps' begins, whenever the looks were.
  if (former != nullptr && memory.steps > former->steps && former->steps > 0) {
    const double took = static_cast<double>(memory.step_began_ns - former->step_began_ns) * 1e-9;
    if (!report.step_seconds) report.step_seconds = took / static_cast<double>(memory.steps - former->steps);
    if (took > 0)
      present.samples_per_second = static_cast<double>(memory.step_samples - former->samples) / took;
  } else if (former != nullptr && former->samples_per_second) {
    present.samples_per_second = former->samples_per_second;
  } else if (memory.times && memory.times->step > 0) {
    present.samples_per_second = static_cast<double>(memory.step_samples) /
                                 static_cast<double>(memory.steps) / (memory.times->step * 1e-9);
  }
  // A step that takes longer than any before.
  if (present.samples_per_second && memory.steps > 0 && memory.step_began_ns > 0) {
    const double batch = static_cast<double>(memory.step_samples) / static_cast<double>(memory.steps);
    const double since = seconds_since(memory.step_began_ns, looked_at_);
    if (since > 1)
      report.samples_per_second = std::min(*present.samples_per_second, batch / since);
    else
      report.samples_per_second = present.samples_per_second;
  }
  if (memory.step_samples == 0)
    report.samples_per_second.reset();  // they come from elsewhere than a DataLoader
  present_[memory.pid] = present;
  for (const auto& [card, processes] : on_card_) {
    if (std::find(processes.begin(), processes.end(), memory.pid) == processes.end()) continue;
    report.cards.push_back(card);
    if (const auto bytes = card_memory_.at({card, memory.pid}))
      report.card_memory = report.card_memory.value_or(0) + *bytes;
  }
  return report;
}

}  // namespace lockstep::monitor
