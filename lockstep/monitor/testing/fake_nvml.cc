// Stands in for NVIDIA's libnvidia-ml.so.1, as nvml.h of CUDA 12.9 declares it.
#include <cstdint>
#include <cstdio>

#include <lockstep/monitor/testing/fake_nvml.h>

using lockstep::monitor::testing::FakeNvml;

extern "C" {

FakeNvml fake_nvml;

// nvmlProcessInfo_v2_t
struct ProcessV2 {
  unsigned int pid;
  unsigned long long memory;
  unsigned int gpu_instance, compute_instance;
};
// What drivers 535.43 to 535.86 write as version 3.
struct ProcessV3Of535 {
  ProcessV2 first;
  unsigned long long protected_memory;
};

int nvmlInit_v2();
int nvmlShutdown();
int nvmlDeviceGetCount_v2(unsigned int* count);
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device);
int nvmlDeviceGetName(void* device, char* name, unsigned int room);
int nvmlDeviceGetUtilizationRates(void* device, unsigned int* rates);
int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* memory);
int nvmlDeviceGetComputeRunningProcesses_v2(void* device, unsigned int* count, ProcessV2* processes);
int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned int* count, ProcessV3Of535* processes);
}

namespace {

constexpr int kInsufficientSize = 7;

int card_of(void* device) {
  return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1;
}

/// What the function returns at once; 0: it does its work.
int enter(const char* function, int card) {
  ++fake_nvml.calls[function];
  const auto error = fake_nvml.errors.find({function, card});
  return error == fake_nvml.errors.end() ? 0 : error->second;
}

template <class Info, class Fill>
int list_processes(const char* function, void* device, unsigned int* count, Info* infos, const Fill& fill) {
  const int card = card_of(device);
  if (const int error = enter(function, card)) return error;
  const unsigned int room = *count;
  const size_t found = card == 0 ? fake_nvml.processes.size() : 0;
  *count = static_cast<unsigned int>(found);
  if (found > room) return kInsufficientSize;
  for (size_t i = 0; i < found; ++i)
    infos[i] = fill(fake_nvml.processes[i].pid, fake_nvml.processes[i].memory);
  return 0;
}

}  // namespace

int nvmlInit_v2() {
  return enter("nvmlInit_v2", -1);
}

int nvmlShutdown() {
  return enter("nvmlShutdown", -1);
}

int nvmlDeviceGetCount_v2(unsigned int* count) {
  if (const int error = enter("nvmlDeviceGetCount_v2", -1)) return error;
  *count = fake_nvml.cards;
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  if (const int error = enter("nvmlDeviceGetHandleByIndex_v2", static_cast<int>(index))) return error;
  *device = reinterpret_cast<void*>(static_cast<intptr_t>(index) + 1);
  return 0;
}

int nvmlDeviceGetName(void* device, char* name, unsigned int room) {
  if (const int error = enter("nvmlDeviceGetName", card_of(device))) return error;
  const int size = std::snprintf(name, room, "Card %d", card_of(device));
  return size < static_cast<int>(room) ? 0 : kInsufficientSize;
}

int nvmlDeviceGetUtilizationRates(void* device, unsigned int* rates) {
  if (const int error = enter("nvmlDeviceGetUtilizationRates", card_of(device))) return error;
  rates[0] = 97;  // the card
  rates[1] = 40;  // its memory
  return 0;
}

int nvmlDeviceGetMemoryInfo(void* device, unsigned long long* memory) {
  if (const int error = enter("nvmlDeviceGetMemoryInfo", card_of(device))) return error;
  memory[0] = fake_nvml.memory;      // total
  memory[1] = fake_nvml.memory - 5;  // free
  memory[2] = 5;                     // used
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void* device, unsigned int* count, ProcessV2* processes) {
  return list_processes("nvmlDeviceGetComputeRunningProcesses_v2", device, count, processes,
                        [](unsigned int pid, unsigned long long memory) {
                          return ProcessV2{pid, memory, ~0U, ~0U};
                        });
}

int nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned int* count, ProcessV3Of535* processes) {
  return list_processes("nvmlDeviceGetComputeRunningProcesses_v3", device, count, processes,
                        [](unsigned int pid, unsigned long long memory) {
                          return ProcessV3Of535{{pid, memory, ~0U, ~0U}, 0};
                        });
}
