#include <algorithm>
#include <array>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <filesystem>
#include <memory>
#include <ostream>
#include <string_view>
#include <sys/mman.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/doctor/cuda_probe.h>
#include <lockstep/doctor/internal/command.h>

namespace lockstep::doctor {

using internal::CommandResult;
using internal::run_command;

namespace {

constexpr std::chrono::seconds kTimeout{30};
/// Stands before the answer, for libraries that are loaded may say something, too.
constexpr const char* kMark = "lockstep-cuda-probe ";
/// What images and builds say with NCCL's prefix, not to NCCL.
constexpr std::array kOfBuilds = {"NCCL_VERSION",     "NCCL_HOME",        "NCCL_ROOT",   "NCCL_ROOT_DIR",
                                  "NCCL_INCLUDE_DIR", "NCCL_LIBRARY_DIR", "NCCL_LIB_DIR"};

/// The names that begin with NCCL_ in the environment.
std::vector<std::string> nccl_variables() {
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (!text.starts_with("NCCL_")) continue;
    std::string name(text.substr(0, text.find('=')));
    if (std::find(kOfBuilds.begin(), kOfBuilds.end(), name) == kOfBuilds.end())
      names.push_back(std::move(name));
  }
  return names;
}

/// The path of the NCCL library in this process; empty where NCCL is part of another library.
std::string nccl_path() {
  const std::unique_ptr<void, int (*)(void*)> library(::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD),
                                                      &::dlclose);
  Dl_info info{};
  const void* symbol = library ? ::dlsym(library.get(), "ncclGetVersion") : nullptr;
  return symbol != nullptr && ::dladdr(symbol, &info) != 0 ? info.dli_fname : "";
}

/// Those of the names that the library has no text of: it can't read such variables. None where it can't be looked at.
std::vector<std::string> names_not_in(const std::string& library, std::vector<std::string> names) {
  const UniqueFd file(::open(library.c_str(), O_RDONLY | O_CLOEXEC));
  std::error_code error;
  const size_t size = std::filesystem::file_size(library, error);
  if (names.empty() || !file || error || size == 0) return {};
  void* content = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (content == MAP_FAILED) return {};
  // With the zero that ends it, or NCCL_IB would be found in NCCL_IB_HCA.
  std::erase_if(names, [&](const std::string& name) {
    return ::memmem(content, size, name.c_str(), name.size() + 1) != nullptr;
  });
  ::munmap(content, size);
  return names;
}

}  // namespace

void print_cuda_probe(std::ostream& out) {
  nlohmann::json answer;
  try {
    CudaLibrary& library = load_cuda_library();
    answer["nccl"] = library.nccl_version();
    answer["problem"] = library.problem();
    answer["unknown_variables"] = names_not_in(nccl_path(), nccl_variables());
    answer["devices"] = nlohmann::json::array();
    for (int i = 0; i < library.device_count(); ++i) {
      answer["devices"].push_back(library.device_name(i) + " (" + library.device_identity(i) + ")");
    }
  } catch (const std::exception& error) {
    answer["error"] = text_of(error);
  }
  out << kMark << json_text(answer) << std::endl;
}

CudaPart parse_cuda_probe(const std::string& text) {
  CudaPart part{.asked = true};
  const size_t mark = text.find(kMark);
  const std::string line = mark == std::string::npos
                               ? ""
                               : text.substr(mark + std::string(kMark).size(),
                                             text.find('\n', mark) - mark - std::string(kMark).size());
  const auto answer = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  try {
    if (answer.contains("error")) {
      part.error = answer.at("error").get<std::string>();
    } else {
      part.nccl = answer.at("nccl").get<std::string>();
      part.problem = answer.at("problem").get<std::string>();
      part.devices = answer.at("devices").get<std::vector<std::string>>();
      part.unknown_variables = answer.at("unknown_variables").get<std::vector<std::string>>();
      part.loads = true;
    }
  } catch (const nlohmann::json::exception&) {
    part.error = "the process that loaded it said: " + text.substr(0, 500);
  }
  return part;
}

CudaPart probe_cuda(const std::vector<std::string>& argv) {
  std::error_code ignored;
  std::vector<std::string> command = argv;
  command.front() = std::filesystem::read_symlink("/proc/self/exe", ignored).string();
  const CommandResult result = run_command(command, kTimeout);
  if (result.succeeded()) return parse_cuda_probe(result.output);
  CudaPart part{.asked = true};
  if (!result.started) {
    part.error = "it could not be tried in a process of its own";
  } else if (result.timed_out) {
    part.error = "loading it did not end within 30 s";
  } else {
    part.error = "the process that loaded it ended badly: " + result.output.substr(0, 500);
  }
  return part;
}

}  // namespace lockstep::doctor
