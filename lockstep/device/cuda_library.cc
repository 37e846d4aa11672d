#include <atomic>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <string>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/device/nvidia_devices.h>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAskedFor = "CUDA was asked for, but ";

enum class Failure { kNone, kCpuBuild, kNotFound, kTooEarly };

struct Loaded {
  CudaLibrary* library = nullptr;
  Failure failure = Failure::kNone;
  std::string error = {};
};

/// Of the library that has this function or object.
fs::path folder_of(const void* symbol) {
  Dl_info info{};
  if (::dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return {};
  return fs::path(info.dli_fname).parent_path();
}

fs::path torch_folder() {
  return folder_of(reinterpret_cast<const void*>(&at::CUDAHooksRegistry));  // as any function of libtorch_cpu
}

/// Looking changes nothing. Waits for a thread that is just loading it.
bool torch_cuda_is_in_process() {
  static std::atomic<bool> found{false};
  if (found) return true;
  void* handle = ::dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return false;
  ::dlclose(handle);
  found = true;
  return true;
}

constexpr const char* kName = "liblockstep_cuda.so";

fs::path beside_this_library() {
  return folder_of(reinterpret_cast<const void*>(&load_cuda_library)) / kName;
}

Loaded load() {
  const fs::path torch = torch_folder();
  std::error_code ignored;
  if (!torch_cuda_is_in_process() && !fs::exists(torch / "libtorch_cuda.so", ignored)) {
    return {nullptr, Failure::kCpuBuild,
            c10::str("the torch in ", torch.string(),
                     " is a CPU build (it has no libtorch_cuda.so); install a CUDA build of torch and build "
                     "Lockstep with it (LOCKSTEP_TORCH), or use the CPU")};
  }
  std::string errors;
  std::string path;
  void* handle = nullptr;
  for (const std::string& candidate : {beside_this_library().string(), std::string(kName)}) {
    path = candidate;
    // Global, as if the program had linked it: libraries that look for CUDA's runtime then find it.
    handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
    if (handle != nullptr) break;
    const char* why = ::dlerror();
    errors += (errors.empty() ? "" : "; ") + std::string(why == nullptr ? path : why);
  }
  if (handle == nullptr) {
    return {
        nullptr, Failure::kNotFound,
        c10::str("Lockstep's part for it can't be loaded: ", errors,
                 ". It is built where the CUDA and NCCL headers are found (cmake says so), and is installed "
                 "beside liblockstep.so; build Lockstep again, or link Lockstep::cuda")};
  }
  auto* entry = reinterpret_cast<cuda_loading::Entry*>(::dlsym(handle, "lockstep_cuda_library"));
  CudaLibrary* library = entry == nullptr ? nullptr : entry(cuda_loading::kInterface);
  if (library == nullptr) {
    return {nullptr, Failure::kNotFound,
            c10::str(path,
                     " is of another version of Lockstep than liblockstep.so; install both from one build")};
  }
  if (!at::detail::getCUDAHooks().isBuilt()) return {nullptr, Failure::kTooEarly, cuda_loading::too_early()};
  return {library, Failure::kNone, {}};
}

std::atomic<CudaLibrary*> replacement{nullptr};

Loaded loaded() {
  if (CudaLibrary* library = replacement) return {library, Failure::kNone, {}};
  static const Loaded kLoaded = load();
  return kLoaded;
}

}  // namespace

namespace cuda_loading {

void replace_library(CudaLibrary* library) {
  replacement = library;
}

std::string too_early() {
  return "this program asked torch about CUDA before torch's CUDA library was loaded "
         "(torch::cuda::is_available(), at::hasCUDA(), torch::manual_seed() and others do), and torch keeps "
         "its first answer, that there is none; call lockstep::set_device() first of all in main(), or link "
         "Lockstep::cuda, which is loaded before main()";
}

}  // namespace cuda_loading

CudaLibrary& load_cuda_library() {
  const Loaded result = loaded();
  TORCH_CHECK(result.library != nullptr, kAskedFor, result.error);
  return *result.library;
}

std::string why_no_cuda() {
  const Loaded result = loaded();
  return result.library == nullptr ? result.error : result.library->problem();
}

CudaLibrary& cuda_library() {
  CudaLibrary& library = load_cuda_library();
  const std::string problem = library.problem();
  TORCH_CHECK(problem.empty(), kAskedFor, problem);
  return library;
}

bool nccl_is_built() {
  if (void* handle = ::dlopen(kName, RTLD_NOW | RTLD_NOLOAD)) {
    ::dlclose(handle);
    return true;
  }
  std::error_code ignored;
  return fs::exists(torch_folder() / "libtorch_cuda.so", ignored) &&
         fs::exists(beside_this_library(), ignored);
}

bool cuda_is_loaded() {
  return torch_cuda_is_in_process() && at::detail::getCUDAHooks().isBuilt();
}

int cuda_device_count() {
  if (!torch_cuda_is_in_process()) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");  // empty means none, unset means all
    const bool hidden = visible != nullptr && count_visible_devices(visible) == 0;
    if (hidden || !has_nvidia_driver_node("/dev")) return 0;
    const Loaded result = loaded();
    TORCH_CHECK(result.failure != Failure::kTooEarly, kAskedFor, result.error);
    if (result.library == nullptr) {
      static const bool kSaid = [&] {
        LOCKSTEP_LOG(kWarning) << "there are GPUs, but they are not used: " << result.error;
        return true;
      }();
      (void)kSaid;
      return 0;
    }
  }
  TORCH_CHECK(cuda_is_loaded(), kAskedFor, cuda_loading::too_early());
  return static_cast<int>(at::detail::getCUDAHooks().deviceCount());
}

}  // namespace lockstep
