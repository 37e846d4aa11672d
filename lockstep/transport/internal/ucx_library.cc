#include <lockstep/transport/wire/ucx_engine.h>

#if LOCKSTEP_UCX
#include <cstdlib>
#include <dlfcn.h>
#include <mutex>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/transport/internal/ucx_library.h>

namespace lockstep::transport::internal {
namespace {

void set(const char* name, const char* value) {
  ::setenv(name, value, /*overwrite=*/0);
}

/// What can't be set by ucp_config_modify(): read when the library is loaded, or by its transports.
void set_ucx_variables() {
  set("UCX_MEM_EVENTS", "n");        // else it patches munmap() and others in the whole process
  set("UCX_HANDLE_ERRORS", "none");  // else it takes SIGSEGV and other signals
  set("UCX_WARN_UNUSED_ENV_VARS", "n");
  // Errors come back from its functions, with ranks, instead of as lines among the program's output.
  set("UCX_LOG_FILE", "stderr");
  set("UCX_LOG_LEVEL", log::enabled(log::Level::kDebug) ? "warn" : "fatal");
  // As long as a fragment that is received: with 8 KiB, the default, long messages take thrice the time.
  set("UCX_TCP_TX_SEG_SIZE", "64k");
}

UcxLibrary load_ucx() {
  const std::string file = environment::text("LOCKSTEP_UCX_LIBRARY").value_or("libucp.so.0");
  // RTLD_LOCAL: other libraries of the process (Open MPI) may bring a UCX of their own.
  void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    C10_THROW_ERROR(
        DistBackendError,
        c10::str("a job over several hosts needs UCX, which can't be loaded: ", why == nullptr ? file : why,
                 ". Install it on all hosts (Debian and Ubuntu: the package libucx0; Fedora: ucx), or "
                 "'pip install libucx-cu12' or libucx-cu13 and name its lib/libucp.so.0 in "
                 "LOCKSTEP_UCX_LIBRARY"));
  }
  UcxLibrary library;
  const auto resolve = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
    TORCH_CHECK_WITH(DistBackendError, function != nullptr, file, " has no function ", name,
                     "; Lockstep needs UCX 1.13 or newer");
  };
#define LOCKSTEP_UCX_RESOLVE(name) resolve(library.name, #name)
  LOCKSTEP_UCX_FUNCTIONS(LOCKSTEP_UCX_RESOLVE);
#undef LOCKSTEP_UCX_RESOLVE
  return library;
}

}  // namespace

const UcxLibrary& UcxLibrary::load(const std::string& port_range) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  static bool variables_are_set = false;
  if (!std::exchange(variables_are_set, true)) set_ucx_variables();
  // The transports read it anew for each engine; the first to load the library may have had none.
  if (!port_range.empty()) set("UCX_TCP_PORT_RANGE", port_range.c_str());
  static const UcxLibrary library = load_ucx();  // tried again if it has thrown
  return library;
}

}  // namespace lockstep::transport::internal
#endif
