#include <algorithm>
#include <filesystem>
#include <net/if.h>
#include <sstream>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/json_value.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/doctor/gather.h>
#include <lockstep/doctor/internal/files.h>
#include <lockstep/doctor/rank_facts.h>
#include <lockstep/rendezvous/launch_environment.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/port_range.h>
#include <lockstep/rendezvous/process_watch.h>

namespace lockstep::doctor {

using internal::fingerprint_file;

namespace {

std::string cpu_model() {
  std::istringstream lines(read_kernel_file("/proc/cpuinfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const auto colon = line.find(": ");
    if (colon != std::string::npos && (line.starts_with("model name") || line.starts_with("CPU part"))) {
      return line.substr(colon + 2);
    }
  }
  return "";
}

int local_rank() {
  try {
    return read_launch_environment(environment::text).local_rank;
  } catch (const c10::Error&) {
    return -1;  // rendezvous() has succeeded with other arguments
  }
}

int mtu_of(const std::string& interface) {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  interface.copy(request.ifr_name, sizeof request.ifr_name - 1);
  return socket && ::ioctl(socket.get(), SIOCGIFMTU, &request) == 0 ? request.ifr_mtu : 0;
}

/// What is wished and can't be had stays empty: rendezvous or joining says why.
void gather_wire_facts(RankFacts& facts, const std::string& meeting_host) {
  try {
    const NetworkInterface interface = interface_between_hosts(meeting_host);
    facts.interface = interface.name;
    facts.address = interface.address;
    facts.mtu = mtu_of(interface.name);
    if (const auto range = port_range()) facts.ports = range->count();
  } catch (const c10::Error&) {
  }
}

/// Each field, with its name in JSON.
template <class Facts, class Visit>
void visit_fields(Facts& facts, const Visit& visit) {
  visit("rank", facts.rank);
  visit("pid", facts.pid);
  visit("hostname", facts.hostname);
  visit("host", facts.host);
  visit("user", facts.user);
  visit("local_rank", facts.local_rank);
  visit("cores", facts.cores);
  visit("core_quota", facts.core_quota);
  visit("host_cores", facts.host_cores);
  visit("gpus", facts.gpus);
  visit("cpu", facts.cpu);
  visit("executable", facts.executable);
  visit("executable_fingerprint", facts.executable_fingerprint);
  visit("lockstep_version", facts.lockstep_version);
  visit("lockstep_fingerprint", facts.lockstep_fingerprint);
  visit("torch_version", facts.torch_version);
  visit("torch_fingerprint", facts.torch_fingerprint);
  visit("program", facts.program);
  visit("program_fingerprint", facts.program_fingerprint);
  visit("environment", facts.environment);
  visit("kernel", facts.kernel);
  visit("interface", facts.interface);
  visit("address", facts.address);
  visit("mtu", facts.mtu);
  visit("ports", facts.ports);
  visit("memory", facts.memory);
  visit("open_files", facts.open_files);
}

template <class T>
void write(nlohmann::json& json, const char* name, const T& value) {
  json[name] = value;
}
template <class T>
void write(nlohmann::json& json, const char* name, const std::optional<T>& value) {
  if (value) json[name] = *value;
}

template <class T>
void read(const nlohmann::json& json, const char* name, T& value) {
  if (auto found = json.find(name); found != json.end() && !found->is_null()) value = json_value<T>(*found);
}
template <class T>
void read(const nlohmann::json& json, const char* name, std::optional<T>& value) {
  if (json.contains(name)) read(json, name, value.emplace());
}

}  // namespace

RankFacts gather_rank_facts(int rank, const std::string& program, const std::string& meeting_host) {
  const Facts machine = gather_machine();
  const Software software = gather_software();
  const ProcessIdentity process = this_process();
  RankFacts facts;
  facts.rank = rank;
  facts.pid = process.pid;
  facts.hostname = process.host.hostname;
  facts.host = process.host.key();
  facts.user = ::geteuid();
  facts.local_rank = local_rank();
  facts.cores = machine.cores.allowed;
  facts.core_quota = machine.cores.quota;
  facts.host_cores = machine.cores.online;
  facts.gpus = machine.gpu.device_files;
  facts.cpu = cpu_model();
  std::error_code ignored;
  facts.executable = std::filesystem::read_symlink("/proc/self/exe", ignored).string();
  facts.executable_fingerprint = fingerprint_file("/proc/self/exe").value_or("");
  facts.lockstep_version = software.lockstep_version;
  facts.lockstep_fingerprint = fingerprint_file(software.lockstep_path).value_or("");
  facts.torch_version = software.torch_loaded +
                        (software.torch_cuda.empty() ? "" : "+CUDA " + software.torch_cuda) +
                        (software.torch_commit.empty() ? "" : " " + software.torch_commit.substr(0, 12));
  facts.torch_fingerprint = fingerprint_file(software.torch_path).value_or("");
  facts.program = program;
  if (!program.empty()) facts.program_fingerprint = fingerprint_file(program).value_or("");
  facts.environment = gather_environment();
  facts.kernel = machine.kernel.release;
  gather_wire_facts(facts, meeting_host);
  facts.memory =
      std::min(machine.memory.available, machine.memory.cgroup_left.value_or(machine.memory.available));
  facts.open_files = machine.limits.open_files.soft;
  return facts;
}

std::string to_json(const RankFacts& facts) {
  nlohmann::json json;
  visit_fields(facts, [&](const char* name, const auto& value) { write(json, name, value); });
  return json_text(json);
}

std::optional<RankFacts> parse_rank_facts(const std::string& text) {
  try {
    const auto json = nlohmann::json::parse(text);
    if (!json.is_object()) return std::nullopt;
    RankFacts facts;
    visit_fields(facts, [&](const char* name, auto& value) { read(json, name, value); });
    if (facts.core_quota && *facts.core_quota <= 0) facts.core_quota.reset();
    return facts;
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::doctor
