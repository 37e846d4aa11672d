#include <algorithm>
#include <cerrno>
#include <optional>
#include <string>
#include <string_view>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include <lockstep/launch/fork_server.h>
#include <lockstep/testing/rank_server.h>

namespace lockstep::testing {
namespace {

std::vector<std::string> environment_of_this_process() {
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) variables.emplace_back(*variable);
  return variables;
}

std::vector<rlim_t> limits_of_this_process() {
  std::vector<rlim_t> limits;
  for (int resource = 0; resource < RLIM_NLIMITS; ++resource) {
    struct rlimit limit = {};
    ::getrlimit(static_cast<__rlimit_resource>(resource), &limit);
    limits.insert(limits.end(), {limit.rlim_cur, limit.rlim_max});
  }
  return limits;
}

/// Whether a library may read the variable when it is loaded: the loader, malloc, OpenMP, LibTorch, CUDA,
/// sanitizers and GoogleTest.
[[maybe_unused]] bool read_at_load(std::string_view name) {
  for (const char* prefix : {"LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_",
                             "TORCH_", "PYTORCH_", "ATEN_", "C10_", "CUDA_", "NVIDIA_", "NCCL_", "GTEST_"}) {
    if (name.starts_with(prefix)) return true;
  }
  return name.ends_with("SAN_OPTIONS");
}

/// What a program was started with, which the server then has, too.
struct Start {
  std::vector<std::string> environment = environment_of_this_process();
  std::vector<rlim_t> limits = limits_of_this_process();
};

const Start& start_of_this_process() {
  static const Start start;
  return start;
}

/// None before the first rank.
std::optional<launch::ForkServer>& server() {
  static std::optional<launch::ForkServer> server;
  return server;
}

void start_server() {
  // What libraries read when they are loaded is as in a rank that is started afresh.
  std::vector<std::string> variables;
  for (const auto& variable : start_of_this_process().environment) {
    if (!variable.starts_with("GTEST_") && !variable.starts_with("OMP_NUM_THREADS="))
      variables.push_back(variable);
  }
  variables.emplace_back("OMP_NUM_THREADS=1");
  server().emplace(launch::WorkerSpec{.program = "/proc/self/exe",
                                      .arguments = {::program_invocation_name},
                                      .environment = std::move(variables)});
}

}  // namespace

void start_as_rank_or_return(int& argc, char**& argv) {
  start_of_this_process();
  const std::vector<std::string>* given = launch::forked_arguments();
  if (given == nullptr) return;
  // For the rest of the process's life, in which it is argv.
  static std::vector<char*> arguments;
  for (const auto& argument : *given) arguments.push_back(const_cast<char*>(argument.c_str()));
  argc = static_cast<int>(arguments.size());
  arguments.push_back(nullptr);
  argv = arguments.data();
}

bool can_fork_rank(const std::vector<std::pair<std::string, std::optional<std::string>>>& changes) {
#ifdef __SANITIZE_THREAD__
  (void)changes;
  return false;
#else
  for (const auto& change : changes) {
    if (read_at_load(change.first)) return false;
  }
  const auto of_load = [](std::vector<std::string> variables) {
    std::erase_if(variables, [](const std::string& variable) {
      return !read_at_load(variable.substr(0, variable.find('=')));
    });
    std::sort(variables.begin(), variables.end());
    return variables;
  };
  return of_load(environment_of_this_process()) == of_load(start_of_this_process().environment) &&
         limits_of_this_process() == start_of_this_process().limits;
#endif
}

std::optional<launch::MadeProcess> fork_rank(const launch::WorkerSpec& spec) {
  // One ends with the thread that has started it.
  if (!server() || server()->has_ended()) start_server();
  return server()->fork(spec);
}

void stop_rank_server() {
  server().reset();
}

}  // namespace lockstep::testing
