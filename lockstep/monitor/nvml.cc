#include <algorithm>
#include <array>
#include <cstddef>
#include <dlfcn.h>
#include <initializer_list>
#include <type_traits>
#include <utility>

#include <lockstep/monitor/nvml.h>

// Functions, structures and constants are those of NVIDIA's nvml.h, which is not needed to build this: the PyPI packages
// nvidia-nvml-dev-cu11, nvidia-nvml-dev-cu12 and nvidia-nvml-dev have that of CUDA 11.8, 12.9 and 13.
namespace lockstep::monitor {
namespace {

using Device = void*;
constexpr int kSuccess = 0;
constexpr int kInsufficientSize = 7;
constexpr unsigned long long kNotAvailable = ~0ULL;

struct Utilization {  // nvmlUtilization_t
  unsigned int gpu;
  unsigned int memory;
};
struct Memory {  // nvmlMemory_t
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};
struct ProcessInfo {  // nvmlProcessInfo_v2_t
  unsigned int pid;
  unsigned long long used_memory;
  unsigned int gpu_instance;
  unsigned int compute_instance;
};
static_assert(sizeof(Utilization) == 8 && sizeof(Memory) == 24);
static_assert(sizeof(ProcessInfo) == 24 && offsetof(ProcessInfo, used_memory) == 8 &&
              offsetof(ProcessInfo, gpu_instance) == 16);

}  // namespace

struct Nvml::Functions {
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*count)(unsigned int*) = nullptr;
  int (*handle)(unsigned int, Device*) = nullptr;
  int (*name)(Device, char*, unsigned int) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;
  int (*memory)(Device, Memory*) = nullptr;
  int (*processes)(Device, unsigned int*, ProcessInfo*) = nullptr;
};

std::unique_ptr<Nvml> Nvml::load() {
  // Stays loaded, for the driver's library does not like to be unloaded.
  void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) return nullptr;
  auto functions = std::make_unique<Functions>();
  bool complete = true;
  const auto find = [&](auto& function, std::initializer_list<const char*> names) {
    for (const char* name : names) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
      if (function != nullptr) return;
    }
    complete = false;
  };
  find(functions->init, {"nvmlInit_v2"});
  find(functions->shutdown, {"nvmlShutdown"});
  find(functions->count, {"nvmlDeviceGetCount_v2"});
  find(functions->handle, {"nvmlDeviceGetHandleByIndex_v2"});
  find(functions->name, {"nvmlDeviceGetName"});
  find(functions->utilization, {"nvmlDeviceGetUtilizationRates"});
  find(functions->memory, {"nvmlDeviceGetMemoryInfo"});
  // Version 2 first: drivers 535.43 to 535.86 write 8 bytes more for each process under the name of version 3, which in all
  // others is the same as 2.
  find(functions->processes,
       {"nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"});
  if (!complete || functions->init() != kSuccess) return nullptr;
  return std::unique_ptr<Nvml>(new Nvml(std::move(functions)));
}

Nvml::Nvml(std::unique_ptr<Functions> functions) : functions_(std::move(functions)) {}

Nvml::~Nvml() {
  functions_->shutdown();
}

std::vector<Card> Nvml::cards() const {
  std::vector<Card> cards;
  unsigned int count = 0;
  if (functions_->count(&count) != kSuccess) return cards;
  for (unsigned int index = 0; index < count; ++index) {
    Device device = nullptr;
    if (functions_->handle(index, &device) != kSuccess) continue;
    Card card{.index = static_cast<int>(index)};
    Memory memory{};
    if (functions_->memory(device, &memory) ==
        kSuccess) {  // cards without memory of their own have none to tell of
      card.memory_used = static_cast<int64_t>(memory.used);
      card.memory_total = static_cast<int64_t>(memory.total);
    }
    std::array<char, 96> name{};
    if (functions_->name(device, name.data(), name.size() - 1) == kSuccess) card.name = name.data();
    Utilization utilization{};
    if (functions_->utilization(device, &utilization) == kSuccess)
      card.used_percent = static_cast<int>(utilization.gpu);
    std::vector<ProcessInfo> processes(64);
    int status = kInsufficientSize;
    for (int attempt = 0; attempt < 4 && status == kInsufficientSize; ++attempt) {
      auto room = static_cast<unsigned int>(processes.size());
      status = functions_->processes(device, &room, processes.data());
      processes.resize(status == kInsufficientSize ? 2 * std::max<size_t>(room, processes.size())
                       : status == kSuccess        ? std::min<size_t>(room, processes.size())
                                                   : 0);
    }
    if (status != kSuccess) processes.clear();
    for (const ProcessInfo& process : processes) {
      const auto pid = static_cast<pid_t>(process.pid);
      auto one = std::find_if(card.processes.begin(), card.processes.end(),
                              [pid](const CardProcess& other) { return other.pid == pid; });
      // On a card that is divided (MIG), it may be in several parts.
      if (one == card.processes.end()) one = card.processes.insert(one, {.pid = pid});
      if (process.used_memory != kNotAvailable)
        one->memory = one->memory.value_or(0) + static_cast<int64_t>(process.used_memory);
    }
    cards.push_back(std::move(card));
  }
  return cards;
}

}  // namespace lockstep::monitor
