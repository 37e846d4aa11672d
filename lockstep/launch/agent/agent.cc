#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sched.h>
#include <sstream>
#include <stdlib.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/device/nvidia_devices.h>
#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/worker_group.h>
#include <lockstep/launch/agent_store.h>
#include <lockstep/launch/worker_environment.h>

namespace lockstep::launch {
namespace {

constexpr int kMostProcesses = 65536;

int visible_gpus() {
  int devices = count_nvidia_cards("/dev");
  std::error_code ignored;
  // At least one on WSL, which has one node for all.
  if (devices == 0 && std::filesystem::exists("/dev/dxg", ignored)) devices = 1;
  const char* visible = ::getenv("CUDA_VISIBLE_DEVICES");  // empty means none, unset means all
  return visible == nullptr ? devices : std::min(devices, count_visible_devices(visible));
}

}  // namespace

int parse_nprocs(const std::string& text) {
  if (text == "cpu") return usable_cores();
  if (text == "gpu" || text == "auto") {
    const int gpus = visible_gpus();
    TORCH_CHECK_VALUE(gpus > 0 || text == "auto",
                      "--nproc-per-node gpu: no CUDA device is visible here; use a number, ", "cpu or auto");
    return gpus > 0 ? gpus : usable_cores();
  }
  const auto number = parse_number<int>(text);
  TORCH_CHECK_VALUE(number, "--nproc-per-node is '", text, "'; it takes a number, auto, cpu or gpu");
  TORCH_CHECK_VALUE(*number >= 1 && *number <= kMostProcesses, "--nproc-per-node is ", *number,
                    "; it takes a number from 1 to ", kMostProcesses, ", auto, cpu or gpu");
  return *number;
}

StreamChoice StreamChoice::parse(const std::string& option, const std::string& text) {
  const auto number = [&](const std::string& digits, int most) {
    const auto value = parse_number<int>(digits);
    TORCH_CHECK_VALUE(value && *value >= 0 && *value <= most, option, " is '", text,
                      "'; it takes 0 to 3 (1: standard output, 2: standard error, 3: both), or "
                      "RANK:STREAMS,… for local ranks");
    return *value;
  };
  StreamChoice choice;
  if (text.find(':') == std::string::npos) {
    choice.all_ = number(text, 3);
    return choice;
  }
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const size_t colon = std::min(item.find(':'), item.size());
    const int streams = number(item.substr(std::min(colon + 1, item.size())), 3);
    choice.some_[number(item.substr(0, colon), kMostProcesses)] = streams;
  }
  return choice;
}

bool StreamChoice::has(int local_rank, int stream) const {
  const auto found = some_.find(local_rank);
  return ((found == some_.end() ? all_ : found->second) & stream) != 0;
}

std::string make_log_folder(const std::string& base, const std::string& run_id) {
  const std::string parent = base.empty() ? environment::text("TMPDIR").value_or("/tmp") : base;
  std::error_code ignored;  // the next call says why
  std::filesystem::create_directories(parent, ignored);
  std::string folder = std::filesystem::absolute(parent).string() + "/" + run_id + "_XXXXXX";
  TORCH_CHECK_VALUE(::mkdtemp(folder.data()) != nullptr, "can't make a folder in ", parent,
                    " for the processes' output: ", std::strerror(errno), "; name another by --log-dir");
  return folder;
}

RunOptions checked_options(RunOptions options) {
  TORCH_CHECK_VALUE(options.nprocs >= 1 && options.nprocs <= kMostProcesses, "the number of processes is ",
                    options.nprocs, "; it must lie in 1 to ", kMostProcesses);
  TORCH_CHECK_VALUE(options.grace_period.count() >= 0, "the grace period is ",
                    to_seconds(options.grace_period), " seconds; it can't be negative");
  const char* visible = options.virtual_local_rank ? ::getenv("CUDA_VISIBLE_DEVICES") : nullptr;
  TORCH_CHECK_VALUE(
      visible == nullptr || std::count(visible, visible + std::strlen(visible), ',') + 1 >= options.nprocs,
      "--virtual-local-rank with ", options.nprocs, " processes: CUDA_VISIBLE_DEVICES is '", visible,
      "'; it has to name a GPU for each");
  TORCH_CHECK_VALUE(!options.command.empty(), "no program to start was given");
  if (options.program.empty()) options.program = find_program(options.command.front());
  return options;
}

int run(const RunOptions& given) {
  const RunOptions options = checked_options(given);
  std::optional<AgentStore> store;
  WorkerForks forks(/*again=*/false);
  const RankVariables variables = {.nprocs = options.nprocs,
                                   .world_size = options.nprocs,
                                   .role_world_size = options.nprocs,
                                   .run_id = options.run_id.empty() ? make_run_id() : options.run_id,
                                   .role = options.role};
  return run_workers(
             options, variables,
             [&](Supervisor& supervisor) {
               return store.emplace(options.master_port, [&] { return supervisor.interrupted(); }).port();
             },
             {}, nullptr, &forks)
      .exit_status;
}

}  // namespace lockstep::launch
