#include <array>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>

#include <lockstep/base/text/hex.h>
#include <lockstep/cuda/host_memory.h>
#include <lockstep/cuda/nccl_backend.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/device.h>

namespace lockstep {
namespace {

/// "GPU-8a5c2b1e-…", as nvidia-smi -L writes it.
std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = to_hex(std::string_view(uuid.bytes, sizeof uuid.bytes));
  for (const size_t place : {8, 13, 18, 23}) text.insert(place, 1, '-');
  return "GPU-" + text;
}

std::string number_of_version(int version) {  // 13000 is 13.0
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

class Library final : public CudaLibrary {
 public:
  std::string problem() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices > 0) return {};
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver || error == cudaErrorStubLibrary) return driver_problem();
    if (error == cudaSuccess || error == cudaErrorNoDevice) return no_card();
    return c10::str("the NVIDIA driver answers: ", cudaGetErrorString(error), " (", cudaGetErrorName(error),
                    "); nvidia-smi and lockstep doctor may say more");
  }

  int device_count() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) == cudaSuccess) return devices;
    cudaGetLastError();
    return 0;
  }

  std::string device_identity(int index) override {
    const cudaDeviceProp device = properties(index);
    std::array<char, 32> bus{};
    const bool known = cudaDeviceGetPCIBusId(bus.data(), bus.size(), index) == cudaSuccess;
    if (!known) cudaGetLastError();
    // What NCCL tells cards apart by, so that instances of one card (MIG) count as shared. A card that is
    // part of the processor may have no address on a bus.
    const std::string address = bus.data();
    const bool on_bus = known && address.find_first_not_of("0:.") != std::string::npos;
    return c10::str(device.name, " (", on_bus ? address : uuid_text(device.uuid), ")");
  }
  std::string device_name(int index) override { return properties(index).name; }
  std::string nccl_version() override { return c10d::getNcclVersion(); }

  c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                      int size, const NcclGroup& group) override {
    return lockstep::make_nccl_backend(store, rank, size, group);
  }

 private:
  static std::string driver_problem() {
    int driver = 0;
    int runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    cudaGetLastError();
    if (driver == 0) {
      return "there is no NVIDIA driver on this system (libcuda.so.1); install it, and in a container pass "
             "the GPUs through (docker run --gpus all), or use the CPU";
    }
    return c10::str("the NVIDIA driver is too old: it knows CUDA ", number_of_version(driver),
                    ", and this torch needs CUDA ", number_of_version(runtime),
                    "; install a newer driver, or a torch built with an older CUDA");
  }

  static std::string no_card() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    if (visible != nullptr) {
      return c10::str("CUDA_VISIBLE_DEVICES is '", visible, "', which leaves no card; unset it, or name one");
    }
    return "there is an NVIDIA driver, but no card; see nvidia-smi -L, or use the CPU";
  }

  static cudaDeviceProp properties(int index) {
    cudaDeviceProp found{};
    const cudaError_t error = cudaGetDeviceProperties(&found, index);
    if (error != cudaSuccess) cudaGetLastError();
    TORCH_CHECK(error == cudaSuccess, "CUDA device ", index, ": ", cudaGetErrorString(error));
    return found;
  }
};

/// Never destroyed: threads may use it while the process exits.
Library& library() {
  static auto& only = *new Library;
  return only;
}

/// As soon as the library is there, however it came.
[[maybe_unused]] const bool installed = [] {
  set_host_memory_registrar(c10::kCUDA, new CudaHostMemory);
  set_card_identity(c10::kCUDA, [](c10::DeviceIndex index) { return library().device_identity(index); });
  return true;
}();

}  // namespace
}  // namespace lockstep

extern "C" __attribute__((visibility("default"))) lockstep::CudaLibrary* lockstep_cuda_library(
    int interface) {
  return interface == lockstep::cuda_loading::kInterface ? &lockstep::library() : nullptr;
}
