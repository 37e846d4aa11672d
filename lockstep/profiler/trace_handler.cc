#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/host_name.h>
#include <lockstep/profiler/profiler.h>

namespace lockstep::profiler {

TraceHandler tensorboard_trace_handler(std::string dir_name, std::string worker_name, bool use_gzip) {
  return
      [dir_name = std::move(dir_name), worker_name = std::move(worker_name), use_gzip](Profiler& profiler) {
        std::error_code error;
        std::filesystem::create_directories(dir_name, error);
        TORCH_CHECK(!error, "Can't create directory: ", dir_name, ": ", error.message());
        const std::string worker =
            worker_name.empty() ? host_name() + "_" + std::to_string(::getpid()) : worker_name;
        // Nanoseconds, for a process may write many.
        const auto now = std::chrono::duration_cast<std::chrono::nanoseconds>(
            std::chrono::system_clock::now().time_since_epoch());
        const std::string name = worker + "." + std::to_string(now.count()) + ".pt.trace.json";
        profiler.export_chrome_trace(
            (std::filesystem::path(dir_name) / (name + (use_gzip ? ".gz" : ""))).string());
      };
}

}  // namespace lockstep::profiler
