#include <algorithm>
#include <array>
#include <cctype>

#include <lockstep/doctor/judge.h>

namespace lockstep::doctor {
namespace {

using Environment = std::map<std::string, std::string>;

std::string upper_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

bool is_nccl_variable(const std::string& name) {
  return name.starts_with("NCCL_") || name.starts_with("TORCH_NCCL_") || name.starts_with("TORCH_FR_");
}

/// "NCCL_DEBUG=WARN, TORCH_NCCL_BLOCKING_WAIT=1"
std::string all_nccl_variables(const Environment& environment) {
  std::string all;
  for (const auto& [name, value] : environment) {
    if (is_nccl_variable(name)) all += (all.empty() ? "" : ", ") + name + "=" + value;
  }
  return all;
}

void judge_part(const Facts& facts, Findings& findings) {
  const CudaPart& part = facts.cuda;
  if (!part.asked) return;
  const bool card = facts.gpu.cuda_devices.value_or(0) > 0;
  if (!part.loads) {
    const std::string text = "Lockstep's part for CUDA does not load: " + part.error;
    const char* remedy =
        "build Lockstep with this torch, where cmake finds the CUDA and NCCL headers, and install "
        "liblockstep_cuda.so beside liblockstep.so";
    // Without a card it is not needed.
    findings.push_back(card ? warning("nccl", text, remedy) : note("nccl", text, remedy));
    return;
  }
  std::string text = "NCCL " + part.nccl;
  const std::string variables = all_nccl_variables(facts.environment);
  if (!variables.empty()) text += ", with " + variables;
  if (!part.problem.empty()) {
    findings.push_back(card ? warning("nccl", text + ", but " + part.problem, "see the line gpu")
                            : ok("nccl", text + "; it has no card to use"));
    return;
  }
  for (size_t i = 0; i < part.devices.size(); ++i) {
    text += (i == 0 ? "; " : ", ") + std::string("cuda:") + std::to_string(i) + " is " + part.devices[i];
  }
  findings.push_back(ok("nccl", text));
}

/// Names that torch still reads, and complains about.
constexpr std::array kOldNames = {"NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG",
                                  "NCCL_ENABLE_TIMING"};

void judge_old_names(const Environment& environment, Findings& findings) {
  for (const char* name : kOldNames) {
    if (value_of(environment, name) == nullptr) continue;
    findings.push_back(warning("variables",
                               std::string(name) + " is an old name, which torch will not read for ever",
                               std::string("call it TORCH_") + name));
  }
}

void judge_unknown_names(const CudaPart& part, Findings& findings) {
  for (const std::string& name : part.unknown_variables) {
    if (std::find(kOldNames.begin(), kOldNames.end(), name) != kOldNames.end()) continue;
    findings.push_back(warning("variables", name + " is set, which NCCL " + part.nccl + " does not know",
                               "look how it is spelt, or unset it; only a plugin of NCCL might read it"));
  }
}

void judge_values(const Environment& environment, Findings& findings) {
  const auto* blocking = value_of(environment, "TORCH_NCCL_BLOCKING_WAIT");
  const auto* handling = value_of(environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING");
  if (handling != nullptr && (handling->size() != 1 || *handling < "0" || *handling > "3")) {
    findings.push_back(problem("variables", "TORCH_NCCL_ASYNC_ERROR_HANDLING is '" + *handling + "'",
                               "set it to a number from 0 to 3, or unset it"));
  } else if (handling != nullptr && *handling == "0" && (blocking == nullptr || *blocking == "0")) {
    findings.push_back(warning("variables",
                               "TORCH_NCCL_ASYNC_ERROR_HANDLING is '0': an operation that a dead peer leaves "
                               "unfinished hangs for ever",
                               "unset it, or set TORCH_NCCL_BLOCKING_WAIT=1"));
  }
  if (const auto* disabled = value_of(environment, "NCCL_P2P_DISABLE");
      disabled != nullptr && *disabled != "0") {
    findings.push_back(warning("variables",
                               "NCCL_P2P_DISABLE is '" + *disabled +
                                   "': cards of one machine send to each other through its memory, slowly",
                               "unset it, unless the machine's PCIe switches can't do it"));
  }
  if (const auto* shm = value_of(environment, "NCCL_SHM_DISABLE"); shm != nullptr && *shm != "0") {
    findings.push_back(warning(
        "variables", "NCCL_SHM_DISABLE is '" + *shm + "': ranks of one machine may talk over the network",
        "unset it, and give containers enough /dev/shm (docker --shm-size)"));
  }
  if (const auto* debug = value_of(environment, "NCCL_DEBUG")) {
    const std::string level = upper_case(*debug);
    if (level == "INFO" || level == "TRACE") {
      findings.push_back(note("variables",
                              "NCCL_DEBUG is '" + *debug + "': every rank writes hundreds of lines",
                              "set NCCL_DEBUG=WARN when you have seen enough"));
    } else if (level != "WARN" && level != "VERSION" && level != "NONE" && level != "ABORT") {
      findings.push_back(warning("variables", "NCCL_DEBUG is '" + *debug + "', which NCCL does not know",
                                 "set it to VERSION, WARN, INFO or TRACE"));
    }
  }
  for (const char* name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    const auto* size = value_of(environment, name);
    if (size == nullptr || *size != "0") continue;
    findings.push_back(note("variables", std::string(name) + " is '0': NCCL's flight recorder is off",
                            "unset it to learn more from a hang"));
  }
}

}  // namespace

Findings judge_cuda(const Facts& facts) {
  Findings findings;
  judge_part(facts, findings);
  judge_old_names(facts.environment, findings);
  judge_unknown_names(facts.cuda, findings);
  judge_values(facts.environment, findings);
  return findings;
}

}  // namespace lockstep::doctor
