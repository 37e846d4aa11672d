#include <algorithm>
#include <array>
#include <cctype>
#include <dlfcn.h>
#include <type_traits>

#include <c10/util/Exception.h>

#include <lockstep/device/visible_cards.h>

namespace lockstep {
namespace {

// Functions and constants are those of NVIDIA's cuda.h.
constexpr int kSuccess = 0;

template <class Function>
Function* find(void* library, const char* name) {
  void* symbol = ::dlsym(library, name);
  TORCH_CHECK_VALUE(symbol != nullptr, "NVIDIA's driver library has no ", name, "; update the driver");
  return reinterpret_cast<Function*>(symbol);
}

}  // namespace

std::vector<std::string> visible_card_addresses() {
  // Stays loaded, for the driver's library does not like to be unloaded.
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  const char* why = library == nullptr ? ::dlerror() : nullptr;
  TORCH_CHECK_VALUE(library != nullptr, "NVIDIA's driver library is not here (", why, ")");
  const auto require = [](int status, const char* function) {
    TORCH_CHECK_VALUE(status == kSuccess, "NVIDIA's driver does not work: ", function, " returns ", status,
                      ", an error of its CUresult (nvidia-smi tells more)");
  };
  require(find<int(unsigned int)>(library, "cuInit")(0), "cuInit");
  int count = 0;
  require(find<int(int*)>(library, "cuDeviceGetCount")(&count), "cuDeviceGetCount");
  TORCH_CHECK_VALUE(count > 0, "NVIDIA's driver shows no card");
  auto* address_of = find<int(char*, int, int)>(library, "cuDeviceGetPCIBusId");
  std::vector<std::string> addresses;
  for (int device = 0; device < count; ++device) {  // whose handle is its index
    std::array<char, 32> address{};
    require(address_of(address.data(), static_cast<int>(address.size()), device), "cuDeviceGetPCIBusId");
    addresses.emplace_back(address.data());
    std::transform(addresses.back().begin(), addresses.back().end(), addresses.back().begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  }
  return addresses;
}

}  // namespace lockstep
