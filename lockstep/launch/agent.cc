#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <sched.h>
#include <stdlib.h>

#include <c10/util/Exception.h>

#include <lockstep/base/process/cpu.h>
#include <lockstep/device/nvidia_devices.h>
#include <lockstep/launch/agent.h>
#include <lockstep/launch/agent_store.h>
#include <lockstep/launch/worker_environment.h>
#include <lockstep/launch/worker_group.h>

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
  int number = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, number);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end, "--nproc-per-node is '", text,
                    "'; it takes a number, auto, cpu or gpu");
  TORCH_CHECK_VALUE(number >= 1 && number <= kMostProcesses, "--nproc-per-node is ", number,
                    "; it takes a number from 1 to ", kMostProcesses, ", auto, cpu or gpu");
  return number;
}

void check_options(const RunOptions& options) {
  TORCH_CHECK_VALUE(options.nprocs >= 1 && options.nprocs <= kMostProcesses, "the number of processes is ",
                    options.nprocs, "; it must lie in 1 to ", kMostProcesses);
  TORCH_CHECK_VALUE(options.grace_period.count() >= 0, "the grace period is ",
                    to_seconds(options.grace_period), " seconds; it can't be negative");
  TORCH_CHECK_VALUE(!options.command.empty(), "no program to start was given");
  find_program(options.command.front());
}

int run(const RunOptions& options) {
  check_options(options);
  std::optional<AgentStore> store;
  const RankVariables variables = {
      .nprocs = options.nprocs, .world_size = options.nprocs, .run_id = make_run_id()};
  return run_workers(
             options, variables,
             [&](Supervisor& supervisor) {
               return store.emplace(options.master_port, [&] { return supervisor.interrupted(); }).port();
             })
      .exit_status;
}

}  // namespace lockstep::launch
