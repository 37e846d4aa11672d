#include <filesystem>
#include <ostream>

#include <nlohmann/json.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/device/cuda_library.h>
#include <lockstep/doctor/cuda_probe.h>
#include <lockstep/doctor/internal/command.h>

namespace lockstep::doctor {
namespace {

constexpr std::chrono::seconds kTimeout{30};
/// Stands before the answer, for libraries that are loaded may say something, too.
constexpr const char* kMark = "lockstep-cuda-probe ";

}  // namespace

void print_cuda_probe(std::ostream& out) {
  nlohmann::json answer;
  try {
    CudaLibrary& library = load_cuda_library();
    answer["nccl"] = library.nccl_version();
    answer["problem"] = library.problem();
    answer["devices"] = nlohmann::json::array();
    for (int i = 0; i < library.device_count(); ++i) {
      answer["devices"].push_back(library.device_name(i) + " (" + library.device_identity(i) + ")");
    }
  } catch (const std::exception& error) {
    answer["error"] = text_of(error);
  }
  out << kMark << answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
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
