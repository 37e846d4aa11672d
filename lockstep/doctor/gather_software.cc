#include <cctype>
#include <dlfcn.h>
#include <set>
#include <string_view>
#include <unistd.h>

#include <ATen/Version.h>
#include <torch/version.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/doctor/gather.h>
#include <lockstep/doctor/internal/command.h>
#include <lockstep/doctor/internal/files.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::doctor {

using internal::find_in_path;
using internal::run_command;

namespace {

std::string library_of(const void* address) {
  Dl_info info{};
  return ::dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

/// The value of NAME=VALUE in torch's list of its build settings, which commas end.
std::string setting(const std::string& config, const std::string& name) {
  const auto begin = config.find(" " + name + "=");
  if (begin == std::string::npos) return "";
  const auto value = begin + name.size() + 2;
  return config.substr(value, config.find_first_of(", \n", value) - value);
}

std::optional<Compiler> compiler_at(const std::string& name) {
  const auto path = find_in_path(name);
  if (!path) return std::nullopt;
  Compiler compiler{*path, "", false};
  const auto result = run_command({*path, "--version"}, std::chrono::seconds(10));
  if (!result.succeeded()) return compiler;
  const std::string first = result.output.substr(0, result.output.find('\n'));
  compiler.is_gcc = result.output.find("Free Software Foundation") != std::string::npos;
  // "g++ (Debian 12.2.0-14) 12.2.0", "Debian clang version 14.0.6": the last word that begins with a digit.
  for (size_t end = first.size(); end > 0;) {
    const auto space = first.rfind(' ', end - 1);
    const size_t begin = space == std::string::npos ? 0 : space + 1;
    if (begin < end && std::isdigit(static_cast<unsigned char>(first[begin])) != 0) {
      compiler.version = first.substr(begin, first.find_first_not_of("0123456789.", begin) - begin);
      break;
    }
    end = space == std::string::npos ? 0 : space;
  }
  return compiler;
}

}  // namespace

Software gather_software() {
  Software software;
  software.lockstep_version = own_release();
  software.lockstep_path = library_of(reinterpret_cast<const void*>(&read_memory_limits));
  software.torch_compiled = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) +
                            "." + std::to_string(TORCH_VERSION_PATCH);
  const std::string config = at::show_config();
  software.torch_loaded = setting(config, "TORCH_VERSION");
  software.torch_commit = setting(config, "COMMIT_SHA");
  software.torch_cuda = setting(config, "CUDA_VERSION");
  software.torch_path = library_of(reinterpret_cast<const void*>(&at::show_config));
#ifdef __clang__
  software.built_with = "clang++ " __clang_version__;
#else
  software.built_with = "g++ " __VERSION__;
#endif
  return software;
}

std::vector<Compiler> gather_compilers() {
  std::vector<Compiler> compilers;
  std::set<std::string> seen;
  for (const std::string& name : {environment::text("CXX").value_or("c++"), std::string("g++")}) {
    auto compiler = compiler_at(name);
    if (compiler && seen.insert(compiler->path).second) compilers.push_back(std::move(*compiler));
  }
  return compilers;
}

bool is_relevant_variable(const std::string& name) {
  constexpr std::string_view kPrefixes[] = {
      "LOCKSTEP_", "TORCH_", "TORCHELASTIC_", "PET_",  "MASTER_", "OMP_", "GOMP_", "KMP_",   "MKL_",
      "NCCL_",     "GLOO_",  "UCX_",          "CUDA_", "OMPI_",   "PMI_", "PMIX_", "SLURM_", "MPI_"};
  constexpr std::string_view kNames[] = {"RANK",       "WORLD_SIZE", "LOCAL_RANK",      "LOCAL_WORLD_SIZE",
                                         "LD_PRELOAD", "GROUP_RANK", "MALLOC_ARENA_MAX"};
  for (std::string_view prefix : kPrefixes) {
    if (name.starts_with(prefix)) return true;
  }
  for (std::string_view known : kNames) {
    if (name == known) return true;
  }
  return false;
}

std::map<std::string, std::string> gather_environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals == std::string::npos || !is_relevant_variable(text.substr(0, equals))) continue;
    const std::string name = text.substr(0, equals);
    // What is gathered is printed, and told to other ranks.
    variables[name] = name == "LOCKSTEP_JOB_SECRET" ? "set" : text.substr(equals + 1);
  }
  return variables;
}

Facts gather_facts() {
  Facts facts = gather_machine();
  facts.software = gather_software();
  facts.software.compilers = gather_compilers();
  facts.environment = gather_environment();
  gather_probes(facts);
  return facts;
}

}  // namespace lockstep::doctor
