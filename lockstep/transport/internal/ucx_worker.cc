#if LOCKSTEP_UCX
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <netdb.h>
#include <pthread.h>
#include <set>
#include <sstream>
#include <sys/socket.h>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/transport/internal/ucx_worker.h>

namespace lockstep::transport::internal {
namespace {

namespace fs = std::filesystem;

/// InfiniBand and RoCE, as UCX calls them ("mlx5_0:1").
std::vector<std::string> rdma_ports() {
  std::vector<std::string> ports;
  std::error_code ignored;
  for (const auto& device : fs::directory_iterator("/sys/class/infiniband", ignored)) {
    for (const auto& port : fs::directory_iterator(device.path() / "ports", ignored)) {
      std::string state;
      std::getline(std::ifstream(port.path() / "state"), state);
      if (state.find("ACTIVE") == std::string::npos) continue;
      ports.push_back(device.path().filename().string() + ":" + port.path().filename().string());
    }
  }
  return ports;
}

/// Where this process takes connections: "10.0.0.1:20003".
std::set<std::string> listening_addresses() {
  std::set<std::string> addresses;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd", ignored)) {
    const int fd = std::atoi(entry.path().filename().c_str());
    int listens = 0;
    socklen_t length = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) != 0 || listens == 0) continue;
    sockaddr_storage address{};
    length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (::getsockname(fd, generic, &length) != 0) continue;
    const bool v6 = address.ss_family == AF_INET6;
    if (!v6 && address.ss_family != AF_INET) continue;
    std::array<char, NI_MAXHOST> host{};
    std::array<char, NI_MAXSERV> port{};
    ::getnameinfo(generic, length, host.data(), host.size(), port.data(), port.size(),
                  NI_NUMERICHOST | NI_NUMERICSERV);
    addresses.insert((v6 ? "[" : "") + std::string(host.data()) + (v6 ? "]:" : ":") + port.data());
  }
  return addresses;
}

}  // namespace

UcxWorker::Handles::~Handles() {
  if (worker != nullptr) ucx.ucp_worker_destroy(worker);
  if (datatype) ucx.ucp_dt_destroy(*datatype);
  if (context != nullptr) ucx.ucp_cleanup(context);
}

UcxWorker::UcxWorker(const UcxLibrary& ucx, const std::string& interface, const ucp_generic_dt_ops_t& type)
    : ucx_(ucx), handles_(ucx) {
  // UCX starts a thread; signals are the program's business.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  try {
    open(interface, type);
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void UcxWorker::check(ucs_status_t status, const std::string& what) const {
  TORCH_CHECK_WITH(DistBackendError, status == UCS_OK, "UCX ", ucx_.ucp_get_version_string(), " can't ", what,
                   ": ", ucx_.ucs_status_string(status));
}

void UcxWorker::open(const std::string& interface, const ucp_generic_dt_ops_t& type) {
  ucp_config_t* config = nullptr;
  check(ucx_.ucp_config_read(nullptr, nullptr, &config), "read its configuration");
  const auto set = [&](const char* name, const std::string& value) {
    if (!environment::text((std::string("UCX_") + name).c_str())) {
      ucx_.ucp_config_modify(config, name, value.c_str());
    }
  };
  const std::vector<std::string> rdma = rdma_ports();
  // Ranks of one host share memory by the transport's own means; those of two containers on one host must
  // not, for what UCX takes for one host may lie in two namespaces.
  set("TLS", "^sm");
  std::string devices = interface;
  for (const std::string& port : rdma) devices += "," + port;
  if (!interface.empty()) set("NET_DEVICES", devices);
  // Over TCP a rendezvous before each long message costs a round trip, which waits behind all that is queued.
  if (rdma.empty()) set("RNDV_THRESH", "inf");

  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  const ucs_status_t status =
      ucx_.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &handles_.context);
  ucx_.ucp_config_release(config);
  const std::string use =
      interface.empty() ? std::string("use the network") : "use the network interface '" + interface + "'";
  check(status, use);
  const std::string found = this->devices();
  if (found.empty()) check(UCS_ERR_NO_DEVICE, use);  // UCX itself is content with sending to itself
  const std::set<std::string> before = listening_addresses();
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  check(ucx_.ucp_worker_create(handles_.context, &worker, &handles_.worker), "open a connection");
  description_ = std::string("UCX ") + ucx_.ucp_get_version_string() + " (" + found;
  for (const std::string& address : listening_addresses()) {
    if (before.count(address) == 0) description_ += ", at " + address;
  }
  description_ += ')';
  check(ucx_.ucp_worker_get_efd(handles_.worker, &event_fd_), "wait for events");
  ucp_datatype_t datatype = 0;
  check(ucx_.ucp_dt_create_generic(&type, nullptr, &datatype), "make a datatype");
  handles_.datatype = datatype;
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  check(ucx_.ucp_worker_get_address(handles_.worker, &address, &bytes), "tell its address");
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  ucx_.ucp_worker_release_address(handles_.worker, address);
}

/// "tcp/eth0": from what UCX prints, which nothing else tells in all versions.
std::string UcxWorker::devices() const {
  char* text = nullptr;
  size_t bytes = 0;
  std::FILE* stream = ::open_memstream(&text, &bytes);
  if (stream == nullptr) return "";
  ucx_.ucp_context_print_info(handles_.context, stream);
  std::fclose(stream);
  std::istringstream lines(std::string(text, bytes));
  std::free(text);
  std::string devices;
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find(" -- ");
    if (line.find("resource") == std::string::npos || at == std::string::npos) continue;
    const std::string device = line.substr(at + 4, line.find_last_not_of(" \t") + 1 - (at + 4));
    if (!device.starts_with("self/")) devices += (devices.empty() ? "" : ", ") + device;
  }
  return devices;
}

}  // namespace lockstep::transport::internal

#endif
