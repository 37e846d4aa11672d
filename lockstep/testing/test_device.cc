#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/simulated_device/streams.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::testing {
namespace {

/// Whether LOCKSTEP_TEST_DEVICE is "cuda"; it may be "simulated", too. Reads the environment itself, for it
/// runs before main().
bool cuda_is_asked_for() {
  const char* name = std::getenv("LOCKSTEP_TEST_DEVICE");
  if (name == nullptr || *name == '\0' || std::strcmp(name, "simulated") == 0) return false;
  TORCH_CHECK(std::strcmp(name, "cuda") == 0, "LOCKSTEP_TEST_DEVICE is \"", name,
              "\"; it must be cuda or simulated");
  return true;
}

/// Loads torch's CUDA library before anything asks torch about CUDA, whose answer it keeps for ever.
bool load_cuda_if_asked_for() {
  if (!cuda_is_asked_for()) return false;
  TORCH_CHECK(::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr,
              "LOCKSTEP_TEST_DEVICE=cuda, but torch's CUDA library can't be loaded: ", ::dlerror());
  return true;
}
const bool on_cuda = load_cuda_if_asked_for();

c10::DeviceType kind() {
  if (on_cuda) return c10::kCUDA;
  simulated::register_device();
  return c10::kPrivateUse1;
}

c10::impl::VirtualGuardImpl guard() {
  return c10::impl::VirtualGuardImpl(kind());
}

/// cudaLaunchHostFunc(), found at run time: tests are built without a CUDA toolkit.
void launch_host_function(const c10::Stream& stream, std::function<void()> function) {
  using Launch = int (*)(void* stream, void (*function)(void*), void* data);
  static const auto launch = reinterpret_cast<Launch>(::dlsym(RTLD_DEFAULT, "cudaLaunchHostFunc"));
  TORCH_CHECK(launch != nullptr, "libcudart has no cudaLaunchHostFunc");
  auto run = [](void* data) {
    std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(data));
    (*owned)();
  };
  auto data = std::make_unique<std::function<void()>>(std::move(function));
  int status = launch(stream.native_handle(), run, data.get());
  TORCH_CHECK(status == 0, "cudaLaunchHostFunc failed with status ", status);
  data.release();
}

}  // namespace

bool test_device_is_simulated() {
  return !on_cuda;
}

c10::Device test_device(int index) {
  return {kind(), static_cast<c10::DeviceIndex>(index)};
}

int test_device_count() {
  return guard().deviceCount();
}

c10::Device device_of_rank(int rank) {
  return test_device(rank % test_device_count());
}

void enqueue(const c10::Stream& stream, std::function<void()> host_function) {
  if (on_cuda) {
    launch_host_function(stream, std::move(host_function));
  } else {
    simulated::queue_of(stream).submit(std::move(host_function));
  }
}

c10::Stream current_stream(c10::Device device) {
  return guard().getStream(device);
}

c10::Stream other_stream(c10::Device device) {
  return guard().getStreamFromGlobalPool(device);
}

void synchronize(c10::Device device) {
  guard().synchronizeDevice(device.index());
}

}  // namespace lockstep::testing
