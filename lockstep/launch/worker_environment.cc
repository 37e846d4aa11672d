#include <cerrno>
#include <cstring>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/launch/worker_environment.h>
#include <lockstep/rendezvous/exit_status_table.h>

extern char** environ;

namespace lockstep::launch {
namespace {

// Why `path` can't be started, or nothing when it can.
std::optional<std::string> objection(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return std::string(std::strerror(errno));
  if (S_ISDIR(status.st_mode)) return "it is a directory";
  if (!S_ISREG(status.st_mode)) return "it is not a regular file";
  if (::access(path.c_str(), X_OK) != 0) {
    if (errno != EACCES) return std::string(std::strerror(errno));
    return path.ends_with(".py") ? "it is not executable; start a Python script as: python " + path
                                 : "it is not executable; chmod +x it, or put its interpreter in front";
  }
  return std::nullopt;
}

}  // namespace

WorkerEnvironment WorkerEnvironment::inherited() {
  WorkerEnvironment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    std::string_view text(*entry);
    auto equals = text.find('=');
    if (equals == std::string_view::npos || equals == 0) continue;
    result.variables_.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  for (const char* name : {ExitStatusTable::kVariable, "LOCKSTEP_JOB_SECRET", "LOCKSTEP_SPAWN",
                           "LOCKSTEP_RUN", "TORCHELASTIC_ERROR_FILE"}) {
    result.unset(name);
  }
  return result;
}

std::vector<std::string> WorkerEnvironment::strings() const {
  std::vector<std::string> result;
  result.reserve(variables_.size());
  for (const auto& [name, value] : variables_) result.push_back(name + "=" + value);
  return result;
}

void RankVariables::apply(WorkerEnvironment& environment) const {
  environment.set("RANK", std::to_string(first_rank + local_rank));
  environment.set("ROLE_RANK", std::to_string(first_role_rank + local_rank));
  environment.set("WORLD_SIZE", std::to_string(world_size));
  environment.set("ROLE_WORLD_SIZE", std::to_string(role_world_size));
  environment.set("LOCAL_RANK", std::to_string(local_rank));
  environment.set("LOCAL_WORLD_SIZE", std::to_string(nprocs));
  environment.set("GROUP_RANK", std::to_string(group_rank));
  environment.set("GROUP_WORLD_SIZE", std::to_string(group_size));
  environment.set("ROLE_NAME", role);
  const std::string port = std::to_string(store_port);
  environment.set("MASTER_ADDR", store_host);
  environment.set("MASTER_PORT", port);
  environment.set("TORCHELASTIC_RESTART_COUNT", std::to_string(restart_count));
  environment.set("TORCHELASTIC_MAX_RESTARTS", std::to_string(max_restarts));
  environment.set("TORCHELASTIC_RUN_ID", run_id);
  environment.set("TORCHELASTIC_USE_AGENT_STORE", "True");
  // Programs set MASTER_ADDR and MASTER_PORT themselves; this tells that the agent's store is not there then.
  environment.set("LOCKSTEP_AGENT_STORE", store_host + ":" + port + "/" + run_id);
  if (!environment.has("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
    environment.set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
}

std::string make_run_id() {
  return to_hex(random_bytes<8>());
}

std::string find_program(const std::string& name) {
  TORCH_CHECK_VALUE(!name.empty(), "no program to start was given");
  if (name.find('/') != std::string::npos) {
    auto reason = objection(name);
    TORCH_CHECK_VALUE(!reason, "can't start '", name, "': ", *reason);
    return name;
  }
  const std::string path = environment::text("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (!objection(candidate)) return candidate;
    begin = end + 1;
  }
  const bool here = ::access(name.c_str(), F_OK) == 0;
  TORCH_CHECK_VALUE(false, "can't start '", name, "': no such program in PATH",
                    here ? "; for the file in this folder write ./" + name : std::string());
}

}  // namespace lockstep::launch
