#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/process/cpu.h>
#include <lockstep/launch/agent/local_rank_macro.h>
#include <lockstep/launch/agent/worker_forks.h>
#include <lockstep/launch/program_libraries.h>

namespace lockstep::launch {
namespace {

// Loading the libraries from a slow disk may take so long. Executed workers would take as long.
constexpr auto kMostLoadTime = std::chrono::seconds(20);
constexpr auto kBetweenQuestions = std::chrono::milliseconds(50);

/// Whether one process can stand for all of them until they are forked.
bool are_alike(const RunOptions& options) {
  // Libraries may read what GPUs they see when they are loaded, and how many cores: of several processes each has one thread
  // unless it is told otherwise.
  return !options.virtual_local_rank && (options.cores.empty() || options.nprocs > 1) &&
         std::all_of(options.command.begin() + 1, options.command.end(),
                     [](const std::string& word) { return with_local_rank(word, 0) == word; });
}

}  // namespace

void WorkerForks::prepare(const RunOptions& options, const WorkerEnvironment& common,
                          const std::function<bool()>& gives_up) {
  if (server_ && server_->has_ended()) {  // it was killed
    server_.reset();
    tried_ = false;
  }
  if (!std::exchange(tried_, true)) start_server(options, common);
  if (!server_) return;
  const Deadline loaded = Deadline::after(kMostLoadTime);
  while (!gives_up()) {
    if (server_->await(Deadline::after(kBetweenQuestions))) return;
    if (server_->has_ended() || loaded.expired()) break;
  }
  server_.reset();
}

void WorkerForks::start_server(const RunOptions& options, const WorkerEnvironment& common) {
  // With a core for each, they load their libraries as fast by themselves, and end faster with memory of their own.
  if (!again_ && options.nprocs <= usable_cores()) return;
  if (!options.forks_workers || !are_alike(options)) return;
  std::vector<std::string> environment = common.strings();
  if (!links_this_library(options.program, environment)) return;
  try {
    server_.emplace(WorkerSpec{
        .program = options.program, .arguments = options.command, .environment = std::move(environment)});
  } catch (const c10::DistBackendError&) {
    // The start of the workers will tell, unless there is room for them alone.
  }
}

MakeProcess WorkerForks::make_process() {
  if (!server_) return {};
  return [this](const WorkerSpec& spec) { return server_->fork(spec); };
}

std::vector<pid_t> WorkerForks::pids() const {
  if (!server_ || server_->pid() < 0) return {};
  return {server_->pid()};
}

void WorkerForks::started() {
  if (!again_) server_.reset();
}

}  // namespace lockstep::launch
